"""The run's page as a reader meets it: by eye, by keyboard, by ear, on a phone, off the network."""

import shutil
from itertools import pairwise

import pytest
from browser import CHROMIUM, open_browser

pytestmark = [
    pytest.mark.engine,  # it shows the tiny run
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine"),
]
WIDTHS = (1280, 390)


@pytest.fixture(scope="module")
def tab():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tiny_run, tmp_path_factory):
    """Moved away from where it was made, as a mail attachment is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_OUTPUTS", str(tiny_run.outputs))
        from eagle3lib.report.page import build_page

        made = build_page("tiny")
    moved = tmp_path_factory.mktemp("mail") / "index.html"
    shutil.copyfile(made, moved)
    if (made.parent / "reports").exists():  # nbval, which makes the tiny run, keeps no notebooks
        shutil.copytree(made.parent / "reports", moved.parent / "reports")
    return moved


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_are_drawn_in_silence_and_nothing_scrolls_sideways(tab, page, width):
    tab.open(page, width)
    figures = "[...document.querySelectorAll('.plotly-graph-div')]"
    counts = tab.wait_for(
        f"{figures}.map(f => f.querySelectorAll('.point, .points path').length)",
        lambda found: min(found, default=0) > 0,
    )
    assert len(counts) == 3
    assert tab.messages == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data", "blob"}
    assert tab.find("document.documentElement.scrollWidth") <= width


def test_links_lead_somewhere_and_the_notebooks_are_quiet_too(tab, page):
    if not (page.parent / "reports").exists():
        pytest.skip("the run has no rendered notebooks: nbval keeps none")
    tab.open(page, 1280)
    links = tab.find("[...document.querySelectorAll('a[href]')].map(a => a.getAttribute('href'))")
    assert len({link for link in links if not link.startswith("#")}) == 8
    for link in links:
        if link.startswith("#"):
            assert tab.find(f"!!document.getElementById({link[1:]!r})"), link
        else:
            assert (page.parent / link).is_file(), link
    tab.open(page.parent / "reports" / "06_benchmark_serving.html", 390)
    assert tab.messages == []
    assert not [url for url in tab.requests if url.startswith("http")]
    assert tab.find("document.documentElement.scrollWidth") <= 390


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
    assert tab.find("[...document.querySelectorAll('table')].every(t => t.tHead)")


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
