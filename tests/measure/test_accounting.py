"""Counts, the accounting identity, and what follows from them."""

from __future__ import annotations

import pytest

from eagle3lib.measure.accounting import (
    Counts,
    PairedTiming,
    check_identity,
    check_speedup,
    pooled_speedup,
    round_cost,
    rounds_of,
    total,
)


def counts(*requests, steps=3):
    """Each request: (answer tokens, accepted drafts of each round)."""
    result = Counts()
    for tokens, accepted in requests:
        result.add(tokens, accepted, [steps] * len(accepted), steps)
    return result


def pairs(ratios, tokens=100):
    """Prompts whose plain arm takes 1 s and whose other arm is ``ratio`` times as fast."""
    return [PairedTiming(tokens, 1.0, tokens, 1 / r) for r in ratios]


def test_the_published_story_is_reproduced():
    """1,127 of 7,530 drafted tokens at K = 5, and 54.6 tok/s against 82.5: what was really the
    case."""
    rounds = rounds_of(7530, 5)
    length = 1 + 1127 / rounds
    speedup = 54.6 / 82.5
    assert rounds == 1506
    assert length == pytest.approx(1.748, abs=5e-4)
    assert speedup == pytest.approx(0.66, abs=5e-3)
    assert round_cost(length, speedup) == pytest.approx(2.64, abs=5e-3)


def test_one_request_by_hand():
    """Prefill gives 1 token, rounds of 0, 2 and 3 accepted give 1, 3 and 4: nine in all."""
    made = counts((9, [0, 2, 3]))
    assert (made.requests, made.rounds, made.drafted, made.accepted) == (1, 3, 9, 5)
    assert made.accepted_at == [2, 2, 1]
    assert made.cut == 0
    assert made.acceptance_length == pytest.approx(1 + 5 / 3)
    assert made.acceptance_rate == pytest.approx(5 / 9)
    assert made.per_step == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert made.conditional == pytest.approx([2 / 3, 1.0, 0.5])


def test_drafts_beyond_the_limit_are_cut_not_lost():
    made = counts((8, [0, 2, 3]))  # the limit took one accepted draft of the last round
    assert made.cut == 1
    assert made.tokens == made.requests + made.rounds + made.accepted - made.cut
    assert check_identity(made, 3) == []


@pytest.mark.parametrize("tokens", [10, 5], ids=["more than possible", "more cut than K"])
def test_counts_that_their_parts_do_not_explain_are_an_error(tokens):
    assert [f.code for f in check_identity(counts((tokens, [0, 2, 3])), 3)] == ["accounting"]


def test_lengths_are_pooled_not_averaged():
    """A mean of the two requests' lengths would say 2.5; pooled it is 1 + 6 / 12."""
    made = counts((8, [3, 3]), (11, [0] * 10))
    assert made.acceptance_length == pytest.approx(1.5)


def test_a_total_is_the_counts_of_all():
    parts = [counts((9, [0, 2, 3])), counts((8, [3, 3]))]
    assert total(parts) == counts((9, [0, 2, 3]), (8, [3, 3]))


def test_nothing_recorded_is_unknown_not_zero():
    assert Counts().acceptance_length is None
    assert Counts().acceptance_rate is None


def test_speedup_is_pooled_over_tokens_and_seconds():
    """A slow prompt with few tokens must not weigh as much as a long one."""
    timing = [PairedTiming(10, 10.0, 10, 5.0), *[PairedTiming(100, 1.0, 100, 1.0)] * 5]
    speed = pooled_speedup(timing)
    assert speed.plain_tokens_per_s == pytest.approx(510 / 15)
    assert speed.spec_tokens_per_s == pytest.approx(510 / 10)
    assert speed.value == pytest.approx(1.5)


def test_the_interval_holds_the_value_and_narrows_with_agreement():
    wide, narrow = pooled_speedup(pairs([0.5, 1, 1.5, 2, 2.5])), pooled_speedup(pairs([1.2] * 8))
    assert wide.low < wide.value < wide.high
    assert narrow.low == pytest.approx(narrow.high)


def test_identical_arms_have_no_speedup():
    speed = pooled_speedup([PairedTiming(t, t / 30, t, t / 30) for t in range(10, 30)])
    assert speed.value == speed.low == speed.high == pytest.approx(1.0)


def test_few_prompts_give_no_interval():
    speed = pooled_speedup(pairs([1.2] * 4))
    assert (speed.low, speed.high) == (None, None)
    assert check_speedup(speed, acceptance_length=1.1) == []


def test_a_speedup_above_the_acceptance_length_is_refused():
    findings = check_speedup(pooled_speedup(pairs([2.1] * 8)), acceptance_length=2.0)
    assert [(f.code, f.severity) for f in findings] == [("impossible-speedup", "error")]
    assert check_speedup(pooled_speedup(pairs([1.9] * 8)), acceptance_length=2.0) == []


def test_noise_around_the_limit_is_not_refused():
    """The lower bound decides: a value above the length whose interval reaches below it may be
    noise."""
    noisy = pooled_speedup(pairs([1.2, 3.4, 1.4, 3.0, 1.3, 3.2]))
    assert noisy.value > 1.75 > noisy.low
    assert check_speedup(noisy, acceptance_length=1.75) == []
