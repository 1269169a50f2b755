"""Rendered notebooks: one HTML file each, figures included, no network needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import plotly.io
import pygments
from nbformat.reader import NotJSONError
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from traitlets.config import Config

from eagle3lib.lab.files import write_text
from eagle3lib.lab.words import known_text
from eagle3lib.report.spoken import describe_figure

_HERE = Path(__file__).parent
_PLOTLY_MIME = "application/vnd.plotly.v1+json"
_DARK_CODE = "github-dark"  # pygments' colours for who reads in the dark
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
_LOG_LINES = 4  # a cell's printed lines are folded from one more on
TO_THE_PAGE = (("../index.html", "Page of the run"),)
_BEGIN, _END = "<!-- links of the run -->", "<!-- end of links of the run -->"


def render_notebook(
    notebook: Path,
    html: Path,
    *,
    plotly_js: bool | str = True,
    links: Sequence[tuple[str, str]] = (),
) -> Path:
    """Convert an executed notebook. ``plotly_js`` "cdn" makes a small file that needs the network;
    ``links`` are addresses and their words, above and below the text.

    Plotly 6 and later leave only their MIME type in headless notebooks, which nbconvert can't draw:
    each figure is turned into a <div> here, the library is embedded once.
    """
    from nbconvert import HTMLExporter

    node = nbformat.read(notebook, as_version=4)
    title = _title_of(node, notebook.stem)
    _drop_widgets(node)
    _fold_logs(node)
    _draw_figures(node, notebook.stem, plotly_js)
    _fold_parameters(node)
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
    # nbconvert's full templates bring 280 kB of styles and load scripts from a CDN; "basic" is the
    # content alone, set in the run page's own style.
    exporter = HTMLExporter(config=config, template_name="basic")
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(node)
    page = page_template("notebook.html.j2").render(title=title, body=body)
    write_text(html, _linked(page, links))
    return html


def _title_of(node: Any, name: str) -> str:
    """The notebook's own heading, else its file's name."""
    lines = [line for c in node.cells if c.cell_type == "markdown" for line in c.source.split("\n")]
    return next((line[2:].strip() for line in lines if line.startswith("# ")), name)


def _linked(page: str, links: Sequence[tuple[str, str]]) -> str:
    """The page with these links in both of their places."""
    shown = "".join(f'<a href="{escape(to)}">{escape(words)}</a>\n' for to, words in links)
    parts = page.split(_BEGIN)
    for i, label in enumerate(("Above", "Below"), start=1):
        nav = f'<nav class="links" aria-label="{label}: other pages">\n{shown}</nav>'
        parts[i] = (nav if links else "") + _END + parts[i].partition(_END)[2]
    return _BEGIN.join(parts)


def page_template(
    name: str, filters: dict[str, Callable[[Any], str]] | None = None
) -> jinja2.Template:
    """A page of this room; every one is set in ``style.css`` and the colours of code cells."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True
    )
    environment.filters |= {"known": known_text} | (filters or {})
    light, dark = (
        HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", _DARK_CODE)
    )
    code = f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    environment.globals["style"] = code + (_HERE / "style.css").read_text(encoding="utf-8")
    environment.globals["undrawn"] = (_HERE / "undrawn.js").read_text(encoding="utf-8")
    # After the figures are drawn.
    environment.globals["adapt"] = "".join(
        (_HERE / name).read_text(encoding="utf-8") for name in ("narrow.js", "dark.js")
    )
    return environment.get_template(name)


def _drop_widgets(node: Any) -> None:
    """Progress bars: without a kernel they are empty, and their script asks for a jQuery that is
    not there. Their text says how far they were when they were first shown."""
    for cell in node.cells:
        outputs = cell.get("outputs", [])
        cell_shown = [o for o in outputs if set(o.get("data", {})) != {_WIDGET_MIME, "text/plain"}]
        if "outputs" in cell:
            cell.outputs = cell_shown
        for output in cell_shown:
            output.get("data", {}).pop(_WIDGET_MIME, None)


def _fold_logs(node: Any) -> None:
    """What an engine said while it started is looked up, not read; its last line tells the end."""
    for cell in node.cells:
        if "outputs" not in cell:
            continue
        merged: list[Any] = []  # each flush of the kernel is an output of its own
        for output in cell.outputs:
            if output.output_type == "stream" and merged and merged[-1].output_type == "stream":
                merged[-1].text += output.text
            else:
                merged.append(output)
        cell.outputs = [_folded(o) if o.output_type == "stream" else o for o in merged]


def _folded(stream: Any) -> Any:
    """Printed lines behind their last one, where they are many."""
    from nbconvert.filters import ansi2html

    lines = stream.text.rstrip().split("\n")
    if len(lines) <= _LOG_LINES:
        return stream
    shown = (
        f'<details class="log"><summary>{len(lines)} lines of log, the last:'
        f" {ansi2html(lines[-1])}</summary><pre>{ansi2html(stream.text)}</pre></details>"
    )
    return nbformat.v4.new_output("display_data", {"text/html": shown})


def _fold_parameters(node: Any) -> None:
    """The cells of parameters are the record of a run, and a wall of code above its results."""
    tags = ("parameters", "injected-parameters")
    walls = [c for c in node.cells if set(tags) & set(c.metadata.get("tags", []))]
    if not walls:
        return
    code = "".join(
        pygments.highlight(cell.source, PythonLexer(), HtmlFormatter()) for cell in walls
    )
    folded = f"<details><summary>Parameters as code</summary>{code}</details>"
    first = node.cells.index(walls[0])
    node.cells = [c for c in node.cells if c not in walls]
    # As an output: nbconvert shows the tags of a raw cell instead of obeying them.
    output = nbformat.v4.new_output("display_data", {"text/html": folded})
    kept = nbformat.v4.new_code_cell(metadata={"tags": ["hide-input"]}, outputs=[output])
    node.cells.insert(first, kept)


def _draw_figures(node: Any, name: str, plotly_js: bool | str) -> None:
    drawn = 0
    for cell in node.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if _PLOTLY_MIME not in data:
                continue
            figure = data.pop(_PLOTLY_MIME)
            drawing = plotly.io.to_html(
                {"data": figure["data"], "layout": figure["layout"]},
                include_plotlyjs=plotly_js,
                full_html=False,
                div_id=f"{name}-{drawn}",  # not plotly's random one: equal notebooks, equal pages
                config={"displaylogo": False, "responsive": True},
                validate=False,
            )
            told = escape(describe_figure(figure))
            data["text/html"] = f'<figure role="group" aria-label="{told}">{drawing}</figure>'
            drawn += 1
            plotly_js = False  # the library once a page


def render_run(folder: Path, into: Path, *, plotly_js: bool | str = True) -> dict[str, Path]:
    """Render every executed notebook of a run that has no newer HTML, and link each to its
    neighbours. Phase name -> HTML file.

    papermill saves a running notebook in place every 30 s: one that is met half written is left for
    the next time.
    """
    made = {}
    for notebook in sorted((folder / "reports").glob("[0-9]*.ipynb")):
        html = into / f"{notebook.stem}.html"
        whole = html.exists() and html.stat().st_mtime > notebook.stat().st_mtime
        if not whole or _BEGIN not in html.read_text(encoding="utf-8"):  # of before there were any
            try:
                render_notebook(notebook, html, plotly_js=plotly_js)
            except NotJSONError:
                continue
        made[notebook.stem] = html
    names = list(made)
    for before, name, after in zip(["", *names], names, [*names[1:], ""], strict=False):
        neighbours = (("Before", before), ("Next", after))
        links = [(f"{other}.html", f"{word}: {other}") for word, other in neighbours if other]
        page = made[name].read_text(encoding="utf-8")
        if (linked := _linked(page, [*TO_THE_PAGE, *links])) != page:
            write_text(made[name], linked)
    return made
