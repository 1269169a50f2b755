"""Questions 1 and 2 where the engine tells no rounds one by one: vLLM before 0.32, SGLang's
histograms, a server's counters; and where no engine was asked at all.

Without their order rounds can't be laid beside the simulator's. Their sums can: the same answers
give the same rounds, but for what an engine accepts beyond the end of an answer, K drafts at most,
and for SGLang's verify round a request that gives no token.
"""

from __future__ import annotations

from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.rules_engine import MANY_ROUNDS, REMEDY, nothing_accepted
from eagle3lib.diagnose.told import Told

_WHERE = "06_benchmark_serving"
_NEAR = 0.01  # relative difference of pooled acceptance lengths that is agreement
_RECORD = "serve with vLLM 0.32 or newer, --per-request-spec-decode-metrics detailed"


def unrecorded(e: Evidence) -> list[Cause]:
    m = e.material
    if m.is_recorded or not m.own_rows:
        return _left_out(e)
    if m.answered_by == "target":
        return [*_left_out(e), _not_served(e)]
    told = m.told
    if told is None:
        return [*_left_out(e), _nothing_told(e)]
    note = Cause(
        "rounds-not-told", "note", f"the engine tells no rounds one by one: {told.source}",
        f"{told.rounds} rounds of {told.requests} requests, {told.accepted} drafts accepted: "
        f"{told.acceptance_length:.2f} tokens a round",
        f"{_RECORD}: only rounds in their order tell which fault an engine has",
        _WHERE, question=1, experiment="the engine's record of each request",
    )  # fmt: skip
    return [*_left_out(e), note, *_against_simulator(e, told)]


def _left_out(e: Evidence) -> list[Cause]:
    m = e.material
    if not m.with_images:
        return []
    return [
        Cause(
            "images-not-replayed", "note",
            f"{len(m.with_images)} answers to prompts that show images were not replayed"
            + (": no other was given" if m.not_replayed else ""),
            f"the first is {m.with_images[0].prompt}: the simulator's target reads text alone",
            "benchmark text prompts too: what is said here holds for them",
            _WHERE, question=1, experiment="placeholders of images among the prompts' ids",
        )
    ]  # fmt: skip


def _not_served(e: Evidence) -> Cause:
    return Cause(
        "not-served", "note", "no engine was asked: the answers are the target's own",
        f"{len(e.material.own_rows)} answers; acceptance is the simulator's",
        "serve the drafter, and ask the same prompts of the engine",
        _WHERE, question=1, experiment="the simulator along the target's own answers",
        command="eagle3 run PROFILE 06 07",
    )  # fmt: skip


def _nothing_told(e: Evidence) -> Cause:
    """Of an engine that may have no drafter at all a note, where none is asked about."""
    return Cause(
        "rounds-not-told", "warning" if e.material.drafter else "note",
        "the engine tells nothing of its rounds",
        f"no record in {len(e.material.own_rows)} answers, and no counters that grew",
        f"look whether the server was started with the drafter at all; {_RECORD}",
        _WHERE, question=1, experiment="the engine's record of each request, and its counters",
    )  # fmt: skip


def _against_simulator(e: Evidence, told: Told) -> list[Cause]:
    if not e.engine_table or not e.material.steps:
        return []
    simulated = e.engine_table[0].acceptance_length or 1.0
    served = told.acceptance_length
    if not told.accepted and told.rounds >= MANY_ROUNDS:
        none = [o for o in e.engine_table[1:] if o.acceptance_length == 1.0]
        return [nothing_accepted(e, told.rounds, none if simulated > 1.02 else [])]
    if _explains(simulated, told, e.material.steps):
        return []
    near = [
        o for o in e.engine_table[1:]
        if o.acceptance_length and _explains(o.acceptance_length, told, e.material.steps)
    ]  # fmt: skip
    near = sorted(near, key=lambda o: abs(served - (o.acceptance_length or 1.0)))
    codes = tuple(dict.fromkeys(o.cause for o in near))
    named = ", ".join(f'"{o.label}" ({o.acceptance_length:.2f})' for o in near[:6])
    return [
        Cause(
            "engine-disagrees", "error",
            f"the engine accepts {served:.2f} tokens a round, the drafter would reach "
            f"{simulated:.2f}",
            f"by {told.source}: {told.accepted} drafts in {told.rounds} rounds, which is "
            "more than the ends of the answers explain"
            + (f"; of the known faults of engines these give as many: {named}" if named else ""),
            f"{_RECORD}, to tell which fault it is"
            + "".join(f"; {REMEDY[code]}" for code in codes[:3]),
            _WHERE, question=2, proof="suspected", cost=abs(simulated - served),
            experiment="rounds and accepted drafts, summed, beside the simulator's and every known "
            "fault's", command="eagle3 run PROFILE 06 07", alike=codes,
        )
    ]  # fmt: skip


def _explains(length: float, told: Told, steps: int) -> bool:
    """Whether an engine whose rounds have this acceptance length can have told these sums."""
    ends = told.requests / told.rounds
    more, less = steps * ends, (length - 1) * ends
    difference = told.acceptance_length - length
    return -less - _NEAR * length <= difference <= more + _NEAR * length
