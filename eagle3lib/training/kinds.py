"""Kinds of loss: one position's value and its gradient by the drafter's logits.

With the target's logits z over the draft vocabulary and the drafter's logits l, both divided by the
temperature T (what an engine's sampler does to both), and softmax in fp32:

    q     softmax(l / T)
    p     the target's probabilities over its *whole* vocabulary; they sum to ``mass`` <= 1 over the
          draft vocabulary, what lies outside can't be accepted whatever the drafter says
    p'    p / mass, renormalised over the draft vocabulary
    alpha sum of min(p, q), the chance that a sampled draft is accepted (arXiv 2211.17192, 3.2)

    kind    value                            T * gradient by l
    kl      sum p' log(p' / q)               q - p'
    ce      -log q[the target's token]       q - onehot
    rkl     sum q log(q / p')                q (d - sum q d), d = log(q / p')
    tv      1 - alpha                        q (sum q m - m), m = 1 where q < p
    lk      -log alpha                       that of tv / alpha
    hybrid  w kl + (1 - w) tv                w = exp(-3 alpha), a constant to the gradient

``kl`` is the soft cross-entropy less the target's entropy: the gradient is the same, and zero means
that there is nothing left to learn. ``lk`` and ``hybrid`` are the losses of arXiv 2602.23881 with
its best rate, 3; the weight w is made per position (the paper pools alpha over a batch), so that a
position's loss depends neither on its chunk nor on its rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("kl", "ce", "rkl", "tv", "lk", "hybrid")
HYBRID_RATE = 3.0


class TeacherRows(NamedTuple):
    """What a kind needs of the target's distributions, made once for all steps."""

    table: Tensor  # [U, D]: p, or log p for ``rkl``
    log_mass: Tensor  # [U]
    negentropy: Tensor  # [U]: sum of p' log p'


def teacher_rows(
    kind: str, logits: Tensor, full_logsumexp: Tensor | None, temperature: float, out: Tensor
) -> TeacherRows:
    """From the target's ``logits`` [U, D]; the table is written to ``out``, which may be them.

    ``full_logsumexp`` [U] is that of the whole vocabulary's logits / T; without it the mass is 1.
    """
    scaled = _wide(logits) / temperature if temperature != 1.0 else _wide(logits)
    peak = scaled.amax(-1, keepdim=True)
    scaled = scaled - peak
    weights = scaled.exp()
    total = weights.sum(-1, keepdim=True)
    log_total = total.log()[:, 0]
    negentropy = (weights * scaled).sum(-1) / total[:, 0] - log_total
    log_mass = torch.zeros_like(log_total)
    if full_logsumexp is not None:
        # Rounding may put the logsumexp of the part above that of the whole. Positions that count
        # have the target's likeliest token, so a mass of 1/V at least: the floor is for others.
        log_mass = peak[:, 0] + log_total - full_logsumexp.to(peak.dtype)
        log_mass = log_mass.clamp(min=-60.0, max=0.0)
    if kind == "rkl":
        out.copy_(scaled.add_((log_mass - log_total)[:, None]))
    else:
        out.copy_(weights.mul_((log_mass.exp() / total[:, 0])[:, None]))
    return TeacherRows(out, log_mass, negentropy)


def drafter_rows(
    kind: str,
    logits: Tensor,
    teacher: TeacherRows,
    own: Tensor,
    token: Tensor,
    temperature: float,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row of ``logits`` [R, D]: (loss, factor, alpha, whether ``token`` is the greedy draft).

    ``own`` [R] is the row's place in ``teacher``, ``token`` [R] the draft id of the target's greedy
    token. The gradient by the logits is ``factor[:, None] * out``; ``out`` may be ``logits``
    itself. Several greedy drafts of the same logit count as right if ``token`` is one of them.
    """
    scaled = _wide(logits) / temperature if temperature != 1.0 else _wide(logits)
    scaled = scaled - scaled.amax(-1, keepdim=True)
    at_token = scaled.gather(1, token[:, None])[:, 0]
    q = scaled.exp()
    total = q.sum(-1, keepdim=True)
    q = q.div_(total)
    own_rows = TeacherRows(*(part.index_select(0, own) for part in teacher))
    p = own_rows.table.exp() if kind == "rkl" else own_rows.table
    alpha = torch.minimum(p, q).sum(-1)
    log_total = total.log()[:, 0]
    if kind in ("tv", "lk"):
        loss, factor, gradient = _overlap(kind, p, q, alpha)
    elif kind == "ce":
        loss, factor = log_total - at_token, torch.ones_like(at_token)
        ids = torch.arange(q.shape[1], device=q.device)
        gradient = q.sub_((ids == token[:, None]).to(q.dtype))
    elif kind == "rkl":
        log_ratio = scaled.sub_((log_total - own_rows.log_mass)[:, None]).sub_(own_rows.table)
        loss = (q * log_ratio).sum(-1)
        factor, gradient = torch.ones_like(loss), q * log_ratio.sub_(loss[:, None])
    else:
        loss, factor, gradient = _divergence(kind, own_rows, scaled, q, alpha, log_total)
    out.copy_(gradient)
    return loss, factor / temperature, alpha, at_token >= 0


def _overlap(kind: str, p: Tensor, q: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Where both are the same but for rounding, either side's derivative will do, but the same one:
    # else a drafter that is the target would be pushed about by noise.
    below = (q < p * (1 - 64 * torch.finfo(p.dtype).eps)).to(q.dtype)
    gradient = q * ((q * below).sum(-1, keepdim=True) - below)
    if kind == "tv":
        return 1 - alpha, torch.ones_like(alpha), gradient
    # Where nothing overlaps, the gradient is 0 and the loss large, but neither is infinite.
    floored = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
    return -floored.log(), 1 / floored, gradient


def _divergence(
    kind: str, own: TeacherRows, scaled: Tensor, q: Tensor, alpha: Tensor, log_total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """``kl`` and the blend with it. log q = scaled - log_total."""
    p, per_mass = own.table, (-own.log_mass).exp()
    kl = own.negentropy + log_total - (p * scaled).sum(-1) * per_mass
    factor = torch.ones_like(kl)
    if kind == "kl":
        return kl, factor, q.sub_(p.mul_(per_mass[:, None]))
    weight = (alpha * -HYBRID_RATE).exp()
    tv, _, tv_gradient = _overlap("tv", p, q, alpha)
    gradient = tv_gradient.mul_((1 - weight)[:, None])
    gradient.add_(q.sub_(p.mul_(per_mass[:, None])).mul_(weight[:, None]))
    return weight * kl + (1 - weight) * tv, factor, gradient


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
