"""The training-time-test loss: soft targets over the draft vocabulary, fp32, answers only.

At step k and base position p the target's distribution after x[p+1+k], restricted to the draft
vocabulary and renormalised, is the label of the drafter's distribution (EAGLE-3, arXiv 2503.01840,
section 3.2). Positions whose most likely target token is outside the draft vocabulary can't be
accepted whatever the drafter says: they carry no loss, and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from eagle3lib.drafter.align import label_exists, teacher_index
from eagle3lib.drafter.model import Drafter, PackedRows, Step


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distribution at positions that some step needs, one row each."""

    log_probs: Float[Tensor, "U D"]  # over the draft vocabulary, renormalised, fp32
    greedy: Int64[Tensor, " U"]  # target id of the most likely token of the whole vocabulary
    row_of: Int64[Tensor, " N"]  # packed token index -> row here, -1 where there is none


@dataclass(frozen=True)
class StepCounts:
    """Sums over positions; rates are divided once, at display."""

    positions: int  # labels that exist
    inside: int  # ... whose target token is in the draft vocabulary: these carry the loss
    right: int  # ... and whose greedy draft is the target's greedy token
    loss_sum: float  # cross-entropy of the loss positions, nats


@torch.no_grad()
def make_teacher(
    rows: PackedRows,
    normed: Float[Tensor, "N H"],
    greedy: Int64[Tensor, " N"],
    draft_head: Float[Tensor, "D H"],
    steps: int,
) -> Teacher:
    """``normed``: the target's final states after its norm; ``greedy``: its greedy next token after
    each state; ``draft_head``: the rows of its output matrix that the draft vocabulary holds."""
    needed = torch.zeros(len(rows.token_ids), dtype=torch.bool)
    for step in range(steps):
        exists = label_exists(rows.base, step, rows.total)
        needed[(rows.row_start + teacher_index(rows.base, step))[exists]] = True
    row_of = torch.full((len(needed),), -1)
    row_of[needed] = torch.arange(int(needed.sum()))
    logits = normed[needed] @ draft_head.T
    return Teacher(logits.float().log_softmax(-1), greedy[needed], row_of)


def step_loss(
    drafter: Drafter, rows: PackedRows, made: Step, teacher: Teacher, step: int
) -> tuple[Float[Tensor, ""], StepCounts]:
    """(sum of the cross-entropy over the step's loss positions, its counts)."""
    exists = label_exists(rows.base, step, rows.total)
    index = teacher.row_of[
        (rows.row_start + teacher_index(rows.base, step)).clamp(max=len(teacher.row_of) - 1)
    ]
    inside: Bool[Tensor, " P"] = exists & (index >= 0)
    inside &= drafter.t2d[teacher.greedy[index.clamp(min=0)]]
    chosen, labels = made.hidden[inside], index[inside]
    log_q = drafter.logits(chosen).float().log_softmax(-1)
    loss = -(teacher.log_probs[labels].exp() * log_q).sum()
    right = drafter.target_ids(log_q.argmax(-1)) == teacher.greedy[labels]
    return loss, StepCounts(int(exists.sum()), len(labels), int(right.sum()), float(loss.detach()))
