"""Drafter, teacher and loss as one differentiable forward: the only place that calls the loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.target.model import TargetHead
from eagle3lib.training.data import Batch, Entries, label_counts
from eagle3lib.training.loss import StepCounts, make_teacher, step_loss


class FullHead:
    """The target's norm and whole head on a device.

    Its greedy tokens are kept once made: the full head at every epoch would cost more than the
    drafter's own. Memory: 8 bytes a token that this process has met.
    """

    def __init__(self, head: TargetHead, device: torch.device):
        for name in ("embedding", "norm", "head"):
            setattr(head, name, getattr(head, name).to(device))
        self.head = head
        self._greedy: dict[str, Tensor] = {}

    def greedy(self, batch: Batch) -> Tensor:
        """The target's greedy next token after each state from the last prompt token on, -1
        before: [N] int64."""
        parts, start = [], 0
        for entry in batch.entries:
            if entry.id not in self._greedy:
                whole = torch.full((entry.tokens,), -1, device=batch.last.device)
                first = entry.prompt_tokens - 1
                states = batch.last[start + first : start + entry.tokens]
                whole[first:] = self.head.greedy(states.float())
                self._greedy[entry.id] = whole.cpu()
            parts.append(self._greedy[entry.id])
            start += entry.tokens
        return torch.cat(parts).to(batch.last.device)


class Objective(nn.Module):
    """(loss, counts of every step) of a batch; the loss of no batch is a zero that reaches every
    weight, so that sharded ranks without rows join the collectives."""

    def __init__(self, drafter: Drafter, draft_head: Tensor, steps: int, dtype: torch.dtype):
        super().__init__()
        self.drafter = drafter
        self.draft_head = draft_head.to(dtype)
        self.steps, self.dtype = steps, dtype

    def forward(
        self,
        batch: Batch | None,
        normed: Tensor | None,
        greedy: Tensor | None,
        scales: list[float],
    ) -> tuple[Tensor, list[StepCounts]]:
        """``normed`` [N, Ht]: the target's final states after its norm; ``scales``: factor of each
        step's summed loss."""
        if batch is None or normed is None or greedy is None:
            trained = [p for p in self.drafter.parameters() if p.requires_grad]
            nothing = torch.stack([p.sum() * 0 for p in trained]).sum()
            return nothing, [StepCounts(0, 0, 0, 0.0)] * self.steps
        states, normed = batch.states.to(self.dtype), normed.to(self.dtype)
        teacher = make_teacher(batch.rows, normed, greedy, self.draft_head, self.steps)
        made = unroll(self.drafter, batch.rows, states, self.steps, feed="truth")
        pairs = [step_loss(self.drafter, batch.rows, m, teacher, k) for k, m in enumerate(made)]
        scaled = [loss * scale for (loss, _), scale in zip(pairs, scales, strict=True)]
        return torch.stack(scaled).sum(), [counts for _, counts in pairs]


def step_scales(update: Entries, steps: int, step_weight: float) -> list[float]:
    """Factor of each step's summed loss: its weight over the labels of the whole update.

    Labels are counted from lengths alone, so every process knows the factors before its forward;
    labels outside the draft vocabulary count, though they carry no loss.
    """
    weights = [step_weight**k for k in range(steps)]
    labels = label_counts(update, steps)
    return [w / sum(weights) / max(n, 1) for w, n in zip(weights, labels, strict=True)]


def recompute_mlp(drafter: Drafter) -> None:
    """Keep no MLP activations of any step for the backward: 4 I of about 4 I + 12 H numbers a
    position and step, at the price of one more MLP forward."""
    mlp: Any = drafter.midlayer.mlp
    forward: Callable[[Tensor], Tensor] = type(mlp).forward.__get__(mlp)
    mlp.forward = partial(checkpoint, forward, use_reentrant=False)
