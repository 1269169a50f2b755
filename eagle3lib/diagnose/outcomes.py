"""The table of variants: what each would have recorded, beside the engine's record.

Rounds are compared where the engine started them (``rounds_equal``), so that a variant is judged by
every round, also after one that differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from eagle3lib.diagnose.served import (
    Answered,
    Setting,
    accepted_at,
    drafts_of,
    replays,
    rounds_equal,
)
from eagle3lib.diagnose.variants import Variant


@dataclass(frozen=True)
class Outcome:
    """One line of the table. ``gain`` is accepted drafts a base position beyond the drafter as
    exported, paired, with its standard error over answers. ``up_to``: (rounds equal, rounds) when
    only the first 1, 2, ... K - 1 drafts of each round are looked at."""

    cause: str
    label: str
    rounds_equal: int
    rounds: int
    acceptance_length: float | None
    gain: float
    gain_error: float
    accepted: tuple[int, ...]  # at every base position of all answers, end to end
    up_to: tuple[tuple[int, int], ...] = ()

    @property
    def equal_share(self) -> float:
        return self.rounds_equal / self.rounds if self.rounds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "variant": self.label,
            "rounds_equal": self.rounds_equal,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "gain_per_position": round(self.gain, 4),
            "gain_error": round(self.gain_error, 4),
        }


def outcomes(
    base: Setting,
    variants: Sequence[Variant],
    answers: Sequence[Answered],
    known: Sequence[Outcome] = (),
) -> list[Outcome]:
    """The table, the drafter as exported first. Variants that change nothing are left out; those
    of the same label in ``known``, a table of the same drafter and answers, are not made again."""
    made = {o.label: o for o in known}
    plain = made.get("as exported") or _outcome("", "as exported", base, answers, None)
    table = [plain]
    for variant in variants:
        if variant.label in made:
            table.append(replace(made[variant.label], cause=variant.cause))
        elif (setting := variant.apply(base)) is not None:
            table.append(_outcome(variant.cause, variant.label, setting, answers, plain))
    return table


def _outcome(
    cause: str, label: str, setting: Setting, answers: Sequence[Answered], plain: Outcome | None
) -> Outcome:
    drafts = drafts_of(setting, answers)
    equal, rounds = _equal(drafts, answers, setting.steps)
    counts = [accepted_at(d, a.answer) for d, a in zip(drafts, answers, strict=True)]
    walked = [n for r in replays(drafts, answers, setting.steps) for n in r.accepted]
    flat = tuple(n for part in counts for n in part)
    gain, error = _paired(counts, plain.accepted if plain else flat)
    return Outcome(
        cause, label, equal, rounds, round(1 + sum(walked) / len(walked), 4) if walked else None,
        gain, error, flat, tuple(_equal(drafts, answers, k) for k in range(1, setting.steps)),
    )  # fmt: skip


def _equal(drafts: list[Tensor], answers: Sequence[Answered], steps: int) -> tuple[int, int]:
    """(rounds equal, rounds) by the first ``steps`` drafts of each round."""
    pairs = [
        rounds_equal(d[:, :steps], a) for d, a in zip(drafts, answers, strict=True) if a.accepted
    ]
    return sum(e for e, _ in pairs), sum(n for _, n in pairs)


def _paired(counts: list[list[int]], plain: tuple[int, ...]) -> tuple[float, float]:
    """Mean difference a base position, and its standard error with answers as the units sampled."""
    sums, sizes, at = [], [], 0
    for part in counts:
        sums.append(sum(part) - sum(plain[at : at + len(part)]))
        sizes.append(len(part))
        at += len(part)
    if not at:
        return 0.0, math.inf
    mean = sum(sums) / at
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, sizes, strict=True))
    few = len(sums) / max(len(sums) - 1, 1)
    return mean, math.sqrt(few * spread) / at


def is_explained(table: Sequence[Outcome]) -> bool:
    """Whether a variant leaves a tenth of the differing rounds at most; the drafter as exported
    comes first."""
    most = max((o.rounds_equal for o in table[1:]), default=0)
    return _leaves_a_tenth(most, table[0].rounds_equal, table[0].rounds)


def explained_up_to(table: Sequence[Outcome], least: int) -> int | None:
    """The most drafts of a round, fewer than K, by which a variant explains what differs in
    ``least`` rounds or more: a fault that does more further on. None where there is none."""
    plain = table[0]
    for k in range(len(plain.up_to), 0, -1):
        equal, rounds = plain.up_to[k - 1]
        most = max((o.up_to[k - 1][0] for o in table[1:] if len(o.up_to) >= k), default=0)
        if rounds - equal >= least and _leaves_a_tenth(most, equal, rounds):
            return k
    return None


def _leaves_a_tenth(most: int, plain: int, rounds: int) -> bool:
    return rounds - most <= 0.1 * (rounds - plain)
