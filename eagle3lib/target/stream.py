"""States that are never stored: made by the target when a trainer asks.

``LiveStates`` answers what ``StateStore`` answers (``slots``, ``select``, ``row``, ``rows``,
``token_ids``) with a forward of the target in place of a read. Each epoch pays that forward again:
worth it for a small target, or for one epoch over more tokens than a disk holds. ``packed`` is the
trainer's way: many conversations end to end, made and left on the GPU.

Memory: the target, the ids, and the states that were asked for; nothing is made before that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import Target
from eagle3lib.target.forward import forward_packed, forward_states, length_batches
from eagle3lib.target.images import check_media
from eagle3lib.target.model import decoder_of, load_target
from eagle3lib.target.packing import can_pack
from eagle3lib.target.states import StateEntry, StateRow, captured_row, entry_of, state_problem

# ``rows`` sorts so many batches' worth of conversations by length before it cuts batches.
_WINDOW_BATCHES = 8
# On a GPU a pack is filled up to a multiple of this: few shapes, so that little is compiled.
_GPU_MULTIPLE = 4096


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
        rows = list(rows)
        check_media(target, rows, shown=False)
        self.slots, self.dtype = slots, dtype
        self.target_fingerprint = target.fingerprint
        self.folder: Path = target.folder  # named in messages
        self._model: Any = load_target(target, dtype, device).requires_grad_(False)
        self._device, self._packs = torch.device(device), can_pack(decoder_of(self._model))
        self._batch_tokens = batch_tokens
        # In the order of a capture's shards: a training's updates are drawn from it.
        self.entries = sorted((entry_of(row) for row in rows), key=lambda e: (e.tokens, e.id))
        self._ids = {r.id: torch.tensor(r.prompt_token_ids + r.answer_token_ids) for r in rows}
        self._turn = threading.Lock()

    def select(self, *, split: str | None = None, set: str | None = None) -> list[StateEntry]:
        """Entries of a split ("train", "heldout") and set ("workload", "general")."""
        return [e for e in self.entries if split in (None, e.split) and set in (None, e.set)]

    def token_ids(self, entry: StateEntry) -> Int64[Tensor, " T"]:
        return self._ids[entry.id][: entry.tokens]

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

    def packed(
        self, entries: list[StateEntry]
    ) -> tuple[Float[Tensor, "N SH"], Float[Tensor, "N H"]]:
        """Slots, concatenated, and pre-norm last states (of prompts too) of conversations end to
        end, where the target is. A GPU has begun, not ended, to make them; nothing is checked."""
        if not self._packs:
            rows = list(self.rows(entries, self._device))
            return torch.cat([r.slots for r in rows]), torch.cat([r.last for r in rows])
        made = [self._forward_packed(g) for g in token_groups(entries, self._batch_tokens)]
        if len(made) == 1:
            return made[0]
        slots, last = zip(*made, strict=True)
        return torch.cat(slots), torch.cat(last)

    def _forward_packed(self, entries: list[StateEntry]) -> tuple[Tensor, Tensor]:
        ids, lengths = [self.token_ids(e) for e in entries], [e.tokens for e in entries]
        tokens = sum(lengths)
        if self._device.type == "cuda" and tokens % _GPU_MULTIPLE:
            lengths.append(-tokens % _GPU_MULTIPLE)  # a row of its own, seen by no other
            ids.append(torch.zeros(lengths[-1], dtype=torch.int64))
        with self._turn:  # hooks belong to the model, not to a thread
            *slots, last = forward_packed(self._model, torch.cat(ids), lengths, self.slots)
        return torch.cat([state[:tokens] for state in slots], dim=1), last[:tokens]

    def _forward(self, entries: list[StateEntry], device: torch.device | str) -> list[StateRow]:
        ids = [self.token_ids(entry).tolist() for entry in entries]
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
