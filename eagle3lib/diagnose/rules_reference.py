"""A drafter that is known to be good, in the same engine: whose fault is low acceptance?

The reference arm of phase 06 (``reference_drafter``) shares target, engine, flags and prompts with
the run's own drafter. Where it accepts as it is known to, serving is sound; where it does not
either, no training will help.
"""

from __future__ import annotations

from typing import Any

from eagle3lib.diagnose.cause import Cause, bars
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.measure.arms import OWN, REFERENCE

_WHERE = "06_benchmark_serving"
_MANY_ROUNDS = 100  # below, a length is no evidence
_CLEARLY = 0.9  # share of the reference's length below which the own drafter is the weaker one


def reference(e: Evidence) -> list[Cause]:
    benchmark, params = e.material.benchmark, e.material.served_params
    theirs, own = _length(benchmark, REFERENCE), _length(benchmark, OWN)
    known = params.get("reference_acceptance_length")
    if theirs is None or known is None:
        return []
    shown = bars("Acceptance length in the same engine, workload", "tokens a round",
                 {"reference": theirs, "known to reach": known, "own drafter": own})  # fmt: skip
    beside = "" if own is None else f"; the own drafter reaches {own:.2f}"
    if theirs < known:
        return [
            Cause(
                "reference-low", "warning",
                f"the reference drafter accepts {theirs:.2f} here, it is known to reach "
                f"{known:.2f}: the engine or how it is set up",
                f"same engine, target, flags and prompts{beside}",
                "look at engine and settings before training anything: both drafters are served "
                "by them; or the known length is of other prompts",
                _WHERE, question=2, cost=known - theirs, series=shown,
                experiment="a drafter that is known to be good, in the same engine",
                command="eagle3 run PROFILE 06 07",
            )
        ]  # fmt: skip
    if own is None or own >= _CLEARLY * theirs:
        return []
    return [
        Cause(
            "reference-sound", "note",
            f"the reference drafter accepts {theirs:.2f} in the same engine: serving is sound",
            f"it is known to reach {known:.2f}{beside}",
            "look at the own drafter: its export, its training, its data", _WHERE, question=2,
            cost=theirs - own, series=shown,
            experiment="a drafter that is known to be good, in the same engine",
            command="eagle3 run PROFILE 05 06 07",
        )
    ]  # fmt: skip


def _length(benchmark: dict[str, Any], arm: str) -> float | None:
    """On the workload; None where the arm was not served, or in too few rounds."""
    for line in benchmark.get("arms") or []:
        if (line["arm"], line["set"]) == (arm, "workload") and line.get("acceptance"):
            told = line["acceptance"]
            return told["acceptance_length"] if told["rounds"] >= _MANY_ROUNDS else None
    return None
