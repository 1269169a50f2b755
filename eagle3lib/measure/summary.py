"""The benchmark's result: one schema whatever the engine, written to metrics.json and shown."""

from __future__ import annotations

import statistics
from typing import Any

import pandas as pd

from eagle3lib.engine.vllm import engine_version
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.accounting import (
    check_identity,
    check_speedup,
    pooled_speedup,
    round_cost,
)
from eagle3lib.measure.arms import PLAIN, RequestRow, counts_of, output_differences, paired

SETS = ("workload", "general")


def summarise(
    rows: list[RequestRow], cfg: BenchmarkParams, counters: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Arms by set: speed with its interval over prompts, acceptance, cost of a round.

    ``counters`` are the differences of the engine's own metrics of each arm, kept beside the pooled
    per-request records (they include the warm-up requests only if the caller says so; ours do not).
    """
    arms = list(dict.fromkeys(row.arm for row in rows))
    table = [
        _arm(rows, arm, name, cfg)
        for name in SETS
        for arm in sorted(arms, key=_order)
        if any(r.set == name for r in rows)
    ]
    drafters = [arm for arm in arms if arm != PLAIN]
    prompts = len({row.prompt for row in rows})
    return {
        "engine": engine_version(),
        "dtype": cfg.dtype,
        "num_speculative_tokens": cfg.num_speculative_tokens,
        "repeats": cfg.repeats,
        "concurrency": 1,
        "temperature": 0.0,
        "arms": table,
        "counters": counters,
        "identical_outputs": {
            arm: {"prompts": prompts, "equal": prompts - len(output_differences(rows, arm))}
            for arm in drafters
        },
    }


def _order(arm: str) -> int:
    return 0 if arm == PLAIN else 1


def _arm(rows: list[RequestRow], arm: str, name: str, cfg: BenchmarkParams) -> dict[str, Any]:
    mine = [r for r in rows if (r.arm, r.set) == (arm, name)]
    seconds = sum(r.duration_s for r in mine)
    tokens = sum(len(r.answer_token_ids) for r in mine)
    result: dict[str, Any] = {
        "arm": arm,
        "set": name,
        "requests": len(mine),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "repeat_tokens_per_s": _by_repeat(mine),
        "latency_s": {"p50": round(statistics.median(r.duration_s for r in mine), 4)},
    }
    if arm == PLAIN:
        return result
    counts = counts_of(mine, cfg.num_speculative_tokens)
    speedup = pooled_speedup(paired(rows, arm, name))
    length = counts.acceptance_length
    result |= {
        "acceptance": counts.as_dict(),
        "speedup": {
            "value": round(speedup.value, 4),
            "low": _rounded(speedup.low),
            "high": _rounded(speedup.high),
        },
        "round_cost": round(round_cost(length, speedup.value), 4) if length else None,
    }
    return result


def _by_repeat(rows: list[RequestRow]) -> list[float]:
    """Tokens per second of each repeat on its own: the spread that the machine brings."""
    result = []
    for repeat in sorted({r.repeat for r in rows}):
        part = [r for r in rows if r.repeat == repeat]
        tokens = sum(len(r.answer_token_ids) for r in part)
        result.append(round(tokens / sum(r.duration_s for r in part), 2))
    return result


def check_benchmark(rows: list[RequestRow], metrics: dict[str, Any]) -> list[Finding]:
    """What makes a benchmark's numbers unusable, whatever they say."""
    steps, findings = metrics["num_speculative_tokens"], []
    for line in metrics["arms"]:
        if line["arm"] == PLAIN:
            continue
        mine = [r for r in rows if (r.arm, r.set) == (line["arm"], line["set"])]
        counts = counts_of(mine, steps)
        findings += check_identity(counts, steps)
        speedup = pooled_speedup(paired(rows, line["arm"], line["set"]))
        if counts.acceptance_length is not None:
            findings += check_speedup(speedup, counts.acceptance_length)
    return findings + _check_counters(rows, metrics)


def _check_counters(rows: list[RequestRow], metrics: dict[str, Any]) -> list[Finding]:
    """The server's counters and the per-request records tell of the same rounds."""
    findings = []
    for arm, counters in metrics["counters"].items():
        if not counters:
            continue
        counts = counts_of([r for r in rows if r.arm == arm], metrics["num_speculative_tokens"])
        if (counters.get("drafts"), counters.get("accepted_tokens")) != (
            counts.rounds,
            counts.accepted,
        ):
            findings.append(
                Finding(
                    "counters-differ",
                    "warning",
                    f"{arm}: the server counted {counters.get('drafts'):.0f} rounds and "
                    f"{counters.get('accepted_tokens'):.0f} accepted drafts, its answers "
                    f"{counts.rounds} and {counts.accepted}",
                    "the same numbers",
                    "another client used the server, or the benchmark was killed on its way",
                    "06_benchmark_serving",
                )
            )
    return findings


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def interval_text(speedup: dict[str, Any]) -> str:
    """The 95 % interval of a speed-up as people read it."""
    if speedup["low"] is None:
        return "too few prompts"
    return f"{speedup['low']:.2f} to {speedup['high']:.2f}"


def arms_table(metrics: dict[str, Any]) -> pd.DataFrame:
    """The table of arms as people read it."""
    lines = []
    for line in metrics["arms"]:
        accepted, speed = line.get("acceptance") or {}, line.get("speedup") or {}
        lines.append(
            {
                "set": line["set"],
                "arm": line["arm"],
                "tok/s": line["tokens_per_s"],
                "acceptance length": accepted.get("acceptance_length"),
                "speed-up": speed.get("value"),
                "95 % interval": interval_text(speed) if speed else "",
                "cost of a round": line.get("round_cost"),
                "tokens": line["tokens"],
            }
        )
    return pd.DataFrame(lines)
