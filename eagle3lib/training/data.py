"""Rows for the trainer: which conversations make an update, who computes which, and their states.

An update is ``batch_tokens`` tokens of whole conversations, packed end to end without padding.
Which conversations these are depends on (seed, epoch) alone, never on how many processes share
them: each token is seen once an epoch, and a run may go on with another number of processes.

A long conversation is shared, too. What is unrolled from a base position reads the states of the
tokens before it and its own chain, never another base position's: stretches of them are computed
apart, by several processes or one after the other, and their losses and gradients are a sum. Each
makes the keys of its prefix itself (two small products a token), so that nothing is exchanged.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from eagle3lib.drafter.align import Span, base_span
from eagle3lib.drafter.model import PackedRows
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.lab.errors import UserError
from eagle3lib.target.states import StateEntry, StateStore
from eagle3lib.target.stream import LiveStates

Entries = list[StateEntry]
States = StateStore | LiveStates

# Base positions of a stretch, at least: shorter ones would mostly make keys, each its prefix's.
STRETCH = 4096


@dataclass(frozen=True)
class Stretch(StateEntry):
    """``bases`` base positions of a long conversation. To all who read it, it is a conversation
    whose prompt ends where the stretch begins, cut behind its last label."""

    bases: int = 0


def bases_of(entry: StateEntry) -> Span:
    """The base positions that an entry is trained at."""
    span = base_span(entry.prompt_tokens, entry.tokens)
    if isinstance(entry, Stretch):
        return Span(span.first, span.first + entry.bases - 1)
    return span


def stretches(entry: StateEntry, most: int, steps: int) -> Entries:
    """A conversation of more than ``most`` base positions as stretches of at most so many."""
    span = bases_of(entry)
    count = -(-span.count // most)
    if count <= 1:
        return [entry]
    known = {f.name: getattr(entry, f.name) for f in fields(StateEntry)}
    cuts = [span.first + span.count * i // count for i in range(count + 1)]
    made: Entries = []
    for first, end in pairwise(cuts):
        changes = {
            "prompt_tokens": first + 1,
            "last_start": entry.last_start + first - entry.first_taught,
            # Step k of the last base position, end - 1, has its label at end + 1 + k.
            "tokens": min(entry.tokens, end + 1 + steps),
            "bases": end - first,
        }
        made.append(Stretch(**known | changes))
    return made


@dataclass(frozen=True)
class Batch:
    """One part of an update, on its device."""

    entries: Entries
    rows: PackedRows
    states: Tensor  # [N, slots * Ht]
    last: Tensor  # [N, Ht], pre-norm; what no label looks at holds anything finite
    host: PackedRows  # ``rows`` on the host, where sizes are known without waiting


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


def share_out(update: Entries, parts: int, steps: int) -> list[Entries]:
    """Cut an update into ``parts`` of about as many tokens each: the longest conversation first,
    to the part that has least. Parts are empty where there are fewer conversations; one that is
    longer than a part, and than ``STRETCH``, is cut itself."""
    most = max(STRETCH, -(-sum(e.tokens for e in update) // parts))
    pieces = [piece for entry in update for piece in stretches(entry, most, steps)]
    shares: list[Entries] = [[] for _ in range(parts)]
    loads = [0] * parts
    for entry in sorted(pieces, key=lambda e: (-_load(e), e.id, e.prompt_tokens)):
        least = loads.index(min(loads))
        shares[least].append(entry)
        loads[least] += _load(entry)
    return shares


def _load(entry: StateEntry) -> int:
    return entry.bases if isinstance(entry, Stretch) else entry.tokens


def label_counts(entries: Entries, steps: int) -> list[int]:
    """Labels that exist at every step, from the lengths alone."""
    spans = [base_span(e.prompt_tokens, e.tokens).count for e in entries]
    return [sum(max(0, count - step) for count in spans) for step in range(steps)]


def load_batch(states: States, entries: Entries, device: torch.device | str = "cpu") -> Batch:
    """Read, or make, the states of conversations. Raises ``UserError`` for some that are not
    finite."""
    batch = assemble(states, entries, device)
    check_finite(states, batch, bool(all_finite(batch)))
    return batch


def assemble(states: States, entries: Entries, device: torch.device | str = "cpu") -> Batch:
    """``load_batch`` unchecked. From live states a GPU has begun, not ended, to make it."""
    if isinstance(states, LiveStates):
        ids = [states.token_ids(entry) for entry in entries]
        slots, last = states.packed(entries)
    else:
        rows = list(states.rows(entries, device))
        ids = [row.token_ids for row in rows]
        slots, last = torch.cat([r.slots for r in rows]), torch.cat([r.last for r in rows])
    prompts, spans = [e.prompt_tokens for e in entries], [bases_of(e) for e in entries]
    host = PackedRows.pack(ids, prompts, spans)
    return Batch(entries, host.to(device), slots.to(device), last.to(device), host)


def all_finite(batch: Batch) -> Tensor:
    """One flag, on the batch's device."""
    return torch.isfinite(batch.states).all() & torch.isfinite(batch.last).all()


def check_finite(states: States, batch: Batch, finite: bool) -> None:
    """Raise ``UserError`` that names a conversation of a batch that is not ``finite``."""
    if finite:
        return
    lengths, live = [e.tokens for e in batch.entries], isinstance(states, LiveStates)
    parts = zip(batch.entries, batch.states.split(lengths), batch.last.split(lengths), strict=True)
    bad = [e for e, *made in parts if not all(bool(torch.isfinite(x).all()) for x in made)]
    raise UserError(
        f"conversation {bad[0].id}: states are not finite",
        where=states.folder / bad[0].shard,
        next="capture with dtype=float32; if that fails too, check the target's weights"
        if live
        else "delete the shard and run the capture again",
    )


def conversations(store: States, entries: Entries) -> list[Conversation]:
    """For the simulator."""
    return conversations_of(load_batch(store, entries)) if entries else []


def conversations_of(batch: Batch) -> list[Conversation]:
    """A batch's conversations for the simulator; their states are views."""
    lengths = [entry.tokens for entry in batch.entries]
    return [
        Conversation(ids, entry.prompt_tokens, states)
        for entry, ids, states in zip(
            batch.entries,
            batch.host.token_ids.split(lengths),
            batch.states.split(lengths),
            strict=True,
        )
    ]
