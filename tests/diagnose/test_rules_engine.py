"""Which variant is named, and when none is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3lib.diagnose.outcomes import Outcome
from eagle3lib.diagnose.rules_engine import agrees, engine


def outcome(cause, label, equal, rounds=200, up_to=()):
    """``up_to``: rounds equal by the first draft alone, by the first two, ..."""
    parts = tuple((n, rounds) for n in up_to)
    return Outcome(cause, label, equal, rounds, 1.4, 0.0, 0.0, (), parts)


def evidence(*table, dtype="float32", accepted=(1, 0) * 100, heat=0.0):
    return SimpleNamespace(
        engine_table=list(table),
        answered=[SimpleNamespace(accepted=list(accepted))],
        material=SimpleNamespace(
            dtype=dtype, drafter=None, steps=3, benchmark={"temperature": heat}
        ),
    )


@pytest.fixture(autouse=True)
def no_drift(monkeypatch):
    monkeypatch.setattr("eagle3lib.diagnose.rules_engine._drift", lambda e, plain: None)


AS_EXPORTED, ROPE, SLOTS = "as exported", "engine-rope", "engine-layer-ids"


def test_an_engine_that_does_what_the_drafter_would_is_not_accused():
    e = evidence(outcome("", AS_EXPORTED, 200), outcome(ROPE, "rotary base", 200))
    assert agrees(e) and engine(e) == []


def test_ties_of_bfloat16_are_no_fault():
    assert agrees(evidence(outcome("", AS_EXPORTED, 190), dtype="bfloat16"))
    assert not agrees(evidence(outcome("", AS_EXPORTED, 190)))


def test_the_variant_whose_rounds_are_the_record_is_named():
    e = evidence(outcome("", AS_EXPORTED, 150), outcome(SLOTS, "slots +1", 200),
                 outcome(ROPE, "rotary base", 160))  # fmt: skip
    (found,) = engine(e)
    assert (found.code, found.severity, found.proof) == (SLOTS, "error", "shown")
    assert '200 of 200 rounds are those of "slots +1", 150' in found.evidence


def test_a_fault_that_no_variant_explains_is_left_unnamed_with_experiments():
    (found,) = engine(evidence(outcome("", AS_EXPORTED, 150), outcome(ROPE, "rotary base", 160)))
    assert (found.code, found.proof) == ("engine-disagrees", "suspected")
    assert "prefix cache off" in found.experiment


def test_a_fault_that_does_more_further_on_is_named_by_the_drafts_that_it_explains():
    """As recorded by a vLLM whose draft positions were late, and from the third step on its cache
    slots with them."""
    late = outcome("engine-position", "late", 180, up_to=(200, 200))
    base = outcome(ROPE, "base", 185, up_to=(190, 180))
    (found,) = engine(evidence(outcome("", AS_EXPORTED, 150, up_to=(200, 170)), base, late))
    assert (found.code, found.severity, found.proof) == ("engine-position", "error", "measured")
    assert 'by the first 2 drafts 200 of 200 rounds are those of "late", 170' in found.evidence
    assert "K = 2" in found.experiment and found.names == {"engine-position"}


def test_too_few_rounds_that_differ_name_nothing_by_their_first_drafts():
    """Seven may be chance; and a variant that leaves more than a tenth of them explains none."""
    few = outcome("", AS_EXPORTED, 150, up_to=(200, 193))
    (found,) = engine(evidence(few, outcome(ROPE, "base", 160, up_to=(200, 200))))
    assert found.code == "engine-disagrees"
    most = outcome("", AS_EXPORTED, 150, up_to=(200, 170))
    (found,) = engine(evidence(most, outcome(ROPE, "base", 160, up_to=(200, 196))))
    assert found.code == "engine-disagrees"


def test_one_round_that_differs_is_a_suspicion():
    """With vLLM in float32 all of 878 rounds were equal, "draft steps late" missed one of them."""
    e = evidence(outcome("", AS_EXPORTED, 199), outcome("engine-position", "late", 200))
    (found,) = engine(e)
    assert (found.severity, found.proof) == ("warning", "suspected")


def test_a_fault_that_explains_every_round_that_differs_is_suspected_within_bfloat16s_room():
    table = outcome("", AS_EXPORTED, 190), outcome("engine-quantised", "four bits", 200)
    (found,) = engine(evidence(*table, dtype="bfloat16"))
    assert (found.code, found.severity) == ("engine-quantised", "warning")
    half = outcome("", AS_EXPORTED, 190), outcome("engine-quantised", "four bits", 195)
    assert engine(evidence(*half, dtype="bfloat16")) == []


def test_faults_that_give_the_same_rounds_are_named_together():
    table = (
        outcome("", AS_EXPORTED, 150),
        outcome(SLOTS, "slots +1", 200),
        outcome(ROPE, "rotary base", 200),
        outcome("engine-residual", "residual", 180),
    )
    (found,) = engine(evidence(*table))
    assert found.names == {SLOTS, ROPE}
    assert "slots +1 or rotary base" in found.title and "rope_theta" in found.remedy


def test_nothing_accepted_is_wiring_and_names_what_would_leave_nothing():
    table = (
        outcome("", AS_EXPORTED, 120),
        outcome("engine-map-misread", "offsets as ids", 200),
        outcome(ROPE, "rotary base", 199),
    )
    (found,) = engine(evidence(*table, accepted=(0,) * 200))
    assert found.severity == "error" and found.names == {"nothing-accepted", "engine-map-misread"}
    assert "wiring, not training" in found.remedy and "offsets as ids" in found.title


@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_a_sampled_record_of_zeros_names_the_engines_sampler(heat):
    """vLLM issue 55005, once seen: exactly 1.00 at temperature 0.7, and 1.48 greedily."""
    e = evidence(outcome("", AS_EXPORTED, 120), outcome(ROPE, "base", 9), accepted=(0,) * 200,
                 heat=heat)  # fmt: skip
    (found,) = engine(e)
    named = {"sampling-accepts-nothing"} if heat else set()
    assert found.names == {"nothing-accepted"} | named
    assert ("sampler at temperature 0.7" in found.title) == bool(heat)
    assert ("at temperature 0" in found.remedy) == bool(heat)


def test_a_short_record_of_zeros_proves_nothing():
    assert engine(evidence(outcome("", AS_EXPORTED, 50, 50), accepted=(0,) * 50)) == []
