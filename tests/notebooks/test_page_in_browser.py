"""The run's page as a reader meets it: by eye, by keyboard, by ear, on a phone, off the network."""

import shutil
from itertools import pairwise

import nbformat
import plotly.graph_objects as go
import pytest
from browser import CHROMIUM, open_browser

from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.notebooks import execute
from eagle3lib.lab.profile import load_profile
from eagle3lib.report.explore import run_explorer
from eagle3lib.report.html import render_notebook
from eagle3lib.report.page import build_page

pytestmark = [
    pytest.mark.engine,  # it shows the tiny run
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine"),
]
WIDTHS = (1280, 390)
NOTEBOOKS_OF_PHASES = ("03_build_vocab_map", "06_benchmark_serving")
EXPLORER = "acceptance_curves"


@pytest.fixture(scope="module")
def tab():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tiny_run, tmp_path_factory):
    """The page with the notebooks of two phases and an explorer, made by a copy of the tiny run
    (nbval, which makes that run, keeps none), and moved away from there as a mail attachment is."""
    outputs = tmp_path_factory.mktemp("paged") / "outputs"
    shutil.copytree(tiny_run.folder, outputs / "tiny", symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_OUTPUTS", str(outputs))
        for name in NOTEBOOKS_OF_PHASES:  # done: each resumes, and shows what is there
            execute(load_profile("tiny")[name], outputs / "tiny" / "reports" / f"{name}.ipynb")
        run_explorer(EXPLORERS[EXPLORER](run="tiny"))
        made = build_page("tiny")
    moved = tmp_path_factory.mktemp("mail")
    for name in ("index.html", "reports", "explore"):
        shutil.move(made.parent / name, moved / name)
    shutil.rmtree(outputs)
    return moved / "index.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_are_drawn_in_silence_and_nothing_scrolls_sideways(tab, page, width):
    tab.open(page, width)
    figures = "[...document.querySelectorAll('.plotly-graph-div')]"
    counts = tab.wait_for(
        f"{figures}.map(f => f.querySelectorAll('.point, .points path').length)",
        lambda found: min(found, default=0) > 0,
    )
    assert tab.find("document.querySelectorAll('figure').length") == 3  # and those of the cards
    assert len(counts) >= 3
    assert tab.messages == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data", "blob"}
    assert tab.find("document.documentElement.scrollWidth") <= width


def test_links_lead_somewhere(tab, page):
    tab.open(page, 1280)
    links = tab.find("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert {link for link in links if not link.startswith("#")} == {
        *(f"reports/{name}.html" for name in NOTEBOOKS_OF_PHASES), f"explore/{EXPLORER}.html"
    }  # fmt: skip
    for link in links:
        if link.startswith("#"):
            assert tab.find(f"!!document.getElementById({link[1:]!r})"), link
        else:
            assert (page.parent / link).is_file(), link


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "name", [*(f"reports/{name}" for name in NOTEBOOKS_OF_PHASES), f"explore/{EXPLORER}"]
)
def test_the_notebooks_it_links_are_quiet_drawn_and_narrow_too(tab, page, name, width):
    tab.open(page.parent / f"{name}.html", width)
    figures = "[...document.querySelectorAll('.plotly-graph-div')]"
    drawn = f"{figures}.map(f => !!f.querySelector('.main-svg'))"
    assert tab.wait_for(drawn, lambda found: found and all(found))
    assert tab.messages == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data", "blob"}
    assert tab.find("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_screen_is_the_answer(tab, page, width):
    tab.open(page, width)
    ends = tab.find(
        "[...document.querySelectorAll('.answer')].map(a => a.getBoundingClientRect().bottom)"
    )
    assert len(ends) == 2, "a verdict for each set of prompts"
    assert ends[0] < 900 and (width < 600 or ends[1] < 900)
    titles = tab.find("[...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert [t.split(":")[0] for t in titles[:4]] == ["Workload", "General", "Arms", "Curves"]


def test_the_first_key_skips_to_the_answer(tab, page):
    tab.open(page, 1280)
    tab.press("Tab", 9)
    assert tab.find("document.activeElement.className") == "skip"
    assert tab.find("document.activeElement.getBoundingClientRect().left") >= 0
    tab.press("Enter", 13)
    tab.wait_for("document.activeElement.id", lambda found: found == "answer")


def test_a_notebook_leads_back_and_on_and_shows_its_results_first(tab, page):
    tab.open(page.parent / f"reports/{NOTEBOOKS_OF_PHASES[-1]}.html", 1280)
    assert tab.find("document.title").startswith("06 Benchmark")
    links = tab.find("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert "../index.html" in links and len(links) >= 4, "above and below"
    for link in links:
        assert (page.parent / "reports" / link).resolve().is_file(), link
    seen = "[...document.querySelectorAll('.highlight, .log pre')].filter(e => e.checkVisibility())"
    assert tab.find(f"{seen}.length") == 0, "code and logs are folded"
    assert tab.find("[...document.querySelectorAll('figure')].every(f => / at /.test(f.ariaLabel))")


@pytest.mark.parametrize("width", WIDTHS)
def test_words_stand_for_a_figure_whose_library_cannot_be_loaded(tab, tmp_path, width):
    """A small copy without a network had blanks, and an error a figure in the console."""
    notebook = nbformat.v4.new_notebook()
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="a line")).update_layout(title="Known")
    output = nbformat.v4.new_output(
        "display_data", {"application/vnd.plotly.v1+json": figure.to_plotly_json()}
    )
    notebook.cells = [nbformat.v4.new_code_cell("draw()", outputs=[output])]
    nbformat.write(notebook, tmp_path / "n.ipynb")
    made = render_notebook(tmp_path / "n.ipynb", tmp_path / "n.html", plotly_js="missing.js")
    tab.open(made, width)
    assert "Known. a line: 3 at 1 to 4 at 2" in tab.find(
        "document.querySelector('figure').innerText"
    )
    assert [m for m in tab.messages if "missing.js" not in m] == []
    assert tab.find("document.documentElement.scrollWidth") <= width


def test_who_hears_the_page_gets_its_structure(tab, page):
    tab.open(page, 1280)
    assert tab.find("document.documentElement.lang") == "en"
    assert "tiny" in tab.find("document.title")
    levels = tab.find("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert tab.find("!!document.querySelector('main') && !!document.querySelector('nav')")
    labels = tab.find("[...document.querySelectorAll('figure')].map(f => f.ariaLabel)")
    assert len(labels) == 3 and all(" at " in label for label in labels)
    assert tab.find("[...document.querySelectorAll('th')].every(h => h.scope)")
    assert tab.find("[...document.querySelectorAll('table')].every(t => t.tHead && t.caption)")
    named = "[...document.querySelectorAll('[role=region]')].map(r => r.ariaLabel)"
    names = tab.find(named)
    assert len(set(names)) == len(names) and "table" not in names


def test_who_has_no_mouse_sees_where_they_are(tab, page):
    tab.open(page, 1280)
    seen = []
    for _ in range(50):
        tab.press("Tab", 9)
        seen.append(
            tab.find(
                "(a => [a.tagName, parseFloat(getComputedStyle(a).outlineWidth),"
                " getComputedStyle(a).outlineStyle])(document.activeElement)"
            )
        )
    assert {tag for tag, *_ in seen} >= {"A", "DIV"}  # links, and tables that scroll
    seen = [s for s in seen if s[0] != "BODY"]  # past the last one
    assert [s for s in seen if s[1] < 2 or s[2] == "none"] == []
