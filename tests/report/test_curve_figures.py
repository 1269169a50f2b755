"""The acceptance explorer's figures hold what was counted, and say so where nothing was."""

from __future__ import annotations

import pytest

from eagle3lib.diagnose.expected_speed import CostModel, fit_cost
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.published import PUBLISHED
from eagle3lib.report import curve_figures as figures

COUNTS = Counts(9, 90, 100, 300, 90, [50, 30, 10])
LINES = [
    {"set": "workload", "num_speculative_tokens": k, "rounds": 9, "acceptance_length": 1 + k / 9}
    for k in (1, 2, 3)
]


def point(steps, load):
    cost = CostModel(0.2, 0.1, 0.01, 1, {}, None).cost(steps, load)
    speed = {"value": 1.9 / cost, "low": 1.0, "high": 2.0}
    return {"num_speculative_tokens": steps, "concurrency": load, "round_cost": cost,
            "speedup": speed, "requests": 9}  # fmt: skip


def test_the_surface_has_every_k_and_load_and_the_measured_points():
    points = [point(k, c) for k in (1, 3, 5) for c in (1, 8)]
    figure = figures.expected_speedups(fit_cost(points, 0.1), COUNTS, points, 8, 64)
    surface, measured = figure.data
    assert (len(surface.z), len(surface.z[0])) == (7, 8)
    assert len(measured.x) == len(points)
    at = surface.z[list(surface.y).index("8")][2]
    assert at == pytest.approx(1.9 / point(3, 8)["round_cost"])


def test_the_slider_shows_one_k_and_what_was_measured_with_it():
    points = [point(k, c) for k in (1, 3) for c in (1, 8)]
    figure = figures.speedups_over_load(fit_cost(points, 0.1), COUNTS, points, 5, 16)
    (slider,) = figure.layout.sliders
    assert [step.label for step in slider.steps] == ["1", "2", "3", "4", "5"]
    assert [trace.visible for trace in figure.data] == list(slider.steps[slider.active].args[1])
    for step in slider.steps:
        expected, measured = (
            trace for trace, seen in zip(figure.data, step.args[1], strict=True) if seen
        )
        assert list(expected.x) == [1, 2, 4, 8, 16]
        here = [p for p in points if str(p["num_speculative_tokens"]) == step.label]
        assert list(measured.y) == [p["speedup"]["value"] for p in here]
        for load, value in zip(measured.x, measured.y, strict=True):
            if step.label == "3":  # these points follow from the model
                assert expected.y[expected.x.index(load)] == pytest.approx(value)
    one = [point(3, 4)]
    none = figures.speedups_over_load(fit_cost(one, 0.1), COUNTS, one, 5, 16)
    assert not none.data and "one concurrency was measured" in none.layout.title.text
    for model, counts, why in (
        (None, COUNTS, "none was measured on five prompts"),
        (fit_cost(points, 0.1), Counts(), "the engine told no steps"),
    ):
        none = figures.speedups_over_load(model, counts, points if model else [], 5, 16)
        assert not none.data and why in none.layout.title.text


def test_one_concurrency_is_a_curve_and_none_a_reason():
    points = [point(3, 4)]
    figure = figures.expected_speedups(fit_cost(points, 0.1), COUNTS, points, 8, 64)
    assert "at 4 in flight, the only one measured" in figure.layout.title.text
    assert len(figure.data[0].x) == 8
    none = figures.expected_speedups(None, COUNTS, [], 8, 64)
    assert "No expected speed-up" in none.layout.title.text and not none.data


def test_every_published_figure_is_a_mark_with_its_source():
    figure = figures.beside_published({"demo": LINES})
    marks = [
        text for trace in figure.data if trace.name.startswith("published") for text in trace.text
    ]
    assert len(marks) == len(PUBLISHED) == len(figures.published_rows())
    assert all(any(p.source in text for text in marks) for p in PUBLISHED)
    assert list(figure.data[0].y) == [x["acceptance_length"] for x in LINES]


def test_intervals_stand_around_their_values_in_the_order_of_the_lines():
    lines = [
        {"set": "workload", "from": 2**n, "to": 2 ** (n + 1) - 1, "acceptance_length": 1.5,
         "low": low, "high": high, "prompts": 9, "rounds": 90}
        for n, low, high in ((1, 1.4, 1.7), (2, None, None))
    ]  # fmt: skip
    (trace,) = figures.length_curve(lines, figures.spans, "t", "x").data
    assert trace.error_y.array == pytest.approx((0.2, 0))
    assert trace.error_y.arrayminus == pytest.approx((0.1, 0))
    assert "too few prompts" in trace.text[1] and "too few prompts" not in trace.text[0]
