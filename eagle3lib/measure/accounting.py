"""Rounds, drafts and tokens of any engine brought to one identity, and what follows from them.

    tokens = requests + rounds + accepted - cut

Each request's first token comes from the prefill, each round gives its accepted drafts and one
token of the target's own; ``cut`` are accepted drafts beyond the stop token or the length limit of
a last round, which vLLM counts all the same.

    acceptance length    1 + accepted / rounds            (counts the target's own token)
    cost of a round      acceptance length / speed-up     in steps of the same engine without drafts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle3lib.engine.records import RoundCounts
from eagle3lib.lab.finding import Finding

MIN_PROMPTS = 5  # below it a bootstrap over prompts says nothing


@dataclass
class Counts:
    """Pooled counts of some requests; rates are properties, divided at display."""

    requests: int = 0
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # [k]: rounds that accepted step k too

    def add(self, tokens: int, accepted: Sequence[int], drafted: Sequence[int], steps: int) -> None:
        """Add one request: its answer tokens and, round by round, accepted and drafted counts."""
        self.accepted_at = self.accepted_at or [0] * steps
        self.requests += 1
        self.tokens += tokens
        self.rounds += len(accepted)
        self.drafted += sum(drafted)
        self.accepted += sum(accepted)
        for count in accepted:
            for k in range(count):
                self.accepted_at[k] += 1

    def add_counts(self, tokens: int, told: RoundCounts, steps: int) -> None:
        """Add one request whose rounds are known as counts. ``accepted_at`` is known as a whole or
        not at all: a request that does not tell it makes it unknown (empty)."""
        known = told.accepted_at is not None and (self.accepted_at or not self.requests)
        before = self.accepted_at or [0] * steps
        at = [*(told.accepted_at or []), *[0] * steps][:steps]
        self.accepted_at = [a + b for a, b in zip(before, at, strict=True)] if known else []
        self.requests += 1
        self.tokens += tokens
        self.rounds += told.rounds
        self.drafted += told.rounds * steps if told.drafted is None else told.drafted
        self.accepted += told.accepted

    @property
    def cut(self) -> int:
        """Accepted drafts beyond the end of their answers, from the identity. Never negative.
        SGLang's holds a verify round a request that gave no token, too."""
        return self.requests + self.rounds + self.accepted - self.tokens

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def per_step(self) -> list[float]:
        """Share of rounds that accepted step k (and so all before it)."""
        return [n / self.rounds for n in self.accepted_at] if self.rounds else []

    @property
    def conditional(self) -> list[float | None]:
        """Acceptance at step k given that the steps before were accepted."""
        if not self.accepted_at:
            return []
        before = [self.rounds, *self.accepted_at[:-1]]
        return [n / b if b else None for n, b in zip(self.accepted_at, before, strict=True)]

    def as_dict(self) -> dict[str, object]:
        """For metrics.json: counts, and rates rounded for people."""
        return {
            "requests": self.requests,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "accepted_at": self.accepted_at,
            "cut": self.cut,
            "acceptance_length": _rounded(self.acceptance_length),
            "acceptance_rate": _rounded(self.acceptance_rate),
            "per_step": [_rounded(x) for x in self.per_step],
            "conditional": [_rounded(x) for x in self.conditional],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def rounds_of(drafted: int, num_speculative_tokens: int) -> float:
    """Rounds behind a bare count of drafted tokens, where every round drafts K."""
    return drafted / num_speculative_tokens


def round_cost(acceptance_length: float, speedup: float) -> float:
    """Cost of a round in plain steps; a drafter pays when its acceptance length is above it."""
    return acceptance_length / speedup


@dataclass(frozen=True)
class PairedTiming:
    """One prompt asked of both arms (all its repeats): tokens and seconds of each."""

    plain_tokens: int
    plain_s: float
    spec_tokens: int
    spec_s: float


@dataclass(frozen=True)
class Speedup:
    """Pooled, paired speed-up and its 95 % interval over prompts; None where prompts are too
    few."""

    plain_tokens_per_s: float
    spec_tokens_per_s: float
    value: float
    low: float | None
    high: float | None


def pooled_speedup(pairs: Sequence[PairedTiming], resamples: int = 2000, seed: int = 0) -> Speedup:
    """Tokens per second of the arms pooled over prompts, and their ratio.

    The interval is a bootstrap over prompts (percentiles 2.5 and 97.5): prompts, not requests, are
    what was sampled; the repeats of one prompt share its acceptance. Fewer than five prompts give
    no interval: a resample of one prompt would always be that prompt.
    """
    table = np.array(
        [[p.plain_tokens, p.plain_s, p.spec_tokens, p.spec_s] for p in pairs], dtype=float
    )

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])

    total = table.sum(0)
    low = high = None
    if len(table) >= MIN_PROMPTS:
        low, high = _interval(ratio, table, resamples, seed)
    return Speedup(
        plain_tokens_per_s=total[0] / total[1],
        spec_tokens_per_s=total[2] / total[3],
        value=float(ratio(total)),
        low=low,
        high=high,
    )


def _interval(
    ratio: Callable[[np.ndarray], np.ndarray], table: np.ndarray, resamples: int, seed: int
) -> tuple[float, float]:
    picks = np.random.default_rng(seed).integers(0, len(table), (resamples, len(table)))
    low, high = np.percentile(ratio(table[picks].sum(1)), [2.5, 97.5])
    return float(low), float(high)


def check_speedup(
    speedup: Speedup, acceptance_length: float, where: str = "06_benchmark_serving"
) -> list[Finding]:
    """A round costs at least one plain step, so no speed-up exceeds the acceptance length: whatever
    the load, since both arms have as many requests in flight."""
    if speedup.low is None or speedup.low <= acceptance_length:
        return []
    return [
        Finding(
            "impossible-speedup",
            "error",
            f"the speed-up {speedup.value:.2f} (at least {speedup.low:.2f}) exceeds the acceptance "
            f"length {acceptance_length:.2f}",
            "a verify round costs at least one plain step",
            "the baseline is crippled or the arms differ in more than the drafter: compare "
            "their flags, threads and logs, then measure again",
            where,
        )
    ]


def check_identity(counts: Counts, steps: int) -> list[Finding]:
    """The identity must leave between 0 and K cut drafts a request."""
    if 0 <= counts.cut <= counts.requests * steps:
        return []
    return [
        Finding(
            "accounting",
            "error",
            f"tokens {counts.tokens} do not follow from {counts.requests} requests, "
            f"{counts.rounds} rounds and {counts.accepted} accepted drafts",
            "tokens = requests + rounds + accepted - cut, with cut from 0 to K a request",
            "counters are cumulative or of another server: take differences on one server",
            "06_benchmark_serving",
        )
    ]


def total(counts: Iterable[Counts]) -> Counts:
    """Sum of counts with the same K."""
    result = Counts()
    for c in counts:
        result.requests += c.requests
        result.tokens += c.tokens
        result.rounds += c.rounds
        result.drafted += c.drafted
        result.accepted += c.accepted
        width = max(len(result.accepted_at), len(c.accepted_at))
        padded = [x + [0] * (width - len(x)) for x in (result.accepted_at, c.accepted_at)]
        result.accepted_at = [a + b for a, b in zip(*padded, strict=True)]
    return result
