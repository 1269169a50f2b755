"""The diagnosis' figures say the numbers that they are given."""

from __future__ import annotations

from eagle3lib.report.diagnosis_figures import counterfactuals, waterfall

LEVELS = [
    {"level": "every draft right", "length": 4.0, "lost": 0.0},
    {"level": "vocabulary", "length": 3.1, "lost": 0.9},
    {"level": "engine", "length": 3.3, "lost": -0.2},
]


def test_a_waterfall_ends_where_it_was_measured():
    bars = waterfall(LEVELS, "t").data[0]
    assert list(bars.text) == ["4.00", "-0.90", "+0.20", "3.30"]
    assert bars.y[-1] == 3.3 and bars.measure[-1] == "total"


def test_nothing_measured_is_said():
    assert "nothing was measured" in waterfall([], "t").layout.title.text


def test_the_drafter_as_exported_stands_out_among_the_variants():
    table = [
        {"cause": "", "variant": "as exported", "rounds_equal": 9, "rounds": 10,
         "acceptance_length": 1.5},
        {"cause": "engine-rope", "variant": "rotary base 10,000", "rounds_equal": 3, "rounds": 10,
         "acceptance_length": None},
    ]  # fmt: skip
    bars = counterfactuals(table).data[0]
    assert list(bars.y) == ["rotary base 10,000", "as exported"]  # the best stands on top
    assert bars.marker.color[0] != bars.marker.color[1]
