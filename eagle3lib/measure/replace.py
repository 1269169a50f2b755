"""May a new drafter replace a deployed one? Both on the same prompts, paired, with an interval.

Offline both are replayed along the target's own held-out answers, so neither is measured by text
that the other helped to write; served, they are two arms of one benchmark. What is compared is the
pooled acceptance length; the interval is a bootstrap over prompts. Speed needs the benchmark: a
drafter that is larger or drafts more tokens must also pay for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3lib.lab.errors import UserError
from eagle3lib.measure.accounting import MIN_PROMPTS
from eagle3lib.measure.arms import RequestRow, counts_of

REPLACE, KEEP, UNDECIDED = "replace", "keep", "not told apart"


@dataclass(frozen=True)
class PairedRounds:
    """One prompt under both drafters: rounds and accepted drafts of each."""

    old_rounds: int
    old_accepted: int
    new_rounds: int
    new_accepted: int


@dataclass(frozen=True)
class Replacement:
    """``difference``: new minus old acceptance length, with its 95 % interval over prompts."""

    decision: str
    prompts: int
    old_length: float
    new_length: float
    difference: float
    low: float
    high: float
    allowed_loss: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def decide(
    pairs: Sequence[PairedRounds],
    *,
    allowed_loss: float = 0.0,
    resamples: int = 4000,
    seed: int = 0,
) -> Replacement:
    """Replace when the whole interval lies above ``-allowed_loss``, keep when it lies below.

    ``allowed_loss`` in tokens a round: 0 demands that the new one is better, a little more that it
    is no worse. Raises ``UserError`` with fewer than five prompts: their bootstrap says nothing.
    """
    table = np.array(
        [[p.old_rounds, p.old_accepted, p.new_rounds, p.new_accepted] for p in pairs], dtype=float
    ).reshape(-1, 4)
    table = table[(table[:, 0] > 0) & (table[:, 2] > 0)]
    if len(table) < MIN_PROMPTS:
        raise UserError(
            f"{len(table)} prompts have rounds of both drafters",
            expected=f"{MIN_PROMPTS} or more",
            next="a run with more held-out prompts (heldout_workload of phase 01)",
        )
    picks = np.random.default_rng(seed).integers(0, len(table), (resamples, len(table)))
    low, high = np.percentile(_difference(table[picks].sum(1)), [2.5, 97.5])
    total = table.sum(0)
    decision = UNDECIDED
    if low > -allowed_loss:
        decision = REPLACE
    elif high < -allowed_loss:
        decision = KEEP
    return Replacement(
        decision,
        len(table),
        round(1 + total[1] / total[0], 4),
        round(1 + total[3] / total[2], 4),
        round(float(_difference(total)), 4),
        round(float(low), 4),
        round(float(high), 4),
        allowed_loss,
    )


def _difference(sums: np.ndarray) -> np.ndarray:
    return sums[..., 3] / sums[..., 2] - sums[..., 1] / sums[..., 0]


def served_pairs(
    rows: list[RequestRow], old: str, new: str, steps: int, set_name: str = "workload"
) -> list[PairedRounds]:
    """The two arms of a benchmark, all repeats of a prompt together."""
    pairs = []
    for prompt in dict.fromkeys(r.prompt for r in rows if r.set == set_name):
        a, b = (
            counts_of([r for r in rows if (r.prompt, r.arm) == (prompt, arm)], steps)
            for arm in (old, new)
        )
        pairs.append(PairedRounds(a.rounds, a.accepted, b.rounds, b.accepted))
    return pairs
