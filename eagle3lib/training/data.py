"""Rows for the trainer: which conversations make an update, who computes which, and their states.

An update is ``batch_tokens`` tokens of whole conversations, packed end to end without padding.
Which conversations these are depends on (seed, epoch) alone, never on how many processes share
them: each token is seen once an epoch, and a run may go on with another number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.model import PackedRows
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.lab.errors import UserError
from eagle3lib.target.states import StateEntry, StateRow, StateStore

Entries = list[StateEntry]
Job = TypeVar("Job")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Batch:
    """One part of an update, on its device."""

    entries: Entries
    rows: PackedRows
    states: Tensor  # [N, slots * Ht]
    last: Tensor  # [N, Ht], pre-norm


@dataclass(frozen=True)
class Selection:
    """Conversations to train on, and what was left out."""

    entries: Entries
    skipped_rows: int  # without a base position: answers of one token, or cut to the prompt
    cut_rows: int
    cut_tokens: int

    @property
    def answer_tokens(self) -> int:
        return sum(e.tokens - e.prompt_tokens for e in self.entries)


def trainable(entries: Entries, max_tokens_per_row: int = 0) -> Selection:
    """Conversations cut to ``max_tokens_per_row`` (0: whole) that have a position to train on."""
    most = max_tokens_per_row or max((e.tokens for e in entries), default=0)
    cut = [replace(e, tokens=min(e.tokens, most)) for e in entries]
    usable = [e for e in cut if base_span(e.prompt_tokens, e.tokens).count > 0]
    lost = [e.tokens - most for e in entries if e.tokens > most]
    return Selection(usable, len(entries) - len(usable), len(lost), sum(lost))


def epoch_updates(entries: Entries, batch_tokens: int, *, seed: int, epoch: int) -> list[Entries]:
    """The epoch's updates: all conversations in an order of (seed, epoch), cut where the next one
    would make more than ``batch_tokens`` (a longer conversation is an update of its own)."""
    order = list(entries)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return groups_of(order, batch_tokens)


def groups_of(entries: Entries, most_tokens: int) -> list[Entries]:
    """Cut a list where the next conversation would make a group longer than ``most_tokens``."""
    groups: list[Entries] = []
    tokens = most_tokens
    for entry in entries:
        if tokens + entry.tokens > most_tokens:
            groups.append([])
            tokens = 0
        groups[-1].append(entry)
        tokens += entry.tokens
    return groups


def share_out(update: Entries, parts: int) -> list[Entries]:
    """Cut an update into ``parts`` of about as many tokens each: the longest conversation first,
    to the part that has least. Parts are empty where there are fewer conversations."""
    shares: list[Entries] = [[] for _ in range(parts)]
    loads = [0] * parts
    for entry in sorted(update, key=lambda e: (-e.tokens, e.id)):
        least = loads.index(min(loads))
        shares[least].append(entry)
        loads[least] += entry.tokens
    return shares


def label_counts(entries: Entries, steps: int) -> list[int]:
    """Labels that exist at every step, from the lengths alone."""
    spans = [base_span(e.prompt_tokens, e.tokens).count for e in entries]
    return [sum(max(0, count - step) for count in spans) for step in range(steps)]


def load_batch(store: StateStore, entries: Entries, device: torch.device | str = "cpu") -> Batch:
    """Read an update's part. Raises ``UserError`` for states that are not finite."""
    rows = [_finite(store, row) for row in store.rows(entries, device)]
    packed = PackedRows.pack(
        [row.token_ids for row in rows], [row.entry.prompt_tokens for row in rows]
    )
    return Batch(
        entries,
        packed.to(device),
        torch.cat([row.slots for row in rows]).to(device),
        torch.cat([row.last for row in rows]).to(device),
    )


def prefetched(load: Callable[[Job], Made], jobs: Iterable[Job]) -> Iterator[Made]:
    """``map(load, jobs)`` with the next one made on another thread while one is used: never more
    than two are there."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
        pending = None
        for job in jobs:
            following = pool.submit(load, job)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def _finite(store: StateStore, row: StateRow) -> StateRow:
    """The row itself; raises ``UserError`` that names it for NaN and infinity."""
    if not torch.isfinite(row.slots).all() or not torch.isfinite(row.last).all():
        raise UserError(
            f"conversation {row.entry.id}: states are not finite",
            where=store.folder / row.entry.shard,
            next="delete the shard and run the capture again",
        )
    return row


def conversations(store: StateStore, entries: Entries) -> list[Conversation]:
    """For the simulator."""
    return [
        Conversation(row.token_ids, row.entry.prompt_tokens, row.slots)
        for row in (_finite(store, row) for row in store.rows(entries))
    ]
