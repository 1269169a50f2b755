"""The arms as gates: engine alone, then a known-good drafter, then ours. Each proves one thing.

::

    gate                 it fails                       what that proves
    engine alone         no start, no tokens            the engine can't serve this target
    reference drafter    no start, nothing accepted,    the engine's integration of EAGLE-3 with
                         other greedy answers (fp32)    this target; our drafter is not to blame
    own drafter          the same                       our drafter or its export, where the
                                                        reference passed; else either of the two
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from eagle3lib.engine.records import RoundCounts
from eagle3lib.engine.stream import Streamed
from eagle3lib.lab.finding import Finding
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE


@dataclass(frozen=True)
class Gate:
    """One gate's outcome. ``evidence`` says what was seen, ``proves`` what follows if it failed."""

    engine: str
    arm: str
    passed: bool
    evidence: str
    proves: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def what_it_proves(engine: str, arm: str, reference_passed: bool) -> str:
    """Who is at fault when this gate fails and those before it passed."""
    if arm == PLAIN:
        return f"{engine} can't serve this target: speculation is not the cause"
    if arm == REFERENCE:
        return (
            f"{engine}'s integration of EAGLE-3 with this target: the own drafter is not the cause"
        )
    if reference_passed:
        return "the own drafter or its export: engine and integration work with another drafter"
    return f"the own drafter, or {engine}'s integration: a reference_drafter would tell them apart"


def judge(
    engine: str,
    arm: str,
    asked: Sequence[Streamed],
    plain: Sequence[Streamed],
    *,
    least_length: float,
    exact: bool,
    reference_passed: bool = False,
) -> Gate:
    """Judge an arm by its answers to the gate's prompts.

    ``plain``: the plain arm's to the same prompts; ``exact``: greedy answers in float32 must be
    equal (in bfloat16 a near-tie may fall the other way, which the report shows).
    """
    tokens = sum(len(s.answer.answer_token_ids) for s in asked)
    if arm == PLAIN:
        return Gate(engine, arm, True, f"{len(asked)} answers, {tokens} tokens")
    parted = sum(
        a.answer.answer_token_ids != b.answer.answer_token_ids
        for a, b in zip(asked, plain, strict=True)
    )
    told = [s.counts for s in asked if s.counts is not None]
    length = _length(told)
    evidence = f"{len(asked)} answers, {tokens} tokens, " + (
        f"acceptance length {length:.2f}" if length is not None else "no record of rounds"
    )
    wrong = []
    if length is None:
        wrong.append("the server has a drafter and tells of no round")
    elif length < least_length:
        wrong.append(f"acceptance length below {least_length:.2f}")
    if exact and parted:
        wrong.append(f"{parted} greedy answers differ from the engine's alone in float32")
    if not wrong:
        return Gate(engine, arm, True, evidence)
    proof = what_it_proves(engine, arm, reference_passed)
    return Gate(engine, arm, False, f"{evidence}: {'; '.join(wrong)}", proof)


def _length(told: Sequence[RoundCounts]) -> float | None:
    rounds = sum(c.rounds for c in told)
    return 1 + sum(c.accepted for c in told) / rounds if rounds else None


def check_gates(gates: Sequence[Gate]) -> list[Finding]:
    """The gates that failed, as errors."""
    remedies = {
        PLAIN: "read the server's log; eagle3 serve TARGET without a drafter must work first",
        REFERENCE: "another engine version, or eagle3 doctor REFERENCE --target TARGET",
        OWN: "eagle3 doctor DRAFTER --target TARGET, then the diagnosis of phase 07",
    }
    return [
        Finding(
            "gate-failed",
            "error",
            f"gate {gate.arm!r} failed on {gate.engine}",
            f"{gate.evidence}; it proves: {gate.proves}",
            remedies[gate.arm],
            "06_benchmark_serving",
        )
        for gate in gates
        if not gate.passed
    ]
