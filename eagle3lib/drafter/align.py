"""The alignment, once: which state, which token, which label, at which position, in which step.

The worked row. Tokens x0..x9 of one conversation: the prompt has n = 4 tokens, the answer is
x4..x9. ``h_p`` are the target's states after it has read x_p. At base position p the drafter's

    step 0   reads h_p and x[p+1], sits at rotary position p,     and drafts x[p+2]
    step j   reads its own output of step j-1 and the token drafted there (in training and in a
             replay of accepted drafts: x[p+1+j]), sits at p + j, and drafts x[p+2+j]

    base p   step 0: in -> drafts   step 1: in -> drafts   step 2: in -> drafts
      3        h3, x4 -> x5             x5 -> x6               x6 -> x7
      4        h4, x5 -> x6             x6 -> x7               x7 -> x8
      ...
      7        h7, x8 -> x9             (x10 does not exist)

x4, the first answer token, comes from the prefill itself: it is never drafted, so the first base
position is n - 1 = 3. A round at p that accepts a drafts moves to p + a + 1. The teacher of step j
at p is the target's distribution after x[p+1+j], i.e. from the state at p + 1 + j.

Step 0 attends to the keys of positions 0..p, all made from the target's states; step j attends to
those and to its own chain's steps 1..j. Checked round by round against vLLM in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Base positions of one conversation that can be served (and are trained): first..last."""

    first: int  # n - 1
    last: int  # T - 3: the last base position whose first draft x[p+2] exists

    @property
    def count(self) -> int:
        return max(0, self.last - self.first + 1)


def base_span(prompt_tokens: int, total_tokens: int) -> Span:
    """Base positions of a conversation of ``total_tokens`` whose first ``prompt_tokens`` are
    prompt."""
    return Span(first=prompt_tokens - 1, last=total_tokens - 3)


def input_index(base: Tensor, step: int) -> Tensor:
    """Index of the token that enters ``step`` at base positions ``base``: x[p+1+step]."""
    return base + 1 + step


def label_index(base: Tensor, step: int) -> Tensor:
    """Index of the token that ``step`` drafts: x[p+2+step]."""
    return base + 2 + step


def teacher_index(base: Tensor, step: int) -> Tensor:
    """Index of the target state whose next-token distribution is the label: p + 1 + step."""
    return base + 1 + step


def label_exists(
    base: Int64[Tensor, " P"], step: int, total_tokens: Int64[Tensor, " P"]
) -> Bool[Tensor, " P"]:
    """Whether the token that ``step`` drafts is part of the conversation."""
    return label_index(base, step) < total_tokens


def base_positions(span: Span) -> Int64[Tensor, " P"]:
    return torch.arange(span.first, span.first + span.count)
