"""May a new drafter replace a deployed one: decided by the interval, not by the value."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.measure.replace import KEEP, REPLACE, UNDECIDED, PairedRounds, decide


def pairs(gain, n=40, noise=0.1, seed=0):
    """Prompts of 20 rounds at about 1 accepted draft a round, the new drafter by ``gain`` more."""
    rng = np.random.default_rng(seed)
    out = []
    for level in rng.normal(1.0, 0.3, n):
        new = 20 * (level + gain + rng.normal(0, noise))
        out.append(PairedRounds(20, round(20 * level), 20, max(0, round(new))))
    return out


@pytest.mark.parametrize(("gain", "decision"), [(0.3, REPLACE), (-0.3, KEEP), (0.0, UNDECIDED)])
def test_the_interval_decides(gain, decision):
    result = decide(pairs(gain))
    assert result.decision == decision
    assert result.low < result.difference < result.high
    assert result.difference == pytest.approx(result.new_length - result.old_length, abs=2e-4)


def test_equal_drafters_replace_each_other_only_where_a_loss_is_allowed():
    assert decide(pairs(0.0)).decision == UNDECIDED
    assert decide(pairs(0.0), allowed_loss=0.2).decision == REPLACE


def test_pairing_by_prompt_sees_what_the_spread_of_prompts_hides():
    """Prompts differ by 0.3, the drafters by 0.1: paired it is certain."""
    result = decide(pairs(0.1, noise=0.03))
    assert result.decision == REPLACE


def test_lengths_are_pooled_over_rounds():
    """vLLM issue 42508: 10 tokens in 10 rounds and 300 in 100; the unweighted mean says 2.0."""
    long, short = PairedRounds(100, 200, 100, 200), PairedRounds(10, 0, 10, 0)
    assert decide([long, short] * 3).old_length == pytest.approx(2.818, abs=1e-3)


def test_few_prompts_decide_nothing():
    with pytest.raises(UserError, match="4 prompts"):
        decide(pairs(0.3, n=4))


def test_prompts_without_rounds_are_not_counted():
    with pytest.raises(UserError, match="0 prompts"):
        decide([PairedRounds(0, 0, 3, 1)] * 9)
