"""Cards of findings: everything of a cause is on its card, in words as well as drawn."""

from __future__ import annotations

import re

import pytest

from eagle3lib.diagnose.cause import Cause, Row, Series, Trial
from eagle3lib.lab.finding import Finding
from eagle3lib.report.finding_cards import cards_html, series_figure, show_findings

SERIES = Series("Acceptance length", "tokens a round", ("served", "simulated"), (1.1, 1.9))
WHOLE = Cause(
    "engine-disagrees", "error", "the rounds are not the drafter's: <b>1.10</b>", "5 of 90 equal",
    "change one thing", "06_benchmark_serving", question=2, proof="suspected", cost=0.8,
    experiment="to be done", command="eagle3 run 'my p.yaml' 06 07",
    rows=(Row("prompt", "w-7", "9 of 12 rounds differ"),), series=SERIES,
    trials=(Trial("float32", ("eagle3 run demo 06 07 dtype=float32",), "equal now: that was it"),),
)  # fmt: skip


def test_a_card_tells_all_of_a_cause():
    text = cards_html([WHOLE.as_dict()])
    for said in (
        "costs 0.80 tokens a round", "5 of 90 equal", "change one thing", "w-7",
        "9 of 12 rounds differ", "dtype=float32", "equal now: that was it",
        "does the engine do what the drafter would?", "engine-disagrees",
        "&lt;b&gt;1.10&lt;/b&gt;", "served: 1.1, simulated: 1.9",
    ):  # fmt: skip
        assert said in text, said
    assert "<b>1.10</b>" not in text, "texts are no markup"
    assert text.count('class="copy"') == 2 and "cdn.plot.ly" not in text


def test_figures_of_a_page_have_names_of_their_own_and_bring_no_library():
    text = cards_html([WHOLE.as_dict()] * 2, name="other")
    assert len(re.findall("Plotly.newPlot", text)) == 2 and len(text) < 60_000
    assert 'id="other-1"' in text and 'id="other-2"' in text


def test_in_a_notebook_the_figure_follows_its_card(monkeypatch):
    shown = []
    monkeypatch.setattr("eagle3lib.report.finding_cards.display", shown.append)
    show_findings([WHOLE, Finding("low", "note", "low")])
    assert [type(x).__name__ for x in shown] == ["HTML", "Figure", "HTML"]
    assert "Plotly" not in shown[0].data and "finding-2-1-title" in shown[2].data


def test_findings_of_before_and_of_other_rooms_have_cards_too():
    old = Finding("low", "note", "low", "numbers", "do it", "place").as_dict()
    text = cards_html([old])
    assert "numbers" in text and "costs" not in text and "Plotly" not in text
    assert "nothing is wrong" in cards_html([])


@pytest.mark.parametrize("line", [False, True])
def test_a_share_is_drawn_as_one(line):
    made = Series("s", "share", ("1", "2"), (0.5, 1.0), line).__dict__
    figure = series_figure(made)
    axis = figure.layout.yaxis if line else figure.layout.xaxis
    assert axis.tickformat == ".0%" and list(axis.range) == [0, 1.02]
    assert figure.data[0].type == ("scatter" if line else "bar")
    assert series_figure(None) is None
