"""The two verdicts and the findings behind them, on counts whose truth is known."""

from __future__ import annotations

import pytest

from eagle3lib.diagnose.findings import acceptance_verdict, speed_verdict
from eagle3lib.diagnose.replay import ReplayedAnswer, compare_counts
from eagle3lib.drafter.simulate import Replay
from eagle3lib.measure.arms import OWN, RequestRow


def answer(engine, simulated, *, cut=False, tokens=None):
    tokens = tokens or 1 + len(engine) + sum(engine)
    row = RequestRow(OWN, "workload", "p", 0, [1], list(range(tokens)), "length", 1.0, engine,
                     [3] * len(engine))  # fmt: skip
    return ReplayedAnswer(row, Replay(simulated, cut), tokens, tokens - 1, None)


def compared(engine, simulated, dtype="bfloat16", answers=20):
    return compare_counts([answer(engine, simulated)] * answers, 3, dtype)


def codes(findings):
    return [f.code for f in findings]


def test_rounds_are_compared_up_to_the_first_difference():
    """After it engine and simulator stand at different tokens: what follows says nothing."""
    result = compare_counts([answer([1, 0, 2, 1], [1, 1, 0, 1])], 3, "bfloat16")
    assert (result["rounds_compared"], result["rounds_equal"]) == (2, 1)


def test_a_cut_last_round_is_neither_equal_nor_different():
    result = compare_counts([answer([1, 3], [1, 2], cut=True, tokens=6)], 3, "float32")
    assert (result["rounds_compared"], result["rounds_equal"], result["cut_last_rounds"]) == (
        1,
        1,
        1,
    )
    assert result["engine"]["cut"] == 1


def test_a_healthy_run_has_no_finding_above_note():
    verdict, findings = acceptance_verdict(compared([2, 1, 0, 3], [2, 1, 0, 3]), 0.01, 1.5)
    assert verdict.startswith("good: 2.50")
    assert findings == []


def test_ties_in_bfloat16_are_a_note():
    parted = [answer([2, 1, 0, 3], [2, 1, 0, 3])] * 19 + [answer([2, 1, 0, 3], [2, 1, 1, 2])]
    verdict, findings = acceptance_verdict(compare_counts(parted, 3, "bfloat16"), 0.01, 1.5)
    assert verdict.startswith("good")
    assert [(f.code, f.severity) for f in findings] == [("numeric-ties", "note")]


def test_in_float32_one_round_is_enough_to_accuse_the_engine():
    parted = [answer([2, 1, 0, 3], [2, 1, 0, 3])] * 19 + [answer([2, 1, 0, 3], [2, 1, 1, 2])]
    verdict, findings = acceptance_verdict(compare_counts(parted, 3, "float32"), 0.01, 1.5)
    assert codes(findings) == ["engine-disagrees"]
    assert verdict.endswith("serving")


def test_an_engine_that_accepts_less_than_the_drafter_offers_is_at_fault():
    verdict, findings = acceptance_verdict(compared([0] * 10, [2, 2, 2, 1]), 0.01, 1.5)
    assert "engine-disagrees" in codes(findings)
    assert verdict.endswith("serving")


def test_agreement_and_low_blames_the_drafter_not_the_engine():
    verdict, findings = acceptance_verdict(compared([0, 1, 0, 0], [0, 1, 0, 0]), 0.01, 1.5)
    assert codes(findings) == ["weak-drafter"]
    assert "the engine is right" in verdict


def test_exactly_nothing_accepted_is_wiring_never_train_longer():
    _, findings = acceptance_verdict(compared([0] * 10, [0] * 10), 0.01, 1.5)
    assert codes(findings)[0] == "nothing-accepted"
    assert "wiring" in findings[0].remedy


@pytest.mark.parametrize(
    ("speedup", "word", "found"),
    [
        ({"value": 1.3, "low": 1.2, "high": 1.4}, "faster", []),
        ({"value": 1.0, "low": 0.9, "high": 1.1}, "not told apart", []),
        ({"value": 0.66, "low": 0.6, "high": 0.7}, "slower", ["round-too-dear"]),
        ({"value": 1.3, "low": None, "high": None}, "not measured well enough", []),
    ],
)
def test_speed_has_its_own_verdict(speedup, word, found):
    length = 1.748
    line = {"speedup": speedup, "round_cost": length / speedup["value"],
            "acceptance": {"acceptance_length": length}}  # fmt: skip
    verdict, findings = speed_verdict(line)
    assert verdict.startswith(word)
    assert codes(findings) == found


def test_the_story_says_that_no_drafter_short_of_2_64_could_have_paid():
    line = {"speedup": {"value": 0.662, "low": 0.6, "high": 0.7}, "round_cost": 2.64,
            "acceptance": {"acceptance_length": 1.748}}  # fmt: skip
    _, findings = speed_verdict(line)
    assert "2.64" in findings[0].evidence
