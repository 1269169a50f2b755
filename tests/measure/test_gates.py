"""Gates: a failed one says what it proves, in the order engine, integration, drafter."""

from __future__ import annotations

import pytest

from eagle3lib.engine.client import Answer
from eagle3lib.engine.records import RoundCounts
from eagle3lib.engine.stream import Streamed
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE
from eagle3lib.measure.gates import check_gates, judge, what_it_proves


def streamed(ids, rounds=4, accepted=4):
    counts = RoundCounts(rounds, accepted, 3 * rounds, None, "test") if rounds else None
    return Streamed(Answer([1], ids, "", "stop", 1.0, None), [1.0], [len(ids)], counts)


ASKED = [streamed([1, 2, 3])] * 2


def gate(arm, asked=ASKED, plain=ASKED, **options):
    return judge("vllm", arm, asked, plain, **{"least_length": 1.2, "exact": True} | options)


def test_good_arms_pass():
    for arm in (PLAIN, REFERENCE, OWN):
        assert gate(arm).passed
    assert check_gates([gate(OWN)]) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([streamed([1, 2, 3], rounds=0)] * 2, "no round"),
        ([streamed([1, 2, 3], accepted=0)] * 2, "below 1.20"),
        ([streamed([1, 2, 3]), streamed([1, 2, 7])], "1 greedy answers differ"),
    ],
)
def test_each_fault_of_a_drafter_fails_its_gate(asked, said):
    failed = gate(REFERENCE, asked)
    assert not failed.passed and said in failed.evidence
    (finding,) = check_gates([failed])
    assert (finding.code, finding.severity) == ("gate-failed", "error")
    assert "integration" in finding.evidence


def test_near_ties_of_bfloat16_fail_no_gate():
    assert gate(OWN, [streamed([1, 2, 7])] * 2, exact=False).passed


def test_what_a_failure_proves_depends_on_the_gates_before():
    assert "engine" in what_it_proves("vllm", PLAIN, False).replace("vllm", "engine")
    assert "integration" in what_it_proves("vllm", REFERENCE, False)
    assert "export" in what_it_proves("vllm", OWN, True)
    assert "reference_drafter" in what_it_proves("vllm", OWN, False)
