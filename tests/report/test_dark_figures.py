"""Figures on a dark screen: ground and letters change, the series keep their colours; paper is
light. They were inverted as a whole before, which made other colours of the colour-blind-safe."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import plotly.graph_objects as go
import pytest
from browser import CHROMIUM, open_browser

from eagle3lib.report import html, style
from eagle3lib.report.html import render_notebook
from eagle3lib.report.profile_figures import COLOURS

GROUND = re.search(r'ground = "(#\w+)"', (Path(html.__file__).parent / "dark.js").read_text())[1]
PAGE = "getComputedStyle(document.body).backgroundColor"
PAPER = "getComputedStyle(document.querySelector('.main-svg')).backgroundColor"
BARS = "[...document.querySelectorAll('.point path')].map(p => p.style.fill)"
EDGES = "[...document.querySelectorAll('.point path')].map(p => parseFloat(p.style.strokeWidth))"
LETTERS = (
    "[...document.querySelectorAll('.gtitle, .xtitle, .ytitle, .xtick text, .annotation-text,"
    " .legendtext')].map(t => t.style.fill)"
)


def luminance(colour):
    """Relative luminance of ``#rrggbb`` or ``rgb(r, g, b)`` (WCAG 2.2)."""
    parts = re.findall(r"\d+", colour)[:3] if colour.startswith("rgb") else [
        int(colour[i : i + 2], 16) for i in (1, 3, 5)]  # fmt: skip
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
              for c in (int(part) / 255 for part in parts)]  # fmt: skip
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_series_is_seen_on_the_dark_ground():
    """3 to 1 is what WCAG 1.4.11 asks of graphics; black bars get an edge instead."""
    for colour in {*style.PARTS, style.GREY, *COLOURS.values()} - {"#333333"}:
        assert contrast(colour, GROUND) >= 3, colour


@pytest.fixture
def page(tmp_path):
    figure = go.Figure([go.Bar(x=["a"], y=[1], name="blue", marker_color=style.BLUE),
                        go.Bar(x=["a"], y=[2], name="black", marker_color="#333333")])  # fmt: skip
    figure.add_hline(y=1.5, annotation_text="a line")
    style.styled(figure, "Title", "place", "count")
    output = nbformat.v4.new_output(
        "display_data", {"application/vnd.plotly.v1+json": figure.to_plotly_json()}
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("", outputs=[output])])
    nbformat.write(notebook, tmp_path / "n.ipynb")
    return render_notebook(tmp_path / "n.ipynb", tmp_path / "n.html")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_figures_follow_the_screen_and_are_light_on_paper(page, width):
    def prefer(tab, scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        tab.ask("Emulation.setEmulatedMedia", features=[feature])

    def drawn(tab, dark):
        tab.wait_for(PAPER, lambda paper: (luminance(paper) < 0.05) is dark)
        ground = tab.find(PAPER)
        letters = tab.find(LETTERS)
        assert len(letters) >= 6
        assert min(contrast(colour, ground) for colour in letters) >= 7
        bars = tab.find(BARS)
        assert bars == ["rgb(0, 114, 178)", "rgb(51, 51, 51)"], "the series keep their colours"
        assert (tab.find(EDGES)[1] > 0) is dark

    with open_browser() as tab:
        prefer(tab, "dark")
        tab.open(page, width)
        drawn(tab, dark=True)
        assert tab.find(PAPER) == tab.find(PAGE)
        assert tab.find("getComputedStyle(document.querySelector('.js-plotly-plot')).filter") == (
            "none"
        )
        tab.find("dispatchEvent(new Event('beforeprint'))")
        drawn(tab, dark=False)
        tab.find("dispatchEvent(new Event('afterprint'))")
        drawn(tab, dark=True)
        prefer(tab, "light")
        drawn(tab, dark=False)
        prefer(tab, "dark")
        drawn(tab, dark=True)
        assert tab.messages == []
        assert tab.find("document.documentElement.scrollWidth") <= width
