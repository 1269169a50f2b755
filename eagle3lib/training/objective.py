"""Drafter, teacher and loss as one differentiable forward: the only place that calls the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.model import DTYPES, TargetHead
from eagle3lib.target.transfer import fetch, upload
from eagle3lib.training.data import Batch, Entries, label_counts
from eagle3lib.training.fused import buffer_bytes_on
from eagle3lib.training.loss import (
    StepCounts,
    Teacher,
    draft_ids,
    label_steps,
    no_counts,
    step_counts,
    step_scale,
    ttt_loss,
)

_LOGITS_BYTES = 512 << 20  # of the whole vocabulary that exist at once on a GPU


@dataclass(frozen=True)
class Labels:
    """What the target says of a batch, [N] each."""

    normed: Tensor  # [N, Ht]: final states after its norm
    greedy: Tensor  # its most likely next token, on the host; -1 before the last prompt token
    logsumexp: Tensor  # of its whole vocabulary's logits / temperature, fp32


class FullHead:
    """The target's norm and whole head on a device.

    With ``keep``, what it says of a conversation is kept once made: the full head at every epoch
    would cost a CPU more than the drafter's own. Memory: 12 bytes a token that this process has
    met. States that are made anew are judged anew: a pack's rounding would stick, and a resumed
    training would differ. ``dtype`` is that of its products on a GPU.
    """

    def __init__(
        self,
        head: TargetHead,
        device: torch.device,
        temperature: float = 1.0,
        *,
        keep: bool = True,
        dtype: torch.dtype = torch.float32,
    ):
        if head.softcap:
            raise UserError(
                "the target caps its logits softly (final_logit_softcapping)",
                expected="a target whose logits are its head's: the loss makes them chunk by chunk",
            )
        for name in ("embedding", "norm", "head"):
            setattr(head, name, getattr(head, name).to(device))
        self.head, self.temperature, self.device = head, temperature, device
        # (id, prompt tokens, tokens): a stretch of a long conversation is known by itself
        self._known: dict[tuple[str, int, int], tuple[Tensor, Tensor]] | None = {} if keep else None
        narrow = device.type == "cuda" and dtype.itemsize < 4
        self._narrow = head.head.to(dtype) if narrow and not keep else None

    def rows(self, target_ids: Tensor) -> Tensor:
        """Rows of the head [D, Ht], such that logits are normed states times these."""
        return self.head.head[target_ids.to(self.head.head.device)] * self.head.scale

    def labels(self, batch: Batch) -> Labels:
        """Of every token; what no label looks at is -1 and 0."""
        return self.begin(batch)()

    def begin(self, batch: Batch) -> Callable[[], Labels]:
        """``labels`` begun: the call waits for a GPU to have made them, and for nothing after."""
        normed = self.head.normed(batch.last.float())
        if self._known is not None:
            greedy, logsumexp = self._kept(batch)
            return lambda: Labels(normed, greedy, upload(logsumexp, self.device))
        at = upload(taught_index(batch.entries), self.device)
        tokens, sums = self._judged(batch.last[at], normed[at])
        greedy = tokens.new_full((len(normed),), -1).index_copy_(0, at, tokens)
        logsumexp = sums.new_zeros(len(normed)).index_copy_(0, at, sums)
        wait = fetch(greedy)
        return lambda: Labels(normed, wait(), logsumexp)

    def _kept(self, batch: Batch) -> tuple[Tensor, Tensor]:
        parts, start = [], 0
        assert self._known is not None
        for entry in batch.entries:
            first, key = entry.prompt_tokens - 1, (entry.id, entry.prompt_tokens, entry.tokens)
            if key not in self._known:
                states = batch.last[start + first : start + entry.tokens].float()
                tokens, sums = self.head.greedy_and_logsumexp(states, self.temperature)
                self._known[key] = tokens.cpu(), sums.cpu()
            tokens, sums = self._known[key]
            pad = nn.functional.pad
            parts.append((pad(tokens, (first, 0), value=-1), pad(sums, (first, 0))))
            start += entry.tokens
        greedy, logsumexp = (torch.cat(part) for part in zip(*parts, strict=True))
        return greedy, logsumexp

    def _judged(self, last: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy tokens, and log sum exp of the logits / temperature."""
        if self._narrow is None:
            return self.head.greedy_and_logsumexp(last.float(), self.temperature)
        chunk = max(256, _LOGITS_BYTES // (4 * len(self._narrow)))
        tokens, sums = [], []
        for part in normed.to(self._narrow.dtype).split(chunk):
            # Logits rounded to eight bits would tie, and be wrong by some percent.
            logits = torch.mm(part, self._narrow.T, out_dtype=torch.float32)
            tokens.append(logits.argmax(-1))  # a scale is positive: it moves no maximum
            sums.append(logits.mul_(self.head.scale / self.temperature).logsumexp(-1))
        return torch.cat(tokens), torch.cat(sums)


def taught_index(entries: Entries) -> Tensor:
    """Packed indices of the states that labels are made of: from the last prompt token on."""
    parts, start = [], 0
    for entry in entries:
        parts.append(torch.arange(start + entry.first_taught, start + entry.tokens))
        start += entry.tokens
    return torch.cat(parts)


class Objective(nn.Module):
    """(loss, counts of every step) of a batch; the loss of no batch is a zero that reaches every
    weight, so that sharded ranks without rows join the collectives."""

    def __init__(self, drafter: Drafter, draft_head: Tensor, cfg: TrainParams):
        super().__init__()
        self.drafter, self.cfg = drafter, cfg
        self.steps, self.dtype = cfg.steps, DTYPES[cfg.precision]
        self.draft_head = draft_head.to(self.dtype)
        self.draft_of = draft_ids(drafter.t2d).cpu()
        self.buffer_bytes = buffer_bytes_on(draft_head.device)

    def forward(
        self, batch: Batch | None, labels: Labels | None, scales: list[float]
    ) -> tuple[Tensor, Callable[[], list[StepCounts]]]:
        """``scales``: factor of each step's summed loss. The counts are a function: asking waits
        for the device, so ask after the backward is on its way."""
        if batch is None or labels is None:
            trained = [p for p in self.drafter.parameters() if p.requires_grad]
            nothing = torch.stack([p.sum() * 0 for p in trained]).sum()
            return nothing, lambda: no_counts(self.steps)
        states, normed = batch.states.to(self.dtype), labels.normed.to(self.dtype)
        steps = label_steps(batch.host, labels.greedy, self.draft_of, self.steps)
        made = unroll(self.drafter, batch.rows, states, self.steps, feed="truth")
        loss, sums = ttt_loss(
            self.drafter,
            made,
            steps,
            Teacher(normed, self.draft_head, labels.logsumexp),
            scales,
            kind=self.cfg.loss,
            temperature=self.cfg.loss_temperature,
            buffer_bytes=self.buffer_bytes,
        )
        return loss, lambda: step_counts(steps, sums)


def step_scales(update: Entries, steps: int, step_weight: float) -> list[float]:
    """Factor of each step's summed loss: its weight over the labels of the whole update.

    Labels are counted from lengths alone, so every process knows the factors before its forward;
    labels outside the draft vocabulary count, though they carry no loss.
    """
    return step_scale(label_counts(update, steps), [step_weight**k for k in range(steps)])


def recompute_mlp(drafter: Drafter) -> None:
    """Keep no MLP activations of any step for the backward: 4 I of about 4 I + 12 H numbers a
    position and step, at the price of one more MLP forward."""
    mlp: Any = drafter.midlayer.mlp
    forward: Callable[[Tensor], Tensor] = type(mlp).forward.__get__(mlp)
    mlp.forward = partial(checkpoint, forward, use_reentrant=False)
