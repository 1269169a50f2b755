"""States that are never stored: made by the target when a trainer asks, and read ahead of it.

``LiveStates`` answers what ``StateStore`` answers (``slots``, ``select``, ``row``, ``rows``,
``token_ids``) with a forward of the target in place of a read. Each epoch pays that forward again:
worth it for a small target, or for one epoch over more tokens than a disk holds.

``stream_states`` reads either one ahead on a thread. Back-pressure and memory follow from one rule:
a group is begun only while the tokens of all groups begun and not yet passed on are within
``ahead_tokens``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import forward_states, length_batches
from eagle3lib.target.folder import Target
from eagle3lib.target.model import load_target
from eagle3lib.target.states import StateEntry, StateRow, captured_row, entry_of, state_problem

# ``rows`` sorts so many batches' worth of conversations by length before it cuts batches.
_WINDOW_BATCHES = 8


@runtime_checkable
class States(Protocol):
    """``StateStore`` or ``LiveStates``."""

    def rows(
        self, entries: Iterable[StateEntry], device: torch.device | str = "cpu"
    ) -> Iterator[StateRow]: ...


class LiveStates:
    """The states of answers by a forward of the target in this process, batch by batch.

    Threads may share it: forwards take turns. Memory: the target, and the states of the rows asked
    for at once.
    """

    def __init__(
        self,
        target: Target,
        rows: Iterable[AnswerRow],
        *,
        slots: tuple[int, ...],
        dtype: str,
        batch_tokens: int,
        device: str = "cpu",
    ):
        self.slots, self.dtype = slots, dtype
        self.target_fingerprint = target.fingerprint
        self.folder: Path = target.folder  # named in messages
        self._model: Any = load_target(target, dtype, device)
        self._batch_tokens = batch_tokens
        self._ids: dict[str, list[int]] = {}
        self.entries: list[StateEntry] = []
        for row in rows:
            self.entries.append(entry_of(row))
            self._ids[row.id] = row.prompt_token_ids + row.answer_token_ids
        self._turn = threading.Lock()

    def select(self, *, split: str | None = None, set: str | None = None) -> list[StateEntry]:
        """Entries of a split ("train", "heldout") and set ("workload", "general")."""
        return [e for e in self.entries if split in (None, e.split) and set in (None, e.set)]

    def token_ids(self, entry: StateEntry) -> Int64[Tensor, " T"]:
        return torch.tensor(self._ids[entry.id][: entry.tokens])

    def row(self, entry: StateEntry, device: torch.device | str = "cpu") -> StateRow:
        """One conversation, or its first ``entry.tokens`` tokens. Raises ``UserError`` for states
        that are not finite, all zero or stuck."""
        return next(self.rows([entry], device))

    def rows(
        self, entries: Iterable[StateEntry], device: torch.device | str = "cpu"
    ) -> Iterator[StateRow]:
        """Conversations in their order; a window of them is computed in batches of like length."""
        for window in token_groups(entries, _WINDOW_BATCHES * self._batch_tokens):
            made: dict[int, StateRow] = {}
            for batch in length_batches([e.tokens for e in window], self._batch_tokens):
                rows = self._forward([window[i] for i in batch], device)
                made |= dict(zip(batch, rows, strict=True))
            for i in range(len(window)):
                yield made.pop(i)

    def _forward(self, entries: list[StateEntry], device: torch.device | str) -> list[StateRow]:
        ids = [self._ids[entry.id][: entry.tokens] for entry in entries]
        with self._turn:  # hooks belong to the model, not to a thread
            states = forward_states(self._model, ids, self.slots)
        rows = []
        for entry, own_ids, own in zip(entries, ids, states, strict=True):
            problem = state_problem(own, torch.tensor(own_ids))
            if problem:
                raise UserError(
                    f"conversation {entry.id}: {problem}",
                    where=self.folder,
                    expected="finite, distinct hidden states",
                    next="run with dtype=float32; if that fails too, check the weights",
                )
            rows.append(captured_row(entry, own_ids, own.to(device)))
        return rows


def token_groups(entries: Iterable[StateEntry], most_tokens: int) -> Iterator[list[StateEntry]]:
    """Neighbours of at most ``most_tokens`` together; a longer conversation is a group alone."""
    group: list[StateEntry] = []
    tokens = 0
    for entry in entries:
        if group and tokens + entry.tokens > most_tokens:
            yield group
            group, tokens = [], 0
        group.append(entry)
        tokens += entry.tokens
    if group:
        yield group


def read_ahead(
    states: States,
    groups: Iterable[list[StateEntry]],
    *,
    ahead_tokens: int,
    device: torch.device | str = "cpu",
) -> Iterator[list[StateRow]]:
    """The rows of each group, in order, made on another thread while earlier ones are used.

    No more than ``ahead_tokens`` tokens (or one group) are begun and not yet passed on. What a read
    raises is raised where its rows would have come; closing the iterator stops the thread.
    """
    begun: deque[tuple[int, Future[list[StateRow]]]] = deque()
    held_tokens = 0
    with ThreadPoolExecutor(1, thread_name_prefix="states") as pool:
        try:
            for group in groups:
                tokens = sum(entry.tokens for entry in group)
                while begun and held_tokens + tokens > ahead_tokens:
                    passed_tokens, rows = begun.popleft()
                    held_tokens -= passed_tokens
                    yield rows.result()
                begun.append((tokens, pool.submit(_all_rows, states, group, device)))
                held_tokens += tokens
            while begun:
                yield begun.popleft()[1].result()
        finally:
            for _, rows in begun:
                rows.cancel()


def _all_rows(
    states: States, group: list[StateEntry], device: torch.device | str
) -> list[StateRow]:
    return list(states.rows(group, device))


def stream_states(
    states: States,
    entries: Iterable[StateEntry],
    *,
    group_tokens: int,
    ahead_tokens: int,
    device: torch.device | str = "cpu",
) -> Iterator[StateRow]:
    """Conversations one by one in the given order, read or made ahead in groups of
    ``group_tokens``."""
    groups = token_groups(entries, group_tokens)
    for rows in read_ahead(states, groups, ahead_tokens=ahead_tokens, device=device):
        yield from rows
