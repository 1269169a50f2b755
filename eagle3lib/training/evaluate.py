"""Evaluation by what counts: the greedy simulator on held-out answers, beside what no drafter
knows.

The baselines see no hidden state: "unigram" always proposes the commonest training token, "bigram"
the commonest follower of the token before. A drafter that does not beat them has learnt no context.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch

from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.simulate import Conversation, Replay, histogram, replay_rounds, simulate


def acceptance_counts(replays: Iterable[Replay], steps: int) -> dict[str, Any]:
    """Rounds by accepted drafts, and their pooled acceptance length 1 + accepted / rounds."""
    counts = histogram([r.accepted for r in replays], steps)
    rounds = sum(counts)
    accepted = sum(i * n for i, n in enumerate(counts))
    return {
        "rounds": rounds,
        "accepted": accepted,
        "histogram": counts,
        "acceptance_length": round(1 + accepted / rounds, 4) if rounds else None,
    }


def evaluate(drafter: Drafter, sets: dict[str, list[Conversation]], steps: int) -> dict[str, Any]:
    return {
        name: acceptance_counts(simulate(drafter, items, steps), steps)
        for name, items in sets.items()
    }


class NgramBaseline:
    """Greedy proposals from counts over the training answers."""

    def __init__(self, answers: Iterable[Sequence[int]]):
        unigrams: Counter[int] = Counter()
        followers: dict[int, Counter[int]] = defaultdict(Counter)
        for ids in answers:
            unigrams.update(ids)
            for before, after in pairwise(ids):
                followers[before][after] += 1
        self.commonest = unigrams.most_common(1)[0][0] if unigrams else -1
        self._next = {token: counts.most_common(1)[0][0] for token, counts in followers.items()}

    def replay(self, items: Iterable[Conversation], steps: int, order: int) -> list[Replay]:
        """``order`` 1: unigram, 2: bigram."""
        replays = []
        for item in items:
            answer = item.token_ids[item.prompt_tokens :].tolist()
            drafts = [self._chain(token, steps, order) for token in answer[:-1]]
            replays.append(replay_rounds(torch.tensor(drafts).view(-1, steps), answer, steps))
        return replays

    def _chain(self, token: int, steps: int, order: int) -> list[int]:
        made = []
        for _ in range(steps):
            token = self.commonest if order == 1 else self._next.get(token, self.commonest)
            made.append(token)
        return made

    def evaluate(self, sets: dict[str, list[Conversation]], steps: int) -> dict[str, Any]:
        return {
            f"{label}_{name}": acceptance_counts(self.replay(items, steps, order), steps)
            for label, order in (("unigram", 1), ("bigram", 2))
            for name, items in sets.items()
        }
