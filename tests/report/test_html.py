"""Rendered notebooks and pages: figures without a network, code hidden where it says nothing."""

from __future__ import annotations

import re

import nbformat
import plotly.graph_objects as go
import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.report.figures import round_agreement, training_curves
from eagle3lib.report.html import render_notebook, render_run
from eagle3lib.report.page import build_page

MIME = "application/vnd.plotly.v1+json"


def figure_output():
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="a line"))
    return nbformat.v4.new_output("display_data", {MIME: figure.to_plotly_json()})


def notebook_with(*outputs):
    notebook = nbformat.v4.new_notebook()
    shown = nbformat.v4.new_code_cell(
        "epochs: int = 3  # passes", metadata={"tags": ["parameters"]}
    )
    hidden = nbformat.v4.new_code_cell("draw_it()", metadata={"tags": ["hide-input"]})
    hidden.outputs = list(outputs)
    notebook.cells = [nbformat.v4.new_markdown_cell("# Title"), shown, hidden]
    return notebook


@pytest.fixture
def rendered(tmp_path):
    def render(*outputs, **options):
        nbformat.write(notebook_with(*outputs), tmp_path / "n.ipynb")
        return render_notebook(tmp_path / "n.ipynb", tmp_path / "n.html", **options).read_text()

    return render


def without_scripts(text):
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def test_two_figures_are_drawn_and_the_library_is_there_once(rendered):
    """Plotly 6 leaves only a MIME type that nbconvert does not draw: the page had no figure."""
    text = rendered(figure_output(), figure_output())
    assert text.count('class="plotly-graph-div"') == 2
    assert 3e6 < len(text) < 8e6
    assert "http" not in without_scripts(text)
    assert 'src="http' not in text


def test_a_small_copy_takes_the_library_from_its_cdn(rendered):
    text = rendered(figure_output(), figure_output(), plotly_js="cdn")
    assert len(text) < 60_000
    assert text.count('src="https://cdn.plot.ly') == 1


def test_parameters_are_folded_and_other_code_is_not_there(rendered):
    text = without_scripts(rendered())
    before, _, folded = text.partition("<details><summary>Parameters as code</summary>")
    assert "# passes" in folded.partition("</details>")[0]
    assert "# passes" not in before and text.count("# passes") == 1
    assert "draw_it" not in text


def test_the_heading_is_the_title_and_a_figure_is_told_in_words(rendered):
    text = rendered(figure_output())
    assert "<title>Title</title>" in text
    assert re.search(r'<figure [^>]*aria-label="A figure. a line: 3 at 1 to 4 at 2"', text)


def test_an_engines_log_is_folded_and_two_lines_are_not(rendered):
    lines = [f"<line> {i}" for i in range(6)]
    flushes = [nbformat.v4.new_output("stream", name="stdout", text=f"{line}\n") for line in lines]
    text = rendered(*flushes)
    folded = text.partition('<details class="log">')[2].partition("</details>")[0]
    assert "6 lines of log, the last: &lt;line&gt; 5" in folded
    assert all(f"&lt;line&gt; {i}" in folded for i in range(6))
    short = nbformat.v4.new_output("stream", name="stdout", text="one\ntwo\n")
    assert 'class="log"' not in rendered(short)


def links_of(page):
    return re.findall(r'<a href="([^"]+)">', page.read_text())


def test_notebooks_link_the_page_and_their_neighbours_also_those_that_came_later(tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    for name in ("00_plan", "01_generate_data"):
        nbformat.write(notebook_with(figure_output()), reports / f"{name}.ipynb")
    made = render_run(tmp_path, reports)
    home = "../index.html"
    assert links_of(made["00_plan"]) == [home, "01_generate_data.html"] * 2
    assert links_of(made["01_generate_data"]) == [home, "00_plan.html"] * 2
    drawn_at = made["00_plan"].stat().st_mtime_ns
    nbformat.write(notebook_with(), reports / "02_capture_hidden_states.ipynb")
    render_run(tmp_path, reports)
    later = "02_capture_hidden_states.html"
    assert links_of(made["01_generate_data"]) == [home, "00_plan.html", later] * 2
    assert made["01_generate_data"].read_text().count('class="plotly-graph-div"') == 1
    assert made["00_plan"].stat().st_mtime_ns == drawn_at, "what is right is left alone"


def test_a_notebook_that_was_rendered_before_there_were_links_gets_them(tmp_path):
    reports = tmp_path / "reports"
    reports.mkdir()
    nbformat.write(notebook_with(), reports / "00_plan.ipynb")
    (reports / "00_plan.html").write_text("<p>of before</p>")
    assert links_of(render_run(tmp_path, reports)["00_plan"]) == ["../index.html"] * 2


def test_a_run_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    with pytest.raises(UserError, match="no run 'nothing'"):
        build_page("nothing")


def test_figures_of_nothing_are_empty_not_errors():
    assert len(training_curves([]).data) == 0
    assert round_agreement([]).data[0].z is None or len(round_agreement([]).data[0].z) == 0


@pytest.mark.parametrize("half", ["", '{"cells": [{"cell_type": "co'])
def test_a_notebook_that_is_half_written_hides_no_other_and_is_rendered_next_time(tmp_path, half):
    """The page of a run is written while papermill saves the notebook that runs."""
    reports = tmp_path / "reports"
    reports.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), reports / "00_plan.ipynb")
    (reports / "01_generate_data.ipynb").write_text(half)
    assert list(render_run(tmp_path, reports)) == ["00_plan"]
    nbformat.write(nbformat.v4.new_notebook(), reports / "01_generate_data.ipynb")
    assert list(render_run(tmp_path, reports)) == ["00_plan", "01_generate_data"]
