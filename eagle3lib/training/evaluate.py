"""Evaluation by what counts: the greedy simulator on held-out answers, beside what no drafter
knows.

The baselines see no hidden state: "unigram" always proposes the commonest training token, "bigram"
the commonest follower of the token before. A drafter that does not beat them has learnt no context.

Beside the simulator stand two estimates along the answers' own tokens, at every base position. With
a_k the pooled share of step k, a chain of K drafts is as long as 1 + sum over k of a_1 ... a_k:

    top1      a_k = how often the drafter's first choice is the target's greedy token (T = 0)
    sampled   a_k = mean of sum over x of min(p(x), q(x)), what sampling accepts at T = 1
              (arXiv 2211.17192); p over the whole vocabulary, q over the draft vocabulary

They assume that steps are accepted independently and that the context of step k is the answer's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3lib.drafter.align import label_exists, teacher_index
from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.drafter.simulate import Conversation, Replay, histogram, replay_rounds, simulate
from eagle3lib.training.data import Batch
from eagle3lib.training.objective import Labels

# A drafter for real use has seen far more: public ones are trained on some hundred million tokens,
# and below a million an epoch's answers are learnt by heart before context is.
ENOUGH_TOKENS = 1_000_000
_CHUNK_POSITIONS = 512  # rows of logits over the draft vocabulary that exist at once


def verdict(answer_tokens: int) -> str:
    """What numbers of a training on so many distinct answer tokens can tell."""
    if answer_tokens < ENOUGH_TOKENS:
        return (
            f"smoke test: {answer_tokens:,} answer tokens are fewer than {ENOUGH_TOKENS:,}; the "
            "numbers show that the pipeline works, not what a drafter can reach"
        )
    return f"trained on {answer_tokens:,} answer tokens"


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


@torch.no_grad()
def chain_sums(
    drafter: Drafter,
    batch: Batch,
    teacher: Labels,
    draft_head: Float[Tensor, "D H"],
    steps: int,
) -> Float[Tensor, "C K 3"]:
    """Of every conversation and step: labels, how many the first choice has right, and their
    summed overlap min(p, q). Conversations without a base position are left out."""
    rows, states = batch.rows, batch.states.to(drafter.fc.weight.dtype)
    starts, owner = rows.row_start.unique(return_inverse=True)
    greedy = teacher.greedy.to(states.device)
    sums = torch.zeros(len(starts), steps, 3, dtype=torch.float64, device=states.device)
    for step, made in enumerate(unroll(drafter, rows, states, steps, feed="truth")):
        exists = label_exists(rows.base, step, rows.total)
        index = (rows.row_start + teacher_index(rows.base, step))[exists]
        parts = (made.hidden[exists], index, owner[exists])
        for hidden, at, own in zip(*(x.split(_CHUNK_POSITIONS) for x in parts), strict=True):
            q = drafter.logits(hidden).float().softmax(-1)
            p = (teacher.normed[at] @ draft_head.T - teacher.logsumexp[at, None]).exp()
            right = drafter.target_ids(q.argmax(-1)) == greedy[at]
            found = (torch.ones_like(right), right, q.minimum(p).sum(-1))
            sums[:, step].index_add_(0, own, torch.stack([x.double() for x in found], dim=1))
    return sums.cpu()


def chain_estimates(sums: Float[Tensor, "K 3"]) -> dict[str, Any]:
    """Counts of every step, and both estimated lengths."""
    labels, right, overlap = sums.T.tolist()
    return {
        "labels": [int(n) for n in labels],
        "right": [int(n) for n in right],
        "overlap": [round(n, 3) for n in overlap],
        "top1_length": chain_length(right, labels),
        "sampled_length": chain_length(overlap, labels),
    }


def chain_length(accepted: Sequence[float], labels: Sequence[float]) -> float | None:
    """1 + a_1 + a_1 a_2 + ..., None where a step has no label."""
    if not all(labels):
        return None
    length, chain = 1.0, 1.0
    for share, count in zip(accepted, labels, strict=True):
        chain *= share / count
        length += chain
    return round(length, 4)


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
