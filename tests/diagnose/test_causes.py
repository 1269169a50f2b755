"""The order of causes, and the line that a manager reads."""

from __future__ import annotations

from eagle3lib.diagnose.cause import Cause, ranked
from eagle3lib.diagnose.phase import verdict_line, with_verdict
from eagle3lib.diagnose.rules_data import ceiling_cost
from eagle3lib.lab.finding import Finding

WEAK = Finding("weak-drafter", "warning", "the drafter reaches 1.1, good is 1.5")
SMOKE = Cause("smoke-test", "note", "trained on 900 answer tokens: a smoke test")


def cause(code, severity="error", **more):
    return Cause(code, severity, code, "", "mend it", **more)


def test_errors_first_then_the_proven_then_the_dear():
    found = [
        cause("note", "note", proof="shown", cost=3.0), cause("cheap", cost=0.1, proof="shown"),
        cause("suspected", cost=2.0, proof="suspected"), cause("dear", cost=0.9, proof="shown"),
        cause("warned", "warning"),
    ]  # fmt: skip
    assert [c.code for c in ranked(found)] == ["dear", "cheap", "suspected", "warned", "note"]


def test_a_toy_amount_of_data_is_the_first_of_notes():
    found = [cause("low-coverage", "note", proof="shown", cost=1.6), SMOKE, cause("bad", "warning")]
    assert [c.code for c in ranked(found)] == ["bad", "smoke-test", "low-coverage"]


def test_causes_stack_and_are_named_once():
    assert [c.code for c in ranked([cause("a"), cause("b"), cause("a")])] == ["a", "b"]


def test_the_verdict_names_cost_remedy_and_what_else_there_is():
    line = verdict_line([cause("map", cost=0.42), cause("other", "warning"), SMOKE])
    assert line == "map, at 0.42 tokens a round; 1 more after it. Do: mend it"


def test_a_toy_run_is_a_smoke_test_and_no_hunt_for_a_weak_drafter():
    causes = with_verdict([SMOKE], [WEAK])
    assert [c.code for c in causes] == ["smoke-test"]
    assert verdict_line(causes).startswith("nothing is wrong; too little was trained on")


def test_a_weak_drafter_of_a_real_run_is_said():
    assert [c.code for c in with_verdict([], [WEAK])] == ["weak-drafter"]


def test_the_engines_fault_is_named_once():
    named = cause("engine-rope", question=2, proof="shown")
    old = Finding("engine-disagrees", "error", "the engine's acceptance length is away")
    assert [c.code for c in with_verdict([named], [old])] == ["engine-rope"]
    assert [c.code for c in with_verdict([], [old])] == ["engine-disagrees"]


def test_rounds_of_another_k_are_no_engine_that_disagrees():
    named = cause("k-mistranslated", question=1)
    old = Finding("engine-disagrees", "error", "the engine's acceptance length is away")
    assert [c.code for c in with_verdict([named], [old])] == ["k-mistranslated"]
    # A wrong counter changes no round.
    both = with_verdict([cause("counters-cumulative", question=1)], [old])
    assert {c.code for c in both} == {"counters-cumulative", "engine-disagrees"}


def test_a_vocabulary_that_holds_all_costs_nothing():
    assert ceiling_cost(1.0, 3) == 0
    assert ceiling_cost(0.5, 2) == 2 - 0.75
