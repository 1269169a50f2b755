"""Held-out answers: read anew at every evaluation, so that they never all lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.simulate import Conversation, Replay, simulate
from eagle3lib.training.data import States, conversations_of, groups_of, load_batch, trainable
from eagle3lib.training.evaluate import (
    acceptance_counts,
    chain_estimates,
    chain_sums,
)
from eagle3lib.training.objective import FullHead

_GROUP_TOKENS = 8192  # read and judged at once


class Heldout:
    """The held-out sets of a run. ``judge`` costs two unrolls of their answers."""

    def __init__(self, store: States, head: FullHead):
        self._store, self._head = store, head
        found = {
            name: trainable(store.select(split="heldout", set=name)).entries
            for name in ("workload", "general")
        }
        self.sets = {name: entries for name, entries in found.items() if entries}

    def judge(self, drafter: Drafter, draft_head: Tensor, steps: int) -> dict[str, Any]:
        """``sets``: rounds of the greedy simulator; ``estimates``: see ``evaluate.py``."""
        sets, estimates = {}, {}
        for name, entries in self.sets.items():
            replays: list[Replay] = []
            sums = torch.zeros(steps, 3, dtype=torch.float64)
            for group in groups_of(entries, _GROUP_TOKENS):
                batch = load_batch(self._store, group, self._head.device)
                replays += simulate(drafter, conversations_of(batch), steps)
                sums += chain_sums(drafter, batch, self._head.labels(batch), draft_head, steps)
            sets[name] = acceptance_counts(replays, steps)
            estimates[name] = chain_estimates(sums)
        return {"sets": sets, "estimates": estimates}

    def tokens(self) -> dict[str, list[Conversation]]:
        """Ids without states, for baselines that see no states."""
        return {
            name: [
                Conversation(self._store.token_ids(e), e.prompt_tokens, torch.empty(e.tokens, 0))
                for e in entries
            ]
            for name, entries in self.sets.items()
        }
