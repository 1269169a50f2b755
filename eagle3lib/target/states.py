"""Captured hidden states on disk: safetensors shards of many conversations, with an index.

    states/shard-00000.safetensors   hidden_states [N, S, ...], token_ids [N], last [A, ...], and
                                     the scales of formats that have some (``storage.py``)
    states/shard-00000.json          its entries, size and SHA-256: a capture resumes from these
    states/index.json                layout, convention, slots, dtype, format, target, shards, and
                                     for each conversation a ``StateEntry``

Slots are HF ``hidden_states`` indices (the state before that layer). ``last`` is the pre-norm input
of the target's final norm, stored from the last prompt token on: A is the sum over conversations of
answer tokens + 1. Nothing is taught at earlier positions (``drafter/align.py``): a base position p
is at least prompt_tokens - 1 and its labels come from the states at p + 1 and after. The index is
written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_atomic, write_json
from eagle3lib.lab.finding import Finding, raise_errors
from eagle3lib.target.storage import Part, check_format, decode, encode, tensor_names

CONVENTION = "HF hidden_states index (before layer i); last = input of the final norm"
LAYOUT = 2  # 1 stored the last state of prompt tokens too
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_AGAIN = "run the capture again, it makes this shard anew: eagle3 run PROFILE 02"


@dataclass(frozen=True)
class StateEntry:
    """Where one conversation's states lie. ``mean_square`` guards against zeros, ``ids_hash``
    against swaps."""

    id: str
    set: str
    split: str
    shard: str  # "" for states that are not stored
    start: int
    tokens: int
    prompt_tokens: int
    mean_square: float | None  # None: not known before they are made
    last_start: int = 0  # its first row in ``last``
    ids_hash: str = ""

    @property
    def first_taught(self) -> int:
        return first_taught(self.prompt_tokens)


@dataclass(frozen=True)
class StateRow:
    """One conversation: its ids, its slots concatenated, and the pre-norm last state, which is
    zero before ``entry.first_taught``."""

    entry: StateEntry
    token_ids: Int64[Tensor, " T"]
    slots: Float[Tensor, "T SH"]
    last: Float[Tensor, "T H"]


def first_taught(prompt_tokens: int) -> int:
    """The first position whose last state is stored: the one that predicts the first answer
    token."""
    return max(prompt_tokens - 1, 0)


def ids_hash(ids: Sequence[int] | Tensor) -> str:
    """16 hex digits of SHA-256 over the ids as little-endian int64."""
    raw = torch.as_tensor(ids, dtype=torch.int64).numpy().astype("<i8").tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def entry_of(row: AnswerRow) -> StateEntry:
    """The entry of an answer whose states are not stored (yet)."""
    ids = row.prompt_token_ids + row.answer_token_ids
    split = row.split if row.trained or row.split == "heldout" else "left"
    prompt = len(row.prompt_token_ids)
    return StateEntry(row.id, row.set, split, "", 0, len(ids), prompt, None, ids_hash=ids_hash(ids))


def captured_row(
    entry: StateEntry, token_ids: Sequence[int] | Tensor, states: Float[Tensor, "T S1 H"]
) -> StateRow:
    """The row of states as a forward made them, slots and ``last``."""
    ids = torch.as_tensor(token_ids, dtype=torch.int64)
    last = states[:, -1].clone()
    last[: entry.first_taught] = 0
    return StateRow(entry, ids, states[:, :-1].flatten(1), last)


def mean_square(row: StateRow) -> float:
    """Mean square of a row's slots and taught last states, six digits after the point."""
    parts = row.slots, row.last[row.entry.first_taught :]
    # One pass each: the norm widens numbers as it adds them. A norm a position, since fp32 sums of
    # many millions of squares lose percents.
    norms = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts]
    squares = sum(float(norm.double().square().sum()) for norm in norms)
    return round(squares / sum(part.numel() for part in parts), 6)


class StateStore:
    """Random access to stored states. Nothing is read before it is asked for.

    Raises ``UserError`` for an index that is missing or of another layout, and for shards that are
    missing or cut short.
    """

    def __init__(self, folder: Path):
        index = _read_index(folder)
        self.folder = folder
        self.slots: tuple[int, ...] = tuple(index["slots"])
        self.dtype: str = index["dtype"]
        self.state_format: str = index["state_format"]
        self.target_fingerprint: str = index["target_fingerprint"]
        self.entries = [StateEntry(**entry) for entry in index["conversations"]]
        self.shards: dict[str, dict[str, Any]] = index["shards"]
        self._tokens = {entry.id: entry.tokens for entry in self.entries}
        raise_errors(check_shards(self, contents=False))

    @property
    def stored_bytes(self) -> int:
        return sum(shard["bytes"] for shard in self.shards.values())

    def select(self, *, split: str | None = None, set: str | None = None) -> list[StateEntry]:
        """Entries of a split ("train", "heldout") and set ("workload", "general")."""
        return [e for e in self.entries if split in (None, e.split) and set in (None, e.set)]

    def row(self, entry: StateEntry, device: torch.device | str = "cpu") -> StateRow:
        """Read one conversation, or its first ``entry.tokens`` tokens; numbers travel to
        ``device`` as they are stored and are decoded there.

        Raises ``UserError`` for a shard that can't be read or holds another conversation there.
        """
        rows = slice(entry.start, entry.start + entry.tokens)
        first = min(entry.first_taught, entry.tokens)
        taught = slice(entry.last_start, entry.last_start + entry.tokens - first)
        with _opened(self.folder / entry.shard) as file:
            ids = file.get_slice("token_ids")[rows].clone()
            slots = self._part(file, "hidden_states", rows, device)
            made = self._part(file, "last", taught, device)
        self._check_ids(entry, ids)
        last = made.new_zeros(entry.tokens, made.shape[-1])
        last[first:] = made
        return StateRow(entry, ids, slots.flatten(1), last)

    def rows(
        self, entries: Iterable[StateEntry], device: torch.device | str = "cpu"
    ) -> Iterator[StateRow]:
        for entry in entries:
            yield self.row(entry, device)

    def token_ids(self, entry: StateEntry) -> Int64[Tensor, " T"]:
        """A conversation's ids without its states."""
        with _opened(self.folder / entry.shard) as file:
            ids = file.get_slice("token_ids")[entry.start : entry.start + entry.tokens].clone()
        self._check_ids(entry, ids)
        return ids

    def _part(self, file: Any, part: Part, rows: slice, device: torch.device | str) -> Tensor:
        names = tensor_names(self.state_format, part)
        stored = {name: file.get_slice(name)[rows].to(device) for name in names}
        return decode(stored, self.state_format, part, _DTYPES[self.dtype])

    def _check_ids(self, entry: StateEntry, ids: Tensor) -> None:
        if entry.tokens != self._tokens.get(entry.id, entry.tokens):
            return  # cut by the caller: the hash is of all its tokens
        if ids_hash(ids) != entry.ids_hash:
            raise UserError(
                f"the shard holds other tokens where conversation {entry.id} should be",
                where=self.folder / entry.shard,
                next=f"delete the shard; {_AGAIN}",
            )


class _opened:
    """``safe_open`` whose failures, at opening or at a slice, are a ``UserError`` with the
    shard's name."""

    def __init__(self, path: Path):
        self._path = path

    def __enter__(self) -> Any:
        try:
            self._file = safe_open(self._path, framework="pt")
            return self._file.__enter__()
        except (SafetensorError, OSError) as error:
            raise self._named(error) from None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._file.__exit__(kind, error, trace)
        if isinstance(error, SafetensorError | OSError):
            raise self._named(error) from None

    def _named(self, error: Exception) -> UserError:
        found = f"a shard of hidden states can't be read: {error}"
        return UserError(found, where=self._path, next=f"delete the shard; {_AGAIN}")


def _read_index(folder: Path) -> dict[str, Any]:
    path, again = folder / "index.json", "eagle3 run PROFILE 02"
    if not path.exists():
        found = "there are no captured states"
        raise UserError(found, expected="index.json", where=folder, next=again)
    index = read_json(path)
    if index.get("layout") != LAYOUT:
        found = f"the states are stored in layout {index.get('layout', 1)}"
        raise UserError(found, expected=f"layout {LAYOUT}", where=path, next=again)
    return index


def write_shard(
    folder: Path, name: str, rows: Sequence[StateRow], state_format: str
) -> list[StateEntry]:
    """Write ``NAME.safetensors`` and, after it, ``NAME.json``; returns the rows' entries there.

    ``mean_square`` is that of the states before they are stored.
    """
    hidden = rows[0].last.shape[1]
    check_format(state_format, hidden)
    parts: list[dict[str, Tensor]] = []
    entries, start, last_start = [], 0, 0
    for row in rows:
        taught = row.last[row.entry.first_taught :]
        slots = row.slots.unflatten(1, (-1, hidden))
        parts.append(
            {"token_ids": row.token_ids}
            | encode(slots, state_format, "hidden_states")
            | encode(taught, state_format, "last")
        )
        where = {"shard": f"{name}.safetensors", "start": start, "last_start": last_start}
        entries.append(replace(row.entry, **where, mean_square=mean_square(row)))
        start, last_start = start + len(row.token_ids), last_start + len(taught)
    tensors = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    path = folder / f"{name}.safetensors"
    write_atomic(path, lambda temporary: save_file(tensors, temporary))
    facts = {
        "state_format": state_format,
        "bytes": path.stat().st_size,
        "sha256": _sha256(path),
        "conversations": [asdict(entry) for entry in entries],
    }
    write_json(folder / f"{name}.json", facts)
    return entries


def finished_shard(
    folder: Path, name: str, wanted: Sequence[StateEntry], state_format: str
) -> list[StateEntry] | None:
    """The entries of a shard that an earlier, interrupted run completed for these conversations
    in this format, None if there is none of its full size."""
    side, path = folder / f"{name}.json", folder / f"{name}.safetensors"
    if not side.exists() or not path.exists():
        return None
    facts = read_json(side)
    if not isinstance(facts, dict) or facts["state_format"] != state_format:
        return None
    entries = [StateEntry(**entry) for entry in facts["conversations"]]
    same = [(e.id, e.split, e.ids_hash, e.prompt_tokens) for e in entries] == [
        (e.id, e.split, e.ids_hash, e.prompt_tokens) for e in wanted
    ]
    return entries if same and path.stat().st_size == facts["bytes"] else None


def write_index(
    folder: Path,
    entries: list[StateEntry],
    *,
    slots: tuple[int, ...],
    dtype: str,
    fingerprint: str,
    state_format: str = "full",
) -> None:
    """The index of shards that ``write_shard`` wrote; it makes the folder a ``StateStore``."""
    shards = {}
    for shard in dict.fromkeys(entry.shard for entry in entries):
        facts = read_json((folder / shard).with_suffix(".json"))
        shards[shard] = {"bytes": facts["bytes"], "sha256": facts["sha256"]}
    index: dict[str, Any] = {
        "layout": LAYOUT,
        "convention": CONVENTION,
        "slots": list(slots),
        "dtype": dtype,
        "state_format": state_format,
        "target_fingerprint": fingerprint,
        "shards": shards,
        "conversations": [asdict(entry) for entry in entries],
    }
    write_json(folder / "index.json", index)


def check_shards(store: StateStore, *, contents: bool = True) -> list[Finding]:
    """Shards that are missing, cut short, or (``contents``: reads everything once, about 1 s a GB)
    changed since they were written."""
    found = []
    for shard in dict.fromkeys(entry.shard for entry in store.entries):
        facts = store.shards[Path(shard).name]  # an index may lie apart from its shards
        path = store.folder / shard
        size = path.stat().st_size if path.exists() else None
        if size is None:
            problem = "shard-missing", "a shard of hidden states is missing", ""
        elif size != facts["bytes"]:
            cut = f"{size:,} of {facts['bytes']:,} bytes"
            problem = "shard-size", f"a shard of hidden states is cut short: {cut}", ""
        elif contents and _sha256(path) != facts["sha256"]:
            problem = "shard-contents", "a shard of hidden states has changed", facts["sha256"]
        else:
            continue
        code, title, evidence = problem
        found.append(Finding(code, "error", title, evidence, _AGAIN, str(path)))
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_problem(states: Float[Tensor, "T S H"], token_ids: Int64[Tensor, " T"]) -> str:
    """What is wrong with captured states, or "": NaN or infinity, zero rows, rows that repeat.

    A row is compared with the one before it only where the least and the greatest number of every
    state are the same.
    """
    # [T, S]; NaN comes through. aminmax in one is four times slower on a CPU (torch 2.13).
    least, most = states.amin(-1), states.amax(-1)
    if not (torch.isfinite(least) & torch.isfinite(most)).all():
        return "not finite"
    if ((least == 0) & (most == 0)).any():
        return "all-zero states"
    # Attention and rotation make even a repeated token's states differ: equality is a stuck buffer.
    # Only a repetition that opens the row (a doubled BOS) attends to nothing but itself.
    alike = ((least[1:] == least[:-1]) & (most[1:] == most[:-1])).all(-1)
    opening = (token_ids[1:] == token_ids[0]).cumprod(0).to(torch.bool)
    suspects = (alike & ~opening).nonzero()[:, 0]
    if any(torch.equal(states[i + 1], states[i]) for i in suspects.tolist()):
        return "consecutive positions with identical states"
    return ""
