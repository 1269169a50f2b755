"""The first screen of a run's page: for each set of prompts the verdict, the three numbers that it
rests on (speed-up = acceptance length / cost of a round), and the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eagle3lib.diagnose.findings import speed_word
from eagle3lib.lab.words import interval_text
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE
from eagle3lib.measure.summary import SETS


@dataclass(frozen=True)
class SetAnswer:
    """``length`` in tokens a round, at most ``most``; ``cost`` in plain steps of the same engine;
    ``plain`` and ``drafted`` in tokens per second of one reader. ``cause`` is a sentence, empty
    where neither a diagnosis nor the numbers name one. Numbers are None where nothing was drafted
    or no baseline was measured."""

    set: str
    arm: str
    verdict: str
    speedup: float | None
    interval: str
    length: float | None
    most: int
    cost: float | None
    plain: float | None
    drafted: float
    rounds: int
    prompts: int
    cause: str


def set_answers(
    benchmark: dict[str, Any] | None, diagnosis: dict[str, Any] | None
) -> list[SetAnswer]:
    """The answer for every measured set: of the own drafter, else of the reference drafter."""
    lines = {(line["arm"], line["set"]): line for line in benchmark["arms"]} if benchmark else {}
    arms = {arm for arm, _ in lines}
    arm = next((a for a in (OWN, REFERENCE) if a in arms), None)
    return [
        _answer(lines[arm, name], lines.get((PLAIN, name)), benchmark or {}, diagnosis)
        for name in SETS
        if arm and (arm, name) in lines
    ]


def _answer(
    line: dict[str, Any],
    plain: dict[str, Any] | None,
    benchmark: dict[str, Any],
    diagnosis: dict[str, Any] | None,
) -> SetAnswer:
    speedup, counts = line.get("speedup"), line["acceptance"]
    repeats = benchmark["repeats"]
    return SetAnswer(
        set=line["set"],
        arm=line["arm"],
        verdict=speed_word(speedup) if speedup else "not compared with the engine alone",
        speedup=speedup["value"] if speedup else None,
        interval=interval_text(speedup) if speedup else "",
        length=counts["acceptance_length"],
        most=benchmark["num_speculative_tokens"] + 1,
        cost=line.get("round_cost"),
        plain=plain["tokens_per_s"] if plain else None,
        drafted=line["tokens_per_s"],
        rounds=counts["rounds"],
        prompts=line["requests"] // repeats,
        cause=" ".join(_causes(line, diagnosis)),
    )


def _causes(line: dict[str, Any], diagnosis: dict[str, Any] | None) -> list[str]:
    """What the diagnosis names (it looks at the own drafter's workload), else what the counts of
    this set say beside those of the workload."""
    told = []
    length, cost = line["acceptance"]["acceptance_length"], line.get("round_cost")
    if length and cost and length < cost:
        told.append(f"A round gives {length:.2f} tokens and costs {cost:.2f} plain steps.")
    if not diagnosis or line["arm"] != OWN:
        return told
    if line["set"] == "workload":
        verdicts = diagnosis["verdicts"]
        # Diagnoses of before named no cause.
        return [*told, _sentence(verdicts.get("cause") or verdicts["acceptance"])]
    mine, theirs = diagnosis.get(line["set"]), diagnosis["workload"]
    if not mine:
        return told
    lengths = [
        f"{c['acceptance_length']:.2f}" if c["acceptance_length"] else "no"
        for c in (mine["engine"], theirs["engine"])
    ]
    told.append(
        f"Not what the drafter was trained for: {lengths[0]} tokens a round against {lengths[1]}"
        f"{_coverages(mine, theirs)}."
    )
    if mine["rounds_equal"] < mine["rounds_compared"]:
        told.append(
            f"The engine does as the drafter says in {mine['rounds_equal']} of"
            f" {mine['rounds_compared']} rounds."
        )
    return told


def _coverages(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    shares = [c.get("vocab_coverage") for c in (mine, theirs)]
    if None in shares:
        return ""
    held, of_workload = (f"{share:.0%}" for share in shares)
    return f"; the draft vocabulary holds {held} of the answers' tokens against {of_workload}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
