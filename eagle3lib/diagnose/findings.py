"""Two verdicts, acceptance and speed, and the findings that explain them.

The order of questions: is it measured right, does the engine do what the drafter would, is the
checkpoint sound, is the data the served distribution, and only then: is it slow all the same.
"""

from __future__ import annotations

from typing import Any

from eagle3lib.lab.finding import Finding
from eagle3lib.lab.words import interval_text

_MANY_ROUNDS = 100
# bfloat16 keeps 8 bits: logits near 20 are 0.06 to 0.12 apart, and layers add up to a few of those.
_TIE_NATS = 0.5
_AGREED = "simulator and engine agree, so the engine does what the drafter says"
_ALONE = "so says the simulator; the engine's own rounds are not known"


def acceptance_verdict(
    compared: dict[str, Any], tolerance: float, good_length: float
) -> tuple[str, list[Finding]]:
    """A sentence about acceptance on the workload, and what is wrong or worth knowing."""
    engine, simulator = compared["engine"], compared["simulator"]
    served, replayed = engine["acceptance_length"], simulator["acceptance_length"]
    if served is None or replayed is None:
        weak = replayed is not None and replayed < good_length
        return _one_side(served, replayed), [_weak(replayed, good_length, _ALONE)] if weak else []
    findings = _wiring(engine) + _parity(compared, tolerance)
    agree = _agrees(compared, tolerance)
    if not agree:
        verdict = (
            f"the engine accepts {served:.2f}, the drafter would reach {replayed:.2f}: serving"
        )
    elif served >= good_length:
        verdict = f"good: {served:.2f} tokens a round, as the simulator says"
    else:
        verdict = f"low: {served:.2f} tokens a round; the engine is right, the drafter is weak"
        findings.append(_weak(served, good_length, _AGREED))
    return verdict, findings


def _one_side(served: float | None, replayed: float | None) -> str:
    if served is not None:
        return f"{served:.2f} tokens a round; no drafter could be replayed beside it"
    if replayed is not None:
        return f"no round was recorded; the drafter would reach {replayed:.2f} tokens a round"
    return "no round was recorded"


def _wiring(engine: dict[str, Any]) -> list[Finding]:
    if engine["accepted"] or engine["rounds"] < _MANY_ROUNDS:
        return []
    return [
        Finding(
            "nothing-accepted",
            "error",
            f"not one draft was accepted in {engine['rounds']} rounds",
            "even a drafter that always says the commonest token is accepted now and then",
            "this is wiring, not training: check layer ids, vocabulary map, the drafter's target",
            "07_diagnose_acceptance",
        )
    ]


def _agrees(compared: dict[str, Any], tolerance: float) -> bool:
    """In float32 every round; in bfloat16 the pooled lengths, with room for one chain of drafts
    that a tie tips the other way (it matters where rounds are few). Of rounds told as counts the
    pooled lengths too, with room for what the engine accepted beyond the end of each answer."""
    told = compared["rounds_compared"] > 0
    if told and compared["dtype"] == "float32":
        return bool(compared["rounds_equal"] == compared["rounds_compared"])
    engine, simulator = compared["engine"], compared["simulator"]
    chains = len(simulator["accepted_at"]) * (1 if told else compared["answers"])
    room = tolerance * simulator["acceptance_length"] + chains / engine["rounds"]
    return bool(abs(engine["acceptance_length"] - simulator["acceptance_length"]) <= room)


def _parity(compared: dict[str, Any], tolerance: float) -> list[Finding]:
    served = compared["engine"]["acceptance_length"]
    replayed = compared["simulator"]["acceptance_length"]
    difference = served / replayed - 1
    equal, total = compared["rounds_equal"], compared["rounds_compared"]
    evidence = f"{equal} of {total} rounds equal; " if total else ""
    evidence += f"{served:.3f} served, {replayed:.3f} simulated"
    if not _agrees(compared, tolerance):
        return [
            Finding(
                "engine-disagrees",
                "error",
                f"the engine's acceptance length is {difference:+.1%} away from the simulator's",
                evidence,
                "serving is at fault: compare the layer ids that the engine reads, its prefix "
                "cache, graphs, parallelism and dtype with the export; serve once in float32",
                "06_benchmark_serving",
            )
        ]
    if equal < total:
        return [
            Finding(
                "numeric-ties",
                "note",
                f"{total - equal} answers part from the simulator at some round",
                evidence,
                "expected in bfloat16; dtype=float32 makes every round equal",
                "07_diagnose_acceptance",
            )
        ]
    return []


def _weak(served: float, good_length: float, evidence: str) -> Finding:
    return Finding(
        "weak-drafter",
        "warning",
        f"the drafter reaches {served:.2f}, good is {good_length:.2f}",
        evidence,
        "more answers of this workload, more epochs, or a larger draft vocabulary",
        "04_train_drafter",
    )


def lossless_findings(compared: dict[str, dict[str, Any]]) -> list[Finding]:
    """Greedy answers with and without drafter must be one, but for ties that rounding decides."""
    parted = sum(c["parted_from_plain"] for c in compared.values())
    if not parted:
        return []
    gap = max(c["largest_parted_gap"] or 0.0 for c in compared.values())
    answers = sum(c["answers"] for c in compared.values())
    exact = any(c["dtype"] == "float32" for c in compared.values())
    tie = gap <= _TIE_NATS and not exact
    return [
        Finding(
            "arms-part" if tie else "not-lossless",
            "note" if tie else "error",
            f"{parted} of {answers} answers part from the engine's alone at some token",
            f"there the target holds the two tokens at most {gap:.2f} nats apart",
            "near-ties in bfloat16: a batch of another shape rounds the other way"
            if tie
            else "the engine with drafter does not give the target's answers: serve in float32, "
            "compare flags, report it to the engine with this run",
            "06_benchmark_serving",
        )
    ]


def slower_elsewhere(benchmark: dict[str, Any], arm: str) -> list[Finding]:
    """Prompt sets other than the workload on which the arm is slower than plain decoding: worth
    knowing, no fault: the drafter was not made for them."""
    lines = [a for a in benchmark.get("arms") or [] if a["arm"] == arm and a["set"] != "workload"]
    found = []
    for line in lines:
        speedup, cost = line.get("speedup"), line.get("round_cost")
        if not speedup or not cost or speedup["high"] is None or speedup["high"] >= 1:
            continue
        found.append(
            Finding(
                "slower-elsewhere",
                "note",
                f"on the {line['set']} prompts speculation is slower: {speedup['value']:.2f}x "
                f"({interval_text(speedup)})",
                f"{line['acceptance']['acceptance_length']:.2f} tokens a round at {cost:.2f} plain "
                f"steps a round; below {cost:.2f} none pays",
                "train on such prompts too, or serve them without the drafter",
                "06_benchmark_serving",
            )
        )
    return found


def speed_verdict(line: dict[str, Any]) -> tuple[str, list[Finding]]:
    """A sentence about speed for one set's arm, apart from acceptance: cost is the other half."""
    speedup, cost = line.get("speedup"), line.get("round_cost")
    if not speedup or not cost:
        return "not measured", []
    length = line["acceptance"]["acceptance_length"]
    shown = f"{speedup['value']:.2f}x ({interval_text(speedup)})"
    detail = f"{length:.2f} tokens a round at {cost:.2f} plain steps a round"
    word = speed_word(speedup)
    if word != "slower":
        return f"{word}: {shown}, {detail}", []
    finding = Finding(
        "round-too-dear",
        "warning",
        f"speculation is slower here: {shown}",
        f"{detail}; no drafter below an acceptance length of {cost:.2f} can pay",
        "fewer speculative tokens, a smaller draft vocabulary, or fewer requests at once",
        "06_benchmark_serving",
    )
    return f"{word}: {shown}, {detail}", [finding]


def speed_word(speedup: dict[str, Any]) -> str:
    """Faster or slower only where the whole interval is."""
    if speedup["low"] is None:
        return "not measured well enough"
    if speedup["low"] > 1:
        return "faster"
    return "not told apart from plain decoding" if speedup["high"] >= 1 else "slower"
