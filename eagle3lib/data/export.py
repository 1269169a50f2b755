"""The answers as an Arrow dataset, for others to train on, and back.

What differs in shape from row to row (messages, tools and their arguments, sampling) is a column of
JSON text: Arrow would merge the keys of all rows into one schema, and fill it with nulls.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import replace_folder

if TYPE_CHECKING:
    from datasets import Features

_JSON = ("messages", "tools", "tool_calls", "sampling")
_IDS = ("prompt_token_ids", "answer_token_ids")
_TYPES = {"looping": "bool", **dict.fromkeys(("loop_tokens", "repeat", "turn"), "int64")}


def export_dataset(folder: Path, to: Path | None = None) -> Path:
    """Write the answers of ``folder`` as a ``datasets`` folder (default: ``dataset`` in it).

    Whole or not at all; one schema, whichever rows there are. Raises ``UserError`` when there are
    no answers, or when a text can't be UTF-8, which Arrow asks for.
    """
    from datasets import Dataset

    rows = read_answers(folder)
    if not rows:
        raise UserError("there are no answers to export", where=folder, next="run phase 01 first")
    table = [_packed(row, folder) for row in rows]
    dataset = Dataset.from_list(table, features=_features())
    return replace_folder(to or folder / "dataset", lambda path: dataset.save_to_disk(str(path)))


def read_dataset(path: Path) -> list[AnswerRow]:
    """The rows of :func:`export_dataset`, equal to those that were exported."""
    from datasets import Dataset

    rows = Dataset.load_from_disk(str(path)).to_list()
    return [AnswerRow(**{k: _unpacked(k, v) for k, v in row.items()}) for row in rows]


def _features() -> Features:
    from datasets import Features, List, Value

    return Features(
        {
            f.name: List(Value("int64")) if f.name in _IDS else Value(_TYPES.get(f.name, "string"))
            for f in fields(AnswerRow)
        }
    )


def _packed(row: AnswerRow, folder: Path) -> dict[str, Any]:
    packed = asdict(row)
    for name in _JSON:
        packed[name] = json.dumps(packed[name])  # ASCII: exact for any text
    for name, value in packed.items():
        if isinstance(value, str) and not _is_utf8(value):
            raise UserError(
                f"{name} of row {row.id} holds half a surrogate pair",
                expected="text that UTF-8 can hold",
                where=folder / "answers.jsonl",
            )
    return packed


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unpacked(name: str, value: Any) -> Any:
    return json.loads(value) if name in _JSON else value
