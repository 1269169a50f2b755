"""Follow a live endpoint's /metrics: acceptance, speed and latency, and an alarm when they drift.

vLLM tells counters of rounds and accepted drafts, by position: the differences are exact. SGLang
tells a gauge of the acceptance length, from which rounds follow only roughly
(tokens / length), and nothing by position.

The alarm is a one-sided CUSUM over the looks (Page 1954). Look i has n_i rounds with mean m_i
accepted drafts; the reference has n_0 with mean m_0 and variance v of a round::

    z_i = (m_0 - m_i) / sqrt(v * D * (1 / n_i + 1 / n_0))      positive: worse than the reference
    S_i = max(0, S_(i-1) + z_i - k)                            alarm when S_i > h

k = 1/2 is best against a fall of one standard deviation of a look; h comes from the mean number of
looks between false alarms (Siegmund 1985: (exp(2 k b) - 2 k b - 1) / (2 k^2), b = h + 1.166). D is
how much more the mean of real requests varies than that of independent rounds: rounds of one
request share its text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from eagle3lib.engine.access import open_url
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.measure.result import rounded

_K = 0.5
_OVERSHOOT = 1.166
_TEXT_SPREAD = 4.0  # D without a measurement: seen from 2 to 6 on chat, code and mathematics
_GAUGE = "sglang:spec_accept_length"
_SUMS = {
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "tokens",
    "sglang:generation_tokens_total": "tokens",
    "vllm:time_to_first_token_seconds_sum": "first_token_s",
    "sglang:time_to_first_token_seconds_sum": "first_token_s",
    "vllm:time_to_first_token_seconds_count": "first_tokens",
    "sglang:time_to_first_token_seconds_count": "first_tokens",
    "vllm:inter_token_latency_seconds_sum": "between_s",
    "sglang:inter_token_latency_seconds_sum": "between_s",
    "vllm:inter_token_latency_seconds_count": "betweens",
    "sglang:inter_token_latency_seconds_count": "betweens",
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_LEVELS = ("running", "length")  # what is no counter


def read_metrics(url: str, timeout_s: float = 10.0) -> dict[str, float]:
    """The sums of /metrics that matter here, by our names; ``at_N`` from 0 is accepted at step
    N + 1. Raises ``UserError`` when the endpoint can't be read or tells none of them."""
    address = f"{url.rstrip('/')}/metrics"
    try:
        with open_url(address, timeout_s) as answer:
            text = answer.read().decode("utf-8", errors="replace")
        found = parse_metrics(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no metrics: {error}",
            expected="an endpoint of vLLM, or of SGLang started with --enable-metrics",
            where=address,
        ) from None
    if "tokens" not in found:
        raise UserError(
            "these metrics are no engine's: no count of generated tokens",
            expected="vllm:generation_tokens_total or sglang:generation_tokens_total",
            where=address,
        )
    return found


def parse_metrics(text: str) -> dict[str, float]:
    """Sums over engines and ranks; the gauge of SGLang's acceptance length is a mean."""
    found: dict[str, float] = {}
    gauges = []
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _SUMS.get(sample.name)
            if sample.name == _PER_POSITION:
                name = f"at_{sample.labels['position']}"
            if sample.name == _GAUGE and sample.value > 0:
                gauges.append(sample.value)
            if name:
                found[name] = found.get(name, 0.0) + sample.value
    return found | ({"length": sum(gauges) / len(gauges)} if gauges else {})


@dataclass(frozen=True)
class Look:
    """What happened between two looks. ``rough``: rounds follow from a gauge, not from counts."""

    seconds: float
    tokens: int
    requests: int
    rounds: int
    accepted: int
    accepted_at: list[int]
    running: int
    first_token_s: float | None  # mean
    inter_token_s: float | None  # mean, as the engine counts it
    restarted: bool = False
    rough: bool = False

    @property
    def acceptance_length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def per_step(self) -> list[float]:
        return [n / self.rounds for n in self.accepted_at] if self.rounds else []


def look_between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Look:
    """Differences of two readings. A server that was started anew has smaller counters than
    before: the look then starts from 0."""
    restarted = any(after[n] < before.get(n, 0.0) for n in after if n not in _LEVELS)
    base = {} if restarted else before

    def grown(name: str) -> float:
        return after.get(name, 0.0) - base.get(name, 0.0)

    positions = sorted((n for n in after if n.startswith("at_")), key=lambda n: int(n[3:]))
    tokens, rounds, accepted = grown("tokens"), grown("rounds"), grown("accepted")
    rough = "rounds" not in after and "length" in after
    if rough:
        rounds = tokens / after["length"]
        accepted = tokens - rounds
    return Look(
        seconds=seconds,
        tokens=int(tokens),
        requests=int(grown("first_tokens")),
        rounds=round(rounds),
        accepted=round(accepted),
        accepted_at=[int(grown(n)) for n in positions],
        running=int(after.get("running", 0)),
        first_token_s=_mean(grown("first_token_s"), grown("first_tokens")),
        inter_token_s=_mean(grown("between_s"), grown("betweens")),
        restarted=restarted,
        rough=rough,
    )


def _mean(total: float, count: float) -> float | None:
    return total / count if count else None


@dataclass(frozen=True)
class Reference:
    """Acceptance that is held for normal: pooled counts, and D of the module's formula."""

    rounds: int
    accepted: int
    accepted_at: list[int]
    spread: float = _TEXT_SPREAD
    spread_measured: bool = False

    @property
    def mean(self) -> float:
        return self.accepted / self.rounds

    @property
    def variance(self) -> float:
        """Of a round's accepted drafts a: E[a^2] = sum over k of (2k - 1) P(a >= k)."""
        square = sum((2 * k - 1) * n for k, n in enumerate(self.accepted_at, start=1))
        found = square / self.rounds - self.mean**2
        # Without the counts by step: a geometric variable of that mean has the largest spread.
        return found if self.accepted_at else self.mean * (1 + self.mean)


def read_reference(path: Path) -> Reference:
    """Out of a benchmark's metrics.json (own drafter, workload), or a file that a watch wrote.

    Raises ``UserError`` for a file that is neither.
    """
    if not path.exists():
        raise UserError("the reference is not there", where=path, next="a run's 06 metrics.json")
    told = read_json(path)
    if isinstance(told, dict) and "arms" in told:
        told = told.get("reference") or {}
    if not isinstance(told, dict) or not told.get("rounds"):
        raise UserError(
            "no reference: it tells of no rounds",
            expected="metrics.json of 06_benchmark_serving, or {rounds, accepted, accepted_at}",
            where=path,
        )
    measured = told.get("spread")
    return Reference(
        told["rounds"],
        told["accepted"],
        list(told.get("accepted_at") or []),
        max(1.0, measured) if measured else _TEXT_SPREAD,
        bool(measured),
    )


def threshold(looks_between_false_alarms: float) -> float:
    """h of the CUSUM for a mean number of looks between false alarms, by bisection."""

    def looks(h: float) -> float:
        b = 2 * _K * (h + _OVERSHOOT)
        return (math.exp(b) - b - 1) / (2 * _K * _K)

    if looks_between_false_alarms <= looks(0.0):
        return 0.0
    low, high = 0.0, 100.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if looks(middle) < looks_between_false_alarms else (low, middle)
    return high


@dataclass
class DriftAlarm:
    """Acceptance below the reference's. ``min_rounds`` are gathered before a look counts."""

    reference: Reference
    looks_between_false_alarms: float = 1000.0
    min_rounds: int = 200
    sum: float = field(init=False, default=0.0)
    looks: int = field(init=False, default=0)
    last_z: float | None = field(init=False, default=None)
    _rounds: int = field(init=False, default=0)
    _accepted: int = field(init=False, default=0)

    @property
    def limit(self) -> float:
        return threshold(self.looks_between_false_alarms)

    def add(self, look: Look) -> bool:
        """Whether the acceptance has drifted, with this look."""
        self._rounds += look.rounds
        self._accepted += look.accepted
        if self._rounds < self.min_rounds:
            return False
        ref, mean = self.reference, self._accepted / self._rounds
        noise = ref.variance * ref.spread * (1 / self._rounds + 1 / ref.rounds)
        self._rounds = self._accepted = 0
        self.looks += 1
        self.last_z = (ref.mean - mean) / math.sqrt(noise) if noise > 0 else 0.0
        self.sum = max(0.0, self.sum + self.last_z - _K)
        return self.sum > self.limit

    def as_dict(self) -> dict[str, Any]:
        return {
            "looks": self.looks,
            "sum": rounded(self.sum),
            "limit": rounded(self.limit),
            "reference_length": rounded(1 + self.reference.mean),
            "looks_between_false_alarms": self.looks_between_false_alarms,
        }
