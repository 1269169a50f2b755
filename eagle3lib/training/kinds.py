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

The gradient of ``tv`` jumps where q = p, so logits that are wrong by e put tokens with |log q / p|
below e on the other side: a share of e of them, each wrong by all of itself, so that the norm of
the gradient's error goes with the square root of e, not with e. Products of bf16 alone (e about
0.003) leave 3 % and more. ``JUMPS`` names the kinds that need logits as exact as fp32 (``fused``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("kl", "ce", "rkl", "tv", "lk", "hybrid")
JUMPS = frozenset({"tv", "lk", "hybrid"})
HYBRID_RATE = 3.0


class TeacherRows(NamedTuple):
    """What a kind needs of the target's distributions, made once for all steps."""

    table: Tensor  # [U, D]: p, or log p for ``rkl``
    log_mass: Tensor  # [U]
    negentropy: Tensor  # [U]: sum of p' log p'


# On the CPU, fresh memory for each product costs more than the arithmetic: passes write to these
# [R, D] tensors. ``NO_SCRATCH`` lets torch find (a compiler: avoid) the memory.
Scratch = Sequence[Tensor | None]
SCRATCHES = 4
NO_SCRATCH: Scratch = (None,) * SCRATCHES


def teacher_rows(
    kind: str,
    logits: Tensor,
    full_logsumexp: Tensor | None,
    temperature: float,
    out: Tensor,
    scratch: Scratch = NO_SCRATCH,
) -> TeacherRows:
    """From the target's ``logits`` [U, D]; the table is written to ``out``, which may be them.

    ``full_logsumexp`` [U] is that of the whole vocabulary's logits / T; without it the mass is 1.
    """
    scaled, peak = _centred(logits, temperature, scratch[0])
    weights = torch.exp(scaled, out=scratch[1])
    total = weights.sum(-1)
    log_total = total.log()
    negentropy = torch.mul(weights, scaled, out=scratch[2]).sum(-1) / total - log_total
    log_mass = torch.zeros_like(log_total)
    if full_logsumexp is not None:
        # Rounding may put the logsumexp of the part above that of the whole. Positions that count
        # have the target's likeliest token, so a mass of 1/V at least: the floor is for others.
        log_mass = peak[:, 0] + log_total - full_logsumexp.to(peak.dtype)
        log_mass = log_mass.clamp(min=-60.0, max=0.0)
    if kind == "rkl":
        out.copy_(scaled.add_((log_mass - log_total)[:, None]))
    else:
        out.copy_(weights.mul_((log_mass.exp() / total)[:, None]))
    return TeacherRows(out, log_mass, negentropy)


def drafter_rows(
    kind: str,
    logits: Tensor,
    teacher: TeacherRows,
    own: Tensor,
    token: Tensor,
    temperature: float,
    out: Tensor,
    scratch: Scratch = NO_SCRATCH,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per row of ``logits`` [R, D]: (loss, factor, alpha, whether ``token`` is the greedy draft).

    ``own`` [R] is the row's place in ``teacher``, ``token`` [R] the draft id of the target's greedy
    token. The gradient by the logits is ``factor[:, None] * out``; ``out`` may be ``logits``
    itself. Several greedy drafts of the same logit count as right if ``token`` is one of them.
    """
    scaled, _ = _centred(logits, temperature, scratch[0])
    at_token = scaled.gather(1, token[:, None])[:, 0]
    q = torch.exp(scaled, out=scratch[1])
    total = q.sum(-1)
    q.mul_((1 / total)[:, None])
    log_total = total.log()
    log_mass, negentropy = teacher.log_mass[own], teacher.negentropy[own]
    table = torch.index_select(teacher.table, 0, own, out=scratch[2])
    p = torch.exp(table, out=scratch[3]) if kind == "rkl" else table
    spare = scratch[3]
    alpha = torch.minimum(p, q, out=spare).sum(-1)
    factor = torch.ones_like(alpha)
    if kind == "ce":
        loss, gradient = log_total - at_token, q
        q.scatter_add_(1, token[:, None], -factor[:, None])
    elif kind == "rkl":
        log_ratio = scaled.sub_((log_total - log_mass)[:, None]).sub_(table)
        loss = torch.mul(q, log_ratio, out=spare).sum(-1)
        gradient = q.mul_(log_ratio.sub_(loss[:, None]))
    elif kind == "kl":
        loss, gradient = _kl(p, q, scaled, log_total, log_mass, negentropy, spare, out)
    elif kind == "hybrid":
        tv_gradient = _tv_gradient(p, q, spare)
        # p and scaled are spent last: q is needed by both gradients
        kl, gradient = _kl(p, q, scaled, log_total, log_mass, negentropy, None, None)
        weight = (alpha * -HYBRID_RATE).exp()
        loss = weight * kl + (1 - weight) * (1 - alpha)
        gradient.mul_(weight[:, None]).add_(tv_gradient.mul_((1 - weight)[:, None]))
    else:
        gradient = _tv_gradient(p, q, spare)
        loss = 1 - alpha
        if kind == "lk":
            # Where nothing overlaps the gradient is 0 and the loss large, but neither is infinite.
            floored = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
            loss, factor = -floored.log(), 1 / floored
    if gradient is not out:
        out.copy_(gradient)
    return loss, factor / temperature, alpha, at_token >= 0


def _centred(logits: Tensor, temperature: float, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """(logits / T less their largest, that [R, 1]) in fp32, or fp64 as they come."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    scaled = logits.to(wide) if into is None or logits.dtype == wide else into.copy_(logits)
    if temperature != 1.0:
        scaled = torch.div(scaled, temperature, out=into)
    peak = scaled.amax(-1, keepdim=True)
    return torch.sub(scaled, peak, out=into), peak


def _tv_gradient(p: Tensor, q: Tensor, into: Tensor | None) -> Tensor:
    """q (sum q m - m), m = 1 where q < p.

    Where both are the same but for rounding, either side's derivative will do, but the same one:
    else a drafter that is the target would be pushed about by noise.
    """
    nearly = 1 - 64 * torch.finfo(p.dtype).eps
    below = torch.lt(q, torch.mul(p, nearly, out=into), out=into)
    share = torch.mul(q, below, out=into)
    total = share.sum(-1, keepdim=True)
    return torch.addcmul(torch.neg(share, out=into), q, total, out=into)


def _kl(
    p: Tensor,
    q: Tensor,
    scaled: Tensor,
    log_total: Tensor,
    log_mass: Tensor,
    negentropy: Tensor,
    spare: Tensor | None,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(kl, its gradient: in ``out`` where that is as wide, else in the place of q).
    log q = scaled - log_total."""
    per_mass = (-log_mass).exp()
    product = torch.mul(p, scaled, out=scaled if spare is None else spare)
    kl = negentropy + log_total - product.sum(-1) * per_mass
    place = out if out is not None and out.dtype == q.dtype else q
    return kl, torch.addcmul(q, p, per_mass[:, None], value=-1, out=place)
