"""Rows for the trainer: which conversations, in which order, packed into batches."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.model import PackedRows
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.lab.errors import UserError
from eagle3lib.target.states import StateEntry, StateRow, StateStore


@dataclass(frozen=True)
class Batch:
    ids: list[str]
    rows: PackedRows
    states: Tensor  # [N, slots * Ht]
    last: Tensor  # [N, Ht], pre-norm


def trainable(entries: list[StateEntry]) -> tuple[list[StateEntry], int]:
    """Conversations with at least one base position, and how many have none (answers of one
    token)."""
    usable = [e for e in entries if base_span(e.prompt_tokens, e.tokens).count > 0]
    return usable, len(entries) - len(usable)


def epoch_batches(
    entries: list[StateEntry],
    batch_rows: int,
    *,
    seed: int,
    epoch: int,
    rank: int = 0,
    world: int = 1,
) -> list[list[StateEntry]]:
    """The epoch's batches of one rank: shuffled by (seed, epoch), each conversation once over all
    ranks.

    Every rank gets the same number of batches, so that collectives match; with several ranks the
    last ones may be empty.
    """
    order = list(entries)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    mine = order[rank::world]
    batches = [mine[i : i + batch_rows] for i in range(0, len(mine), batch_rows)]
    most = math.ceil(math.ceil(len(order) / world) / batch_rows)
    return batches + [[] for _ in range(most - len(batches))]


def load_batch(store: StateStore, entries: list[StateEntry]) -> Batch:
    rows = [_checked(store, entry) for entry in entries]
    states = torch.cat([row.slots for row in rows])
    packed = PackedRows.pack(
        [row.token_ids for row in rows], [row.entry.prompt_tokens for row in rows]
    )
    return Batch(
        [row.entry.id for row in rows], packed, states, torch.cat([row.last for row in rows])
    )


def _checked(store: StateStore, entry: StateEntry) -> StateRow:
    row = store.row(entry)
    if not torch.isfinite(row.slots).all() or not torch.isfinite(row.last).all():
        raise UserError(
            f"conversation {entry.id}: states are not finite",
            where=store.folder / entry.shard,
            next="delete the shard and run the capture again",
        )
    return row


def conversations(store: StateStore, entries: list[StateEntry]) -> list[Conversation]:
    """For the simulator."""
    return [
        Conversation(row.token_ids, row.entry.prompt_tokens, row.slots)
        for row in (_checked(store, entry) for entry in entries)
    ]
