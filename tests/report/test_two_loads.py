"""A run measured at two loads and two K, from its requests to the surface: what was planted in the
records comes out as the surface, and the measured points lie on it."""

from __future__ import annotations

import pytest
from load_records import COST, crossed_rows, metrics_of

from eagle3lib.diagnose.expected_speed import facts, fit_cost, measured_points
from eagle3lib.measure.arms import OWN, counts_of
from eagle3lib.report import curve_figures as figures

PROMPTS = [f"p{n}" for n in range(8)]


@pytest.fixture(scope="module")
def told():
    rows = crossed_rows(PROMPTS)
    points = measured_points(metrics_of(rows))
    head = [r for r in rows if (r.arm, r.steps, r.concurrency) == (OWN, 3, 1)]
    return fit_cost(points, 0.1), counts_of(head, 3), points, 8, 64


def test_the_cost_that_was_planted_is_fitted(told):
    model, _, points, *_ = told
    assert {(p["num_speculative_tokens"], p["concurrency"]) for p in points} == {
        (3, 1), (3, 8), (1, 1), (1, 8)
    }  # fmt: skip
    assert model.host == pytest.approx(COST.host, abs=1e-3)
    assert model.step == pytest.approx(COST.step, abs=1e-3)
    assert model.crowd == pytest.approx(COST.crowd, abs=1e-4)
    assert model.worst_error < 1e-3
    assert any("concurrency 1, 8" in text for text in facts(model).values())


def test_measured_points_lie_on_the_surface(told):
    figure = figures.expected_speedups(*told)
    surface, measured = figure.data
    assert "framed" in figure.layout.title.text
    assert list(surface.y) == ["1", "2", "4", "8", "16", "32", "64"]
    assert len(measured.x) == len(figure.layout.shapes) == 4
    for point in told[2]:
        row = list(surface.y).index(str(point["concurrency"]))
        column = list(surface.x).index(point["num_speculative_tokens"])
        assert surface.z[row][column] == pytest.approx(point["speedup"]["value"], rel=2e-3)


def test_the_load_makes_long_drafts_dear(told):
    """The reason for a surface: the K that is best at one request is not at 64."""
    surface = figures.expected_speedups(*told).data[0]
    best = [max(range(8), key=row.__getitem__) + 1 for row in map(list, surface.z)]
    assert best[0] > best[-1] == 1
    assert max(surface.z[-1]) < 1 < max(surface.z[0])


def test_every_k_has_its_curve_over_the_load(told):
    figure = figures.speedups_over_load(*told)
    assert len(figure.data) == 16 and len(figure.layout.sliders[0].steps) == 8
    shown = [trace for trace in figure.data if trace.visible]
    assert list(shown[1].x) == [1, 8]
    assert list(shown[1].y) == pytest.approx(
        [shown[0].y[list(shown[0].x).index(load)] for load in (1, 8)], rel=2e-3
    )
