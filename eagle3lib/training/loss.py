"""The training-time-test loss: soft targets over the draft vocabulary, fp32, answers only.

At step k and base position p the target's distribution after x[p+1+k] is the label of the drafter's
distribution (EAGLE-3, arXiv 2503.01840, section 3.2). Positions whose most likely target token is
outside the draft vocabulary can't be accepted by a greedy target whatever the drafter says: they
carry no loss, and are counted. At the others the target's probabilities are renormalised over the
draft vocabulary for divergences, and left as they are for what counts acceptance (``kinds.py``).

    labels = label_steps(rows, greedy, draft_ids, steps)       what counts: masks alone
    scale = step_scale(labels of all ranks, weights)           so that ranks add up to one process
    loss, sums = ttt_loss(drafter, made, labels, teacher, ...) the fused head, see ``fused.py``
    counts = step_counts(labels, sums)                         waits for the device
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from eagle3lib.drafter.align import label_exists, teacher_index
from eagle3lib.drafter.model import Drafter, PackedRows, Step
from eagle3lib.training.fused import BUFFER_BYTES, HeadLoss, head_loss


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distributions, as the states and the head that make them."""

    normed: Float[Tensor, "N Ht"]  # final states after the target's norm
    draft_head: Float[Tensor, "D Ht"]  # rows of its output matrix in the draft vocabulary
    # log sum exp(logits / temperature) over its whole vocabulary. None: as if the draft vocabulary
    # were all of it, so that probabilities of acceptance come out too high by what is outside.
    full_logsumexp: Float[Tensor, " N"] | None = None


@dataclass(frozen=True)
class StepLabels:
    """Which positions carry loss in which step, on the CPU."""

    row: Int64[Tensor, "T P"]  # packed index of the state that makes the label, -1: no loss
    token: Int64[Tensor, "T P"]  # draft id of the target's greedy token, 0 where there is no loss
    positions: list[int]  # [T] labels that exist
    inside: list[int]  # [T] ... whose target token is in the draft vocabulary: these carry loss


@dataclass(frozen=True)
class StepCounts:
    """Sums over positions; rates are divided once, at display."""

    positions: int  # labels that exist
    inside: int  # ... whose target token is in the draft vocabulary: these carry the loss
    right: int  # ... and whose greedy draft is the target's greedy token
    loss_sum: float  # over the loss positions, nats (of ``kl``: without the target's entropy)
    overlap_sum: float  # of sum min(p, q) there: expected acceptances of sampled drafts


def no_counts(steps: int) -> list[StepCounts]:
    return [StepCounts(0, 0, 0, 0.0, 0.0)] * steps


def draft_ids(t2d: Tensor) -> Int64[Tensor, " V"]:
    """Target id -> draft id, -1 outside the draft vocabulary (which keeps the target's order)."""
    return torch.where(t2d, t2d.long().cumsum(0) - 1, -1)


def label_steps(
    rows: PackedRows,
    greedy: Int64[Tensor, " N"],
    draft_of: Int64[Tensor, " V"],
    steps: int,
) -> StepLabels:
    """``greedy``: the target's most likely next token after each state (anything where no label
    looks); ``draft_of``: ``draft_ids``."""
    base, total, start = rows.base.cpu(), rows.total.cpu(), rows.row_start.cpu()
    exists = torch.stack([label_exists(base, k, total) for k in range(steps)])
    index = torch.stack([start + teacher_index(base, k) for k in range(steps)])
    index = torch.where(exists, index, 0)
    token = draft_of.cpu()[greedy.cpu()[index].clamp(min=0)]
    inside = exists & (token >= 0)
    return StepLabels(
        row=torch.where(inside, index, -1),
        token=torch.where(inside, token, 0),
        positions=exists.sum(1).tolist(),
        inside=inside.sum(1).tolist(),
    )


def step_scale(labels: Sequence[int], weights: Sequence[float]) -> list[float]:
    """What a position of each step counts: the loss is the weighted mean over steps of the mean
    over labels. ``labels`` are those of all ranks, whose losses then add up."""
    return [w / sum(weights) / max(n, 1) for w, n in zip(weights, labels, strict=True)]


def ttt_loss(
    drafter: Drafter,
    made: Sequence[Step],
    labels: StepLabels,
    teacher: Teacher,
    scale: Sequence[float],
    *,
    kind: str = "kl",
    temperature: float = 1.0,
    buffer_bytes: int = BUFFER_BYTES,
) -> tuple[Float[Tensor, ""], Float[Tensor, "T 3"]]:
    """(loss, sums for ``step_counts``). ``kind`` is one of ``kinds.KINDS``; ``temperature`` divides
    both sides' logits. The loss has one backward, which only multiplies: its gradients are made
    here, chunk by chunk, in ``buffer_bytes`` (a chunk's size changes nothing but speed)."""
    spec = HeadLoss(
        kind=kind,
        temperature=temperature,
        teacher=labels.row,
        token=labels.token,
        scale=scale,
        norm=drafter.norm,
        states=teacher.normed,
        draft_head=teacher.draft_head,
        full_logsumexp=teacher.full_logsumexp,
        buffer_bytes=buffer_bytes,
    )
    return head_loss(spec, [step.hidden for step in made], drafter.lm_head.weight)


def step_counts(labels: StepLabels, sums: Float[Tensor, "T 3"]) -> list[StepCounts]:
    return [
        StepCounts(positions, inside, round(right), loss, overlap)
        for positions, inside, (loss, overlap, right) in zip(
            labels.positions, labels.inside, sums.tolist(), strict=True
        )
    ]
