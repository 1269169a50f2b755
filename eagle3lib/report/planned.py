"""What the plan said beside what the run measured: time, speed, size, cost of a round.

Only what both know has a line. The plan is of a device and of token counts that may not be the
run's (``eagle3 plan`` for another machine), so each line tells the tokens of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.files import read_json
from eagle3lib.lab.words import duration_text, size_text
from eagle3lib.measure.arms import OWN, PLAIN

_PLAN, _BENCHMARK = "00_plan", "06_benchmark_serving"


@dataclass(frozen=True)
class PlannedLine:
    """``planned`` and ``measured`` as people read them, ``ratio``: measured over planned."""

    what: str
    planned: str
    measured: str
    ratio: float | None
    detail: str = ""


@dataclass(frozen=True)
class PlannedBeside:
    """``device``: what the plan is of."""

    device: str
    lines: list[PlannedLine]


def planned_beside_measured(folder: Path, metrics: dict[str, Any]) -> PlannedBeside | None:
    """``metrics``: of the phases that are whole, by phase. None for a run without a plan, and
    before anything that was planned is done."""
    plan = metrics.get(_PLAN, {})
    if "phases" not in plan:
        return None
    lines = [*_phases(folder, plan, metrics), *_benchmark(plan, metrics.get(_BENCHMARK))]
    return PlannedBeside(str(plan["device"]["device"]), lines) if lines else None


def _phases(folder: Path, plan: dict[str, Any], metrics: dict[str, Any]) -> Iterator[PlannedLine]:
    known = {line["phase"]: line for line in plan["phases"]}
    for phase, name, speed, count in (
        ("01_generate_data", "generate answers", "tokens_per_s", _answered),
        ("02_capture_hidden_states", "capture states", "captured_tokens_per_s", _captured),
        ("04_train_drafter", "train the drafter", "tokens_per_s", _trained),
    ):
        line, told = known.get(name), metrics.get(phase)
        if not line or not told:
            continue
        manifest = read_json(folder / phase / "manifest.json")
        made = count(told)
        tokens = f"{line['tokens']:,} tokens planned" + (f", {made:,} made" if made else "")
        took = f"{tokens}; measured with all that the phase does, an engine's start too"
        size = f"{tokens}; planned: the most at once" if name == "train the drafter" else tokens
        planned_s, stored = 3600 * line["hours"], sum(manifest["artefacts"].values())
        yield _line(f"{name}: time", planned_s, manifest["duration_s"], duration_text, took)
        yield _line(f"{name}: tokens/s", line["tokens_per_s"], told.get(speed), _number)
        yield _line(f"{name}: disk", line["disk_bytes"], stored, size_text, size)


def _answered(told: dict[str, Any]) -> int:
    return sum(told.get("answer_tokens", {}).values())


def _captured(told: dict[str, Any]) -> int:
    return int(told.get("tokens") or 0)


def _trained(told: dict[str, Any]) -> int:
    """Tokens that went through the drafter, prompts and every epoch counted, as planned."""
    return round(told.get("tokens_per_s", 0.0) * told.get("seconds", 0.0))


def _benchmark(plan: dict[str, Any], told: dict[str, Any] | None) -> Iterator[PlannedLine]:
    """Of every load and K that both the plan and the benchmark have, on the workload."""
    planned = {(line["batch"], line["K"]): line for line in plan["round_costs"]}
    points = [p for p in told["points"] if p["set"] == "workload"] if told else []
    alone = {(p["engine"], p["concurrency"]): p for p in points
             if p["arm"] == PLAIN and not p["temperature"] and not p["context_tokens"]}  # fmt: skip
    seen = set()
    for p in points:
        load, k, engine = p["concurrency"], p["num_speculative_tokens"], p["engine"]
        line, plain = planned.get((load, k)), alone.get((engine, load))
        if p["arm"] != OWN or p["temperature"] or p["context_tokens"] or not line:
            continue
        where = f"{engine}, {load} at once"
        if plain and (engine, load) not in seen:
            seen.add((engine, load))
            expected, found = 1000 * load / line["plain_step_ms"], plain["throughput_tokens_per_s"]
            what = f"{where}: tokens/s, engine alone"
            yield _line(what, expected, found, _number, "the plan's without prefill")
        accepted = (p.get("acceptance") or {}).get("acceptance_length")
        speedup = (p.get("speedup") or {}).get("value")
        yield _line(f"{where}, K={k}: cost of a round", line["round_cost"], p.get("round_cost"),
                    _number, "in plain steps")  # fmt: skip
        yield _line(f"{where}, K={k}: acceptance length", line["acceptance_length"], accepted,
                    _number, "planned: hoped for, acceptance_per_step")  # fmt: skip
        yield _line(f"{where}, K={k}: speed-up", line["speedup"], speedup, _number)


def _line(what: str, planned: float, measured: float | None, shown: Callable[[float], str],
          detail: str = "") -> PlannedLine:  # fmt: skip
    told = "not measured" if measured is None else shown(measured)
    ratio = measured / planned if measured is not None and planned else None
    return PlannedLine(what, shown(planned), told, ratio, detail)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"
