"""Rows out of JSONL, JSON, Parquet, CSV, a saved ``datasets`` folder or the Hub, one at a time.

A row that can't be read is handed on with its place and the reason, so that one bad line stops
nothing; only a source that can't be read at all is a ``UserError``. Places are ``file:LINE``
where lines exist, else ``file:row N``, both counted from 1.
"""

from __future__ import annotations

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.data.messages import ANSWER_COLUMNS
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.phase_params import hub_id, resolve

# The columns that a prompt can be made of: wide data sets carry images and scores beside them.
PROMPT_COLUMNS = (
    "messages", "conversations", "prompt", "instruction", "input", "text", "system", "tools",
)  # fmt: skip
COLUMNS = (*PROMPT_COLUMNS, *ANSWER_COLUMNS)
_BATCH_ROWS = 1000
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class ReadRow:
    """``value`` as it stands in the source; or ``problem``, why it can't be read."""

    where: str
    value: Any = None
    problem: str = ""


def source_name(source: str | Path) -> str:
    """The short name of a source, as places and summaries show it."""
    return (isinstance(source, str) and hub_id(source)) or Path(source).name


def read_rows(source: str | Path) -> Iterator[ReadRow]:
    """Rows of ``source``: a path (a ``str`` is relative to the repository) or a Hub id.

    Raises ``UserError`` when there is no such source, or when it is not what its name says.
    """
    hub = hub_id(source) if isinstance(source, str) else ""
    if hub:
        yield from _dataset_rows(hub, _load_from_hub(hub))
        return
    path = resolve(source) if isinstance(source, str) else source
    if path.is_dir():
        yield from _dataset_rows(path.name, _load_from_folder(path))
    elif not path.is_file():
        raise UserError(
            "there is no file of prompts or answers",
            expected="a .jsonl, .json, .parquet or .csv file, a datasets folder, or hub:ORG/NAME",
            where=path,
        )
    else:
        yield from _READERS.get(path.suffix.lower(), _read_jsonl)(path)


def _read_jsonl(path: Path) -> Iterator[ReadRow]:
    # A binary file is iterated by "\n" alone; str.splitlines also splits at U+2028 and U+0085.
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                value, problem = _parse_json(line)
                yield ReadRow(f"{path.name}:{number}", value, problem)


def _parse_json(raw: bytes) -> tuple[Any, str]:
    """(the value, "") or (None, why it is not JSON)."""
    try:
        return json.loads(raw.decode("utf-8")), ""
    except UnicodeDecodeError:
        return None, "not UTF-8"
    except json.JSONDecodeError as error:
        return None, f"not JSON: {error.msg}"
    except RecursionError:
        return None, "not JSON: nested too deeply"
    except ValueError:  # Python reads no integer of more than 4300 digits
        return None, "not JSON: a number that is too long"


def _read_json(path: Path) -> Iterator[ReadRow]:
    """A list of rows, an object with one list of rows, or one row."""
    value, problem = _parse_json(path.read_bytes().removeprefix(_BOM))
    if problem == "not JSON: Extra data":  # one object a line: JSONL under another name
        yield from _read_jsonl(path)
        return
    if isinstance(value, dict):
        lists = [item for item in value.values() if isinstance(item, list)]
        is_row = any(key in value for key in PROMPT_COLUMNS)
        value = [value] if is_row else lists[0] if len(lists) == 1 else value
    if not isinstance(value, list):
        found = problem or f"{type(value).__name__} without one list in it"
        raise UserError(
            f"not a list of rows: {found}",
            expected="a list of objects, or an object that holds one list",
            where=path,
        )
    for number, row in enumerate(value, start=1):
        yield ReadRow(f"{path.name}:row {number}", row)


def _read_csv(path: Path) -> Iterator[ReadRow]:
    """Rows by the line on which they start; an empty cell is as if its column were not there."""
    before = csv.field_size_limit(sys.maxsize)  # 128 KiB by default: less than a long prompt
    try:
        # Bytes that are not UTF-8 come in as surrogates, so that they spoil one row only.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            while True:
                where = f"{path.name}:{reader.line_num + 1}"
                try:
                    cells = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    _raise_if_torn(error, path, where)
                    yield ReadRow(where, problem=f"not CSV: {error}")
                    continue
                if cells:
                    yield _csv_row(where, header, cells)
    finally:
        csv.field_size_limit(before)


def _raise_if_torn(error: csv.Error, path: Path, where: str) -> None:
    """A quote that is never closed swallows the rest of the file: more than one row is lost."""
    if "unexpected end of data" in str(error):
        raise UserError(f"a quote opened at {where} is never closed", where=path) from None


def _csv_row(where: str, header: list[str], cells: list[str]) -> ReadRow:
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return ReadRow(where, problem="not UTF-8")
    if len(cells) != len(header):
        return ReadRow(where, problem="not as many cells as the header has")
    row: dict[str, Any] = dict(zip(header, cells, strict=True))
    return ReadRow(where, {key: cell for key, cell in row.items() if cell})


def _read_parquet(path: Path) -> Iterator[ReadRow]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            columns = _known(file.schema_arrow.names)
            yield from _batch_rows(path.name, file.iter_batches(_BATCH_ROWS, columns=columns))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"not readable as Parquet: {error}", where=path) from None


def _load_from_folder(path: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"not a saved datasets folder: {error}",
            expected="a folder that save_to_disk wrote",
            where=path,
        ) from None


def _load_from_hub(name: str) -> Any:
    import datasets
    import httpx

    try:
        return datasets.load_dataset(name, split="train")
    # OSError: not there, not allowed, no network; ValueError: no such split or configuration.
    except (OSError, ValueError, RuntimeError, httpx.HTTPError) as error:
        raise UserError(
            f"could not load {name!r} from the Hub: {' '.join(str(error).split())[:300]}",
            expected="a file or folder that is there, or a data set that the Hub can give",
            next="check the spelling and the network, or name a local file",
        ) from None


def _dataset_rows(name: str, dataset: Any) -> Iterator[ReadRow]:
    if hasattr(dataset, "keys"):  # a DatasetDict
        splits = list(dataset)
        chosen = "train" if "train" in splits else splits[0]
        if len(splits) > 1 and chosen != "train":
            raise UserError(f"none of the splits {splits} is 'train'", where=name)
        dataset = dataset[chosen]
    dataset = dataset.select_columns(_known(dataset.column_names)).with_format("arrow")
    yield from _batch_rows(name, dataset.iter(_BATCH_ROWS))


def _known(names: list[str]) -> list[str]:
    """The columns that are read: all of them where none is known, so that a reason can tell."""
    if not any(name in PROMPT_COLUMNS for name in names):
        return list(names)
    return [name for name in names if name in COLUMNS]


def _batch_rows(name: str, batches: Iterable[Any]) -> Iterator[ReadRow]:
    number = 0
    for batch in batches:
        for value, problem in _plain_rows(batch):
            number += 1
            yield ReadRow(f"{name}:row {number}", without_nulls(value), problem)


def _plain_rows(batch: Any) -> list[tuple[Any, str]]:
    """(row, "") of an Arrow batch; Arrow may hold bytes that are not UTF-8, which spoil one row."""
    try:
        return [(row, "") for row in batch.to_pylist()]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [(None, "not UTF-8")]
        return [pair for i in range(batch.num_rows) for pair in _plain_rows(batch.slice(i, 1))]


def without_nulls(value: Any) -> Any:
    """Arrow gives every row all the fields that any row has: those that are null were not there."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


_READERS = {".json": _read_json, ".parquet": _read_parquet, ".csv": _read_csv}
