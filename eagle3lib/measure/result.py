"""One schema for one arm at one point, whatever the engine and its version.

Counts are pooled, rates are divided here, once, for the report::

    tokens_per_s              tokens over the requests' own seconds: what one reader gets
    throughput_tokens_per_s   tokens over the wall clock of whole blocks: what the machine gives
    first_token_s             from sending the request to its first token
    inter_token_s             a chunk's wait shared by its tokens: a round brings several at once
    inter_chunk_s             the waits themselves, as a reader sees them
    acceptance                pooled counts; acceptance_length is the headline, per_request_length
                              the mean of the requests' own, which other tools report
    round_cost                acceptance length / speed-up, in plain steps: the break-even
    round_cost_streamed       the same from the clock alone: seconds a round over seconds a plain
                              step, both without the prefill
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3lib.measure.accounting import MIN_PROMPTS, pooled_speedup, round_cost, total
from eagle3lib.measure.arms import PLAIN, RequestRow, counts_of, paired
from eagle3lib.measure.points import Point

_S_PER_HOUR = 3600


@dataclass(frozen=True)
class ArmResult:
    """``num_speculative_tokens`` is drafted per round, 0 for the engine alone."""

    arm: str
    set: str
    engine: str
    num_speculative_tokens: int
    compared_with_k: int  # K of the drafter beside which this arm was measured
    concurrency: int
    temperature: float
    context_tokens: int
    requests: int
    prompt_tokens: int
    tokens: int
    seconds: float
    tokens_per_s: float
    throughput_tokens_per_s: float
    repeat_tokens_per_s: list[float]
    latency_s: dict[str, float]
    first_token_s: dict[str, float] | None
    inter_token_s: dict[str, float] | None
    inter_chunk_s: dict[str, float] | None
    cost_per_million_tokens: float | None
    acceptance: dict[str, Any] | None = None
    speedup: dict[str, float | None] | None = None
    round_cost: float | None = None
    round_cost_streamed: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For metrics.json; what only a drafter has is left out for the engine alone."""
        told = asdict(self)
        spec = ("acceptance", "speedup", "round_cost", "round_cost_streamed")
        return {k: v for k, v in told.items() if self.arm != PLAIN or k not in spec}


def arm_result(
    rows: list[RequestRow], arm: str, set_name: str, point: Point, price_per_hour: float = 0.0
) -> ArmResult:
    """``rows``: one point's, all arms; the plain arm's are what a drafter is compared with."""
    mine = [r for r in rows if (r.arm, r.set) == (arm, set_name)]
    tokens, seconds = _tokens(mine), sum(r.duration_s for r in mine)
    # Both sets of prompts are in flight together: the machine's speed is that of the whole block.
    block = mine if point.concurrency == 1 else [r for r in rows if r.arm == arm]
    throughput = throughput_of(block, point.concurrency)
    result: dict[str, Any] = {
        "arm": arm,
        "set": set_name,
        "engine": point.engine,
        "num_speculative_tokens": 0 if arm == PLAIN else point.steps,
        "compared_with_k": point.steps,
        "concurrency": point.concurrency,
        "temperature": point.temperature,
        "context_tokens": point.context_tokens,
        "requests": len(mine),
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in mine),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "throughput_tokens_per_s": round(throughput, 2),
        "repeat_tokens_per_s": _by_repeat(mine),
        "latency_s": percentiles([r.duration_s for r in mine]),
        "first_token_s": percentiles([r.chunk_s[0] for r in mine if r.chunk_s]),
        "inter_token_s": percentiles(_token_waits(mine)),
        "inter_chunk_s": percentiles([w for r in mine for w, _ in _waits(r)]),
        "cost_per_million_tokens": cost_per_million(price_per_hour, throughput),
    }
    return ArmResult(**result | ({} if arm == PLAIN else _against_plain(rows, mine, point)))


def _against_plain(rows: list[RequestRow], mine: list[RequestRow], point: Point) -> dict[str, Any]:
    arm, set_name = mine[0].arm, mine[0].set
    counts = counts_of(mine, point.steps)
    length = counts.acceptance_length
    told: dict[str, Any] = {
        "acceptance": counts.as_dict()
        | {"per_request_length": per_request_length(mine, point.steps)},
    }
    pairs = paired(rows, arm, set_name)
    if not pairs:  # no baseline: check_baseline says so
        return told
    speedup = pooled_speedup(pairs)
    plain = [r for r in rows if (r.arm, r.set) == (PLAIN, set_name)]
    return told | {
        "speedup": {
            "value": round(speedup.value, 4),
            "low": rounded(speedup.low),
            "high": rounded(speedup.high),
        },
        "round_cost": round(round_cost(length, speedup.value), 4) if length else None,
        "round_cost_streamed": rounded(streamed_round_cost(plain, mine, point.steps)),
    }


def streamed_round_cost(
    plain: list[RequestRow], spec: list[RequestRow], steps: int
) -> float | None:
    """Seconds of a round over seconds of a plain step, pooled, after the first token.

    None where the requests were not streamed or the rounds are unknown.
    """
    plain, spec = ([r for r in rows if len(r.chunk_s) > 1] for rows in (plain, spec))
    rounds = counts_of(spec, steps).rounds
    plain_steps = _tokens(plain) - len(plain)
    if not rounds or not plain_steps:
        return None
    plain_s = sum(r.chunk_s[-1] - r.chunk_s[0] for r in plain)
    spec_s = sum(r.chunk_s[-1] - r.chunk_s[0] for r in spec)
    return (spec_s / rounds) / (plain_s / plain_steps)


def per_request_length(rows: list[RequestRow], steps: int) -> float | None:
    """Mean of the requests' own acceptance lengths, each weighing the same (vLLM issue 42508: two
    tools that differ in this order two drafters differently)."""
    lengths = [counts_of([row], steps).acceptance_length for row in rows]
    known = [length for length in lengths if length is not None]
    return round(sum(known) / len(known), 4) if known else None


def cost_per_million(price_per_hour: float, tokens_per_s: float) -> float | None:
    """Price of a million answer tokens, in the currency of the price; None without a price."""
    if not price_per_hour or not tokens_per_s:
        return None
    return round(price_per_hour / _S_PER_HOUR / tokens_per_s * 1e6, 4)


def percentiles(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 5), "p99": round(float(p99), 5)}


def _waits(row: RequestRow) -> list[tuple[float, int]]:
    """(seconds waited, tokens) of each chunk after the first."""
    pairs = zip(row.chunk_s, row.chunk_s[1:], row.chunk_tokens[1:], strict=False)
    return [(after - before, tokens) for before, after, tokens in pairs]


def _token_waits(rows: list[RequestRow]) -> list[float]:
    return [wait / n for row in rows for wait, n in _waits(row) for _ in range(n)]


def _tokens(rows: list[RequestRow]) -> int:
    return sum(len(r.answer_token_ids) for r in rows)


def throughput_of(rows: list[RequestRow], concurrency: int) -> float:
    """Tokens per second of whole blocks (one a repeat); one at a time it is the reader's speed."""
    seconds = 0.0
    for repeat in {r.repeat for r in rows}:
        part = [r for r in rows if r.repeat == repeat]
        if concurrency == 1:
            seconds += sum(r.duration_s for r in part)
        else:
            seconds += max(r.started_s + r.duration_s for r in part) - min(
                r.started_s for r in part
            )
    return _tokens(rows) / seconds if seconds else 0.0


def _by_repeat(rows: list[RequestRow]) -> list[float]:
    """Tokens per second of each repeat on its own: the spread that the machine brings."""
    result = []
    for repeat in sorted({r.repeat for r in rows}):
        part = [r for r in rows if r.repeat == repeat]
        result.append(round(_tokens(part) / sum(r.duration_s for r in part), 2))
    return result


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def reference_of(rows: list[RequestRow], steps: int) -> dict[str, Any] | None:
    """Counts that a watch holds for normal, out of one arm's and set's rows; None without rounds.

    First repeats alone: greedy repeats are copies. ``spread`` is how much more the mean of a
    round's accepted drafts varies than that of independent rounds, since the rounds of a prompt
    share its text (the design effect of cluster sampling, Kish 1965); None below five prompts.
    """
    clusters = [counts_of([r], steps) for r in rows if r.repeat == 0]
    clusters = [c for c in clusters if c.rounds]
    pooled = total(clusters)
    if not pooled.rounds:
        return None
    mean = pooled.accepted / pooled.rounds
    square = sum((2 * k - 1) * n for k, n in enumerate(pooled.accepted_at, start=1))
    variance = square / pooled.rounds - mean**2
    spread = None
    if len(clusters) >= MIN_PROMPTS and pooled.accepted_at and variance > 0:
        residual = sum((c.accepted - mean * c.rounds) ** 2 for c in clusters)
        between = residual * len(clusters) / (len(clusters) - 1) / pooled.rounds**2
        spread = between / (variance / pooled.rounds)
    return {
        "rounds": pooled.rounds,
        "accepted": pooled.accepted,
        "accepted_at": pooled.accepted_at,
        "spread": rounded(spread),
    }
