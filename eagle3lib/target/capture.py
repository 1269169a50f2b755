"""Capture hidden states into shards, in this process or from an engine: the same files.

In this process (forward.py) rows are packed end to end; a target that can't be packed runs in
length-sorted batches, padded on the right (its share is reported).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.target.folder import Target
from eagle3lib.target.forward import forward_states, length_batches
from eagle3lib.target.images import check_media, picture_names
from eagle3lib.target.model import DTYPES, TargetHead, decoder_of, load_target
from eagle3lib.target.packing import can_pack
from eagle3lib.target.states import (
    StateEntry,
    captured_row,
    entry_of,
    finished_shard,
    state_problem,
    write_index,
    write_shard,
)
from eagle3lib.target.storage import check_format
from eagle3lib.target.storage_bytes import bytes_per_token

MADE_OF = "capture.json"  # what the shards of a folder were made of; a resumed capture compares
_SPARE_BYTES = 256 * 2**20  # left free on the disk


@dataclass(frozen=True)
class CaptureResult:
    conversations: int
    tokens: int
    padding_share: float
    captured_tokens: int  # in this call; the rest was there already
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        return round(self.captured_tokens / self.seconds, 1) if self.captured_tokens else None


@runtime_checkable  # signatures are checked under test
class StateSource(Protocol):
    """Where states come from. Opened for the first shard that is to be made, closed at the end."""

    cells: int  # tokens computed so far, padding included
    shows_images: bool  # whether ``states`` takes pictures, by name, for each row

    def states(
        self, rows: list[list[int]], pictures: list[list[str]] | None = None
    ) -> list[Tensor]:
        """The states [T, S + 1, H] of each row of token ids, slots first, then ``last``."""
        ...

    def __enter__(self) -> StateSource: ...

    def __exit__(self, *_: object) -> None: ...


@dataclass
class InProcess:
    """The target in this process, through transformers."""

    target: Target
    slots: tuple[int, ...]
    dtype: str
    batch_tokens: int
    device: str = "cpu"
    trust_remote_code: bool = False
    cells: int = 0
    model: Any = field(default=None, init=False)
    shows_images = True
    _sees: bool = field(default=False, init=False)

    def __enter__(self) -> InProcess:
        self._load()
        return self

    def __exit__(self, *_: object) -> None:
        self.model = None

    def _load(self, vision: bool = False) -> None:
        self.model = None  # there may be no room for two
        self.model = load_target(
            self.target,
            self.dtype,
            self.device,
            trust_remote_code=self.trust_remote_code,
            vision=vision,
        )
        self._sees = vision

    def states(
        self, rows: list[list[int]], pictures: list[list[str]] | None = None
    ) -> list[Tensor]:
        if pictures and any(pictures) and not self._sees:
            self._load(vision=True)
        pads = not can_pack(decoder_of(self.model))
        made: dict[int, Tensor] = {}
        for batch in length_batches([len(r) for r in rows], self.batch_tokens, pads=pads):
            lengths = [len(rows[i]) for i in batch]
            self.cells += len(batch) * max(lengths) if pads else sum(lengths)
            shown = [pictures[i] for i in batch] if pictures else None
            states = forward_states(
                self.model, [rows[i] for i in batch], self.slots, self.target, shown
            )
            made |= dict(zip(batch, states, strict=True))
        return [made[i] for i in range(len(rows))]


def capture(
    target: Target,
    rows: list[AnswerRow],
    folder: Path,
    *,
    slots: tuple[int, ...],
    dtype: str,
    batch_tokens: int,
    shard_rows: int,
    state_format: str = "full",
    on_tokens: Callable[[int], None] = lambda n: None,
    source: StateSource | None = None,
    sample_of: int = 0,
) -> CaptureResult:
    """Capture every row's states into ``folder``; finished shards of an interrupted run are kept.

    ``sample_of``: how many answers there are, where ``rows`` are a sample of them. ``source`` is
    ``InProcess`` on the CPU unless one is given. Raises ``UserError`` when a row's states are not
    finite, all zero, or stuck, when the disk is too small, when a prompt holds images that the
    source can't show, when the format can't hold the states, and when the folder's shards were made
    of another target, dtype or slots.
    """
    check_format(state_format, target.hidden_size)
    source = source or InProcess(target, slots, dtype, batch_tokens)
    check_media(target, rows, shown=source.shows_images)
    made_of = {"target": target.fingerprint, "slots": list(slots), "dtype": dtype}
    _bind(folder, made_of | {"sample_of": sample_of})
    started, tokens = time.perf_counter(), 0
    entries: list[StateEntry] = []
    parts = shard_parts(rows, shard_rows)
    found = {
        name: finished_shard(folder, name, [entry_of(row) for row in part], state_format)
        for name, part in parts.items()
    }
    missing = sum(_length(r) for name in parts if not found[name] for r in parts[name])
    numbers = {"slots": len(slots), "number_bytes": DTYPES[dtype].itemsize}
    check_disk(folder, missing * bytes_per_token(target.hidden_size, state_format, **numbers))
    with contextlib.ExitStack() as opened:
        for name, part in parts.items():
            done = found[name]
            if done is None:
                if not tokens:
                    opened.enter_context(source)
                done = _capture_shard(source, target.media_ids, part, folder, name, state_format)
                tokens += sum(_length(r) for r in part)
            entries += done
            on_tokens(sum(_length(r) for r in part))
    _drop_other_shards(folder, set(parts))
    write_index(
        folder,
        entries,
        slots=slots,
        dtype=dtype,
        fingerprint=target.fingerprint,
        state_format=state_format,
    )
    seconds = time.perf_counter() - started
    waste = 1 - tokens / source.cells if source.cells else 0.0
    return CaptureResult(len(rows), sum(e.tokens for e in entries), waste, tokens, seconds)


def shard_parts(rows: list[AnswerRow], shard_rows: int) -> dict[str, list[AnswerRow]]:
    """Shard name -> its rows, neighbours in length."""
    ordered = sorted(rows, key=lambda r: (_length(r), r.id))
    starts = range(0, len(ordered), shard_rows)
    return {f"shard-{i:05d}": ordered[s : s + shard_rows] for i, s in enumerate(starts)}


def check_disk(folder: Path, needed_bytes: float) -> None:
    """Raise ``UserError`` when ``needed_bytes`` of new states don't fit beside a small reserve."""
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if needed_bytes + _SPARE_BYTES > free:
        raise UserError(
            f"{free / 1e9:.1f} GB are free, the states still to be made need "
            f"{needed_bytes / 1e9:.1f} GB",
            expected=f"{(needed_bytes + _SPARE_BYTES) / 1e9:.1f} GB free",
            where=folder,
            next="make room, or ask fewer prompts in phase 01; finished shards are kept",
        )


def _bind(folder: Path, made_of: dict[str, Any]) -> None:
    """Tie the folder to what its states are made of, and clear what a killed run left half done."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / MADE_OF
    before = {"sample_of": 0} | read_json(path) if path.exists() else made_of
    changed = [key for key in made_of if before.get(key) != made_of[key]]
    if changed:
        raise UserError(
            "; ".join(f"{k}: {before.get(k)} there, {made_of[k]} now" for k in changed),
            expected="states of one target, dtype and choice of slots in a folder",
            where=path,
            next="another run name, or delete the folder with its shards",
        )
    for stale in folder.glob(".shard-*.tmp"):
        stale.unlink()
    write_json(path, made_of)


def sampled_from(folder: Path) -> int:
    """How many answers there are, where a folder holds the states of a sample of them; else 0."""
    path = folder / MADE_OF
    return int(read_json(path).get("sample_of", 0)) if path.exists() else 0


def _drop_other_shards(folder: Path, names: set[str]) -> None:
    """Shards of an earlier, larger set of rows are in no index; they would only fill the disk."""
    for path in folder.glob("shard-*"):
        if path.name.split(".")[0] not in names:
            path.unlink()


def _length(row: AnswerRow) -> int:
    return len(row.prompt_token_ids) + len(row.answer_token_ids)


def _capture_shard(
    source: StateSource,
    media: set[int],
    part: list[AnswerRow],
    folder: Path,
    name: str,
    state_format: str,
) -> list[StateEntry]:
    ids = [row.prompt_token_ids + row.answer_token_ids for row in part]
    pictures = [
        picture_names(row.messages) if media.intersection(row.prompt_token_ids) else []
        for row in part
    ]
    states = source.states(ids, pictures) if any(pictures) else source.states(ids)
    captured = []
    for row, row_ids, made in zip(part, ids, states, strict=True):
        if len(made) != len(row_ids):
            problem = f"{len(made)} states for {len(row_ids)} tokens"
        else:
            problem = state_problem(made, torch.tensor(row_ids))
        if problem:
            raise UserError(
                f"conversation {row.id}: {problem}",
                where=folder,
                expected="finite, distinct hidden states, one for each token",
                next="capture with dtype=float32; if that fails too, check the weights",
            )
        captured.append(captured_row(entry_of(row), row_ids, made))
    with _disk_full_is_told(folder):
        return write_shard(folder, name, captured, state_format)


@contextlib.contextmanager
def _disk_full_is_told(folder: Path) -> Any:
    """A full disk, whoever says it: the operating system, or safetensors in a text of its own."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
        if not full and "No space left" not in str(error) and "quota" not in str(error):
            raise
        raise UserError(
            f"the disk is full: {error}",
            where=folder,
            next="make room and run the phase again; finished shards are kept",
        ) from None


def teacher_agreement(
    head: TargetHead, token_ids: Tensor, last: Tensor, prompt_tokens: int
) -> tuple[int, int]:
    """(answer tokens that the states' own greedy next token equals, answer tokens).

    The state after x[i] predicts x[i + 1]; the first answer token is predicted by the last of the
    prompt. Near 100 % for greedy answers; a wrong layer or a second norm gives about a third.
    """
    predicted = head.greedy(last[prompt_tokens - 1 : -1].to(head.norm.dtype))
    return int((predicted == token_ids[prompt_tokens:]).sum()), len(token_ids) - prompt_tokens
