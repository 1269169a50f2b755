"""Captured hidden states on disk: safetensors shards of many conversations, with an index.

    states/shard-00000.safetensors   hidden_states [N, S + 1, H], token_ids [N]
    states/index.json                convention, slots, dtype, target, and for each conversation:
                                     id, set, split, shard, start, tokens, prompt_tokens,
                                     mean_square

The last of the S + 1 states is ``last``, the pre-norm input of the target's final norm. Slots are
HF ``hidden_states`` indices (the state before that layer). The index is written last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json

CONVENTION = "HF hidden_states index (before layer i); last = input of the final norm"


@dataclass(frozen=True)
class StateEntry:
    """Where one conversation's states lie. ``mean_square`` guards against zeros and swaps."""

    id: str
    set: str
    split: str
    shard: str
    start: int
    tokens: int
    prompt_tokens: int
    mean_square: float


@dataclass(frozen=True)
class StateRow:
    """One conversation: its ids, its slots concatenated, and the pre-norm last state."""

    entry: StateEntry
    token_ids: Int64[Tensor, " T"]
    slots: Float[Tensor, "T SH"]
    last: Float[Tensor, "T H"]


class StateStore:
    """Random access to captured states. Files are memory-mapped; nothing is read before it is
    used."""

    def __init__(self, folder: Path):
        path = folder / "index.json"
        if not path.exists():
            raise UserError(
                "there are no captured states",
                expected="index.json",
                where=folder,
                next="eagle3 run PROFILE 02",
            )
        index = read_json(path)
        self.folder = folder
        self.slots: tuple[int, ...] = tuple(index["slots"])
        self.dtype: str = index["dtype"]
        self.target_fingerprint: str = index["target_fingerprint"]
        self.entries = [StateEntry(**entry) for entry in index["conversations"]]

    def select(self, *, split: str | None = None, set: str | None = None) -> list[StateEntry]:
        """Entries of a split ("train", "heldout") and set ("workload", "general")."""
        return [e for e in self.entries if split in (None, e.split) and set in (None, e.set)]

    def row(self, entry: StateEntry) -> StateRow:
        """Read one conversation. Raises ``UserError`` for a shard that is missing or cut short."""
        path = self.folder / entry.shard
        try:
            with safe_open(path, framework="pt") as file:
                where = slice(entry.start, entry.start + entry.tokens)
                states = file.get_slice("hidden_states")[where]
                ids = file.get_slice("token_ids")[where]
        except (SafetensorError, FileNotFoundError, OSError) as error:
            raise UserError(
                f"a shard of hidden states can't be read: {error}",
                where=path,
                next="delete it and run the capture again: eagle3 run PROFILE 02",
            ) from None
        return StateRow(entry, ids, states[:, :-1].flatten(1), states[:, -1])

    def rows(self, entries: list[StateEntry]) -> Iterator[StateRow]:
        for entry in entries:
            yield self.row(entry)


def write_index(
    folder: Path, entries: list[StateEntry], *, slots: tuple[int, ...], dtype: str, fingerprint: str
) -> None:
    index: dict[str, Any] = {
        "convention": CONVENTION,
        "slots": list(slots),
        "dtype": dtype,
        "target_fingerprint": fingerprint,
        "conversations": [asdict(entry) for entry in entries],
    }
    write_json(folder / "index.json", index)


def state_problem(states: Float[Tensor, "T S H"], token_ids: Int64[Tensor, " T"]) -> str:
    """What is wrong with captured states, or "": NaN or infinity, zero rows, rows that repeat."""
    wide = states.float()
    if not torch.isfinite(wide).all():
        return "not finite"
    if (wide.abs().amax(-1) == 0).any():
        return "all-zero states"
    # Attention and rotation make even a repeated token's states differ: equality is a stuck buffer.
    # Only a repetition that opens the row (a doubled BOS) attends to nothing but itself.
    repeats = (wide[1:] == wide[:-1]).flatten(1).all(-1)
    opening = (token_ids[1:] == token_ids[0]).cumprod(0).to(torch.bool)
    if (repeats & ~opening).any():
        return "consecutive positions with identical states"
    return ""
