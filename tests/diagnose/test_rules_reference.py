"""A known-good drafter in the same engine tells whose fault low acceptance is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3lib.diagnose.findings import slower_elsewhere
from eagle3lib.diagnose.rules_reference import reference
from eagle3lib.measure.arms import OWN, REFERENCE


def evidence(theirs, own, known=1.8, rounds=400):
    arms = [
        {"arm": arm, "set": "workload", "acceptance": {"acceptance_length": n, "rounds": rounds}}
        for arm, n in ((REFERENCE, theirs), (OWN, own)) if n
    ]  # fmt: skip
    params = {"reference_acceptance_length": known}
    return SimpleNamespace(material=SimpleNamespace(benchmark={"arms": arms}, served_params=params))


def test_a_reference_that_accepts_as_known_clears_the_engine():
    (found,) = reference(evidence(2.1, 1.2))
    assert (found.code, found.severity) == ("reference-sound", "note")
    assert found.cost == pytest.approx(0.9) and "1.20" in found.evidence
    assert found.series.values == (2.1, 1.8, 1.2)


def test_a_reference_that_is_bad_too_accuses_the_engine():
    (found,) = reference(evidence(1.1, 1.05))
    assert (found.code, found.severity, found.question) == ("reference-low", "warning", 2)
    assert found.cost == pytest.approx(0.7)


def test_nothing_is_said_of_equals_of_few_rounds_or_without_one():
    assert reference(evidence(2.0, 1.95)) == []
    assert reference(evidence(1.1, 1.0, rounds=20)) == []
    assert reference(evidence(None, 1.2)) == []


def line(set_name, value, high):
    speedup = {"value": value, "low": value - 0.1, "high": high}
    return {"arm": OWN, "set": set_name, "speedup": speedup, "round_cost": 1.3,
            "acceptance": {"acceptance_length": 1.1}}  # fmt: skip


def test_slower_on_the_general_set_is_a_note_with_its_numbers():
    arms = [line("workload", 0.8, 0.9), line("general", 0.86, 0.9)]
    (found,) = slower_elsewhere({"arms": arms}, OWN)
    assert (found.code, found.severity) == ("slower-elsewhere", "note")
    assert "0.86x (0.76 to 0.90)" in found.title and "1.10 tokens a round at 1.30" in found.evidence
    assert slower_elsewhere({"arms": [line("general", 0.95, 1.02)]}, OWN) == []
    assert slower_elsewhere({}, OWN) == []
