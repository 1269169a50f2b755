"""Sampling with a drafter: a true null is kept, a biased sampler is found."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lib.measure.lossless import check_lossless, compare_samples


def samples(n, seed, weights=(0.5, 0.3, 0.15, 0.05)):
    """The first token is the prefill's; the second is drawn by ``weights``."""
    rng = np.random.default_rng(seed)
    return [[7, int(t)] for t in rng.choice(len(weights), n, p=weights)]


def test_a_sampler_that_prefers_its_drafts_is_found():
    """Accepting every likely draft: the commonest token comes more often than the target wants."""
    test = compare_samples(samples(300, 0), samples(300, 1, (0.7, 0.2, 0.07, 0.03)), alpha=0.01)
    assert test.rejected and test.distance > test.threshold
    (finding,) = check_lossless([test.as_dict() | {"arm": "own", "temperature": 0.8}])
    assert (finding.code, finding.severity) == ("sampling-not-lossless", "error")
    assert test.control_p_value == 1.0


def test_arms_that_differ_before_any_draft_are_told_apart():
    """The first token is the prefill's: where it differs, speculation is not what differs."""
    plain, spec = samples(300, 0), samples(300, 1, (0.7, 0.2, 0.07, 0.03))
    test = compare_samples([r[::-1] for r in plain], [r[::-1] for r in spec], alpha=0.01)
    assert test.rejected and test.control_p_value == test.p_value < 0.01
    (finding,) = check_lossless([test.as_dict() | {"arm": "own", "temperature": 0.8}])
    assert f"no draft reaches: p {test.p_value}" in finding.evidence


def test_false_alarms_are_no_more_than_stated():
    """Under the null the share of rejections at alpha 0.2 is about 0.2: within 4 deviations."""
    runs, alpha = 120, 0.2
    rejected = sum(
        compare_samples(samples(60, i), samples(60, 10_000 + i), alpha=alpha, permutations=150)
        .rejected
        for i in range(runs)
    )  # fmt: skip
    assert rejected / runs <= alpha + 4 * np.sqrt(alpha * (1 - alpha) / runs)


def test_equal_samples_have_no_distance():
    test = compare_samples(samples(50, 0), samples(50, 0), alpha=0.01)
    assert (test.distance, test.p_value, test.rejected) == (0.0, 1.0, False)


def test_an_arm_that_stops_earlier_differs_at_the_missing_tokens():
    long, short = [[1, 2, 3]] * 40, [[1, 2]] * 40
    assert compare_samples(long, short, alpha=0.01).distance == 1.0


@pytest.mark.parametrize("n", [0, 19])
def test_few_samples_are_no_test(n):
    assert compare_samples(samples(n, 0), samples(300, 1), alpha=0.01) is None
