"""The cost model gives back what made it, and says what it does not know."""

from __future__ import annotations

import pytest

from eagle3lib.diagnose.expected_speed import (
    CostModel,
    expected_length,
    facts,
    fit_cost,
    speedup_grid,
)
from eagle3lib.measure.accounting import Counts

TRUE = CostModel(0.3, 0.08, 0.002, 1, {}, None)


def points(steps, loads):
    return [
        {"num_speculative_tokens": k, "concurrency": c, "round_cost": TRUE.cost(k, c)}
        for k in steps
        for c in loads
    ]


def counts_with(share, steps=4, rounds=10**6):
    """Every step accepted by the same share of the rounds that reach it."""
    at = [round(rounds * share**k) for k in range(1, steps + 1)]
    return Counts(1, 1, rounds, rounds * steps, sum(at), at)


def test_costs_that_follow_the_law_are_told_exactly():
    found = fit_cost(points((1, 3, 5), (1, 8, 32)), 0.01)
    assert (found.host, found.step, found.crowd) == pytest.approx((0.3, 0.08, 0.002))
    assert found.worst_error == pytest.approx(0, abs=1e-9)
    assert found.cost(4, 16) == pytest.approx(TRUE.cost(4, 16))


def test_one_k_leaves_a_step_to_the_drafters_reads_and_one_load_leaves_others_unknown():
    found = fit_cost(points((3,), (1,)), 0.05)
    assert found.step == 0.05 and found.crowd is None and found.worst_error is None
    assert found.cost(3, 1) == pytest.approx(TRUE.cost(3, 1))
    with pytest.raises(ValueError, match="measured at concurrency 1 alone"):
        found.cost(3, 2)
    assert "assumed" in found.told["step"] and "unknown" in found.told["crowd"]
    assert fit_cost([], 0.05) is None and facts(None)


def test_steps_beyond_the_measured_ones_go_on_as_the_last():
    counts = counts_with(0.7)
    for k in (1, 4, 7):
        assert expected_length(counts, k) == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3, rel=1e-4)
    assert expected_length(counts, 4) == pytest.approx(counts.acceptance_length)
    with pytest.raises(ValueError, match="per step"):
        expected_length(Counts(1, 9, 3, 9, 5), 3)


def test_the_grid_is_length_over_cost():
    counts = counts_with(0.7)
    grid = speedup_grid(TRUE, counts, [1, 2, 4], [1, 16])
    assert grid[1][2] == pytest.approx(counts.acceptance_length / TRUE.cost(4, 16))
    assert all(busy < free for free, busy in zip(*grid, strict=True))
