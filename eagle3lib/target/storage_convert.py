"""Stored states in another shape: another format of this lab, or the layout of speculators.

hs_0.safetensors    hidden_states [T, S + 1, H], token_ids [T]; a file a conversation
conversations.json  which conversation a number is, its prompt tokens, slots and convention
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_atomic, write_json
from eagle3lib.target.states import (
    CONVENTION,
    StateEntry,
    StateStore,
    write_index,
    write_shard,
)


def convert_states(store: StateStore, folder: Path, state_format: str) -> StateStore:
    """The same conversations in another format, shard by shard. A format with errors cannot be
    undone: ``mean_square`` and everything else then describe the states as they are decoded."""
    if folder.resolve() == store.folder.resolve():
        raise UserError("states can't be converted in place", where=folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[StateEntry] = []
    for shard, part in groupby(store.entries, lambda entry: entry.shard):
        entries += write_shard(folder, Path(shard).stem, list(store.rows(part)), state_format)
    write_index(
        folder,
        entries,
        slots=store.slots,
        dtype=store.dtype,
        fingerprint=store.target_fingerprint,
        state_format=state_format,
    )
    return StateStore(folder)


def export_speculators(
    store: StateStore, folder: Path, entries: Iterable[StateEntry] | None = None
) -> int:
    """Write conversations in the layout of speculators' offline training; returns how many.

    The last state of the S + 1 is pre-norm, and zero before the last prompt token, where this lab
    stores none: a loss mask that begins with the answer never reads it there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = []
    for number, row in enumerate(store.rows(store.entries if entries is None else entries)):
        slots = row.slots.unflatten(1, (len(store.slots), -1))  # [T, S, H]
        states = torch.cat((slots, row.last[:, None]), dim=1)
        tensors = {"hidden_states": states, "token_ids": row.token_ids}
        path = folder / f"hs_{number}.safetensors"
        write_atomic(path, lambda temporary, made=tensors: save_file(made, temporary))
        entry = row.entry
        names = ("id", "set", "split", "tokens", "prompt_tokens")
        table.append({"number": number} | {name: getattr(entry, name) for name in names})
    facts = {
        "convention": CONVENTION,
        "slots": list(store.slots),
        "dtype": store.dtype,
        "target_fingerprint": store.target_fingerprint,
        "conversations": table,
    }
    write_json(folder / "conversations.json", facts)
    return len(table)
