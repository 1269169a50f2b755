"""The figure of differences: a panel a statistic with its unit, and room for what is between."""

from __future__ import annotations

from itertools import pairwise

import pytest

from eagle3lib.measure.compare import STATISTICS, Difference
from eagle3lib.report.compare_figures import differences_table, forest, steps_of_runs


def difference(other, statistic, **changed):
    values = {"base": "a", "other": other, "set": "workload", "statistic": statistic,
              "base_value": 1.5, "other_value": 1.7, "difference": 0.2, "low": -0.1, "high": 0.5,
              "paired": True, "prompts": (8, 8), "reason": ""}  # fmt: skip
    return Difference(**values | changed)


@pytest.mark.parametrize("runs", [1, 2, 7])
def test_titles_and_tick_labels_of_the_panels_do_not_meet(runs):
    found = [difference(f"r{n}", name) for n in range(runs) for name in STATISTICS]
    figure = forest(found)
    layout = figure.layout
    inner_px = layout.height - layout.margin.t - layout.margin.b
    panels = [layout[f"yaxis{n or ''}"].domain for n in [0, *range(2, len(STATISTICS) + 1)]]
    for upper, lower in pairwise(panels):
        assert (upper[0] - lower[1]) * inner_px >= 45
        assert (lower[1] - lower[0]) * inner_px >= 20 * runs
    titles = [a.text for a in layout.annotations]
    assert titles[0] == "acceptance length, tokens a round" and "speed-up, times" in titles


def test_marks_tell_what_can_be_compared():
    found = [
        difference("like", "speed-up"),
        difference("unlike", "speed-up", reason="another machine"),
        difference("few", "speed-up", low=None, high=None, prompts=(4, 4)),
    ]
    (trace,) = forest(found).data
    assert list(trace.marker.symbol) == ["circle", "circle-open", "x"]
    assert list(trace.error_x.array) == pytest.approx([0.3, 0.3, 0])
    assert "another machine" in trace.text[1] and "8 prompts" in trace.text[0]
    table = differences_table(found).data
    assert list(table["run"]) == ["like", "few", "unlike"]  # what can't be compared stands last


def test_every_run_has_its_colour_and_every_set_its_dash():
    lines = [
        {"run": run, "set": name, "step": step, "share": 0.5, "low": 0.4, "high": 0.6, "rounds": 9}
        for run in "abc" for name in ("workload", "general") for step in (1, 2)
    ]  # fmt: skip
    traces = steps_of_runs(lines).data
    assert len({(t.line.color, t.line.dash) for t in traces}) == 6
    assert len({t.line.color for t in traces}) == 3
    assert all("9 rounds" in text for t in traces for text in t.text)
