"""Rendered notebooks: one HTML file each, figures included, no network needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import plotly.io
from nbformat.reader import NotJSONError
from pygments.formatters import HtmlFormatter
from traitlets.config import Config

from eagle3lib.lab.files import write_text

_HERE = Path(__file__).parent
_PLOTLY_MIME = "application/vnd.plotly.v1+json"
_DARK_CODE = "github-dark"  # pygments' colours for who reads in the dark
_WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


def render_notebook(notebook: Path, html: Path, *, plotly_js: bool | str = True) -> Path:
    """Convert an executed notebook. ``plotly_js`` "cdn" makes a small file that needs the network.

    Plotly 6 and later leave only their MIME type in headless notebooks, which nbconvert can't draw:
    each figure is turned into a <div> here, the library is embedded once.
    """
    from nbconvert import HTMLExporter

    node = nbformat.read(notebook, as_version=4)
    _drop_widgets(node)
    _draw_figures(node, notebook.stem, plotly_js)
    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
    # nbconvert's full templates bring 280 kB of styles and load scripts from a CDN; "basic" is the
    # content alone, set in the run page's own style.
    exporter = HTMLExporter(config=config, template_name="basic")
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    body, _ = exporter.from_notebook_node(node)
    write_text(html, page_template("notebook.html.j2").render(title=notebook.stem, body=body))
    return html


def page_template(
    name: str, filters: dict[str, Callable[[Any], str]] | None = None
) -> jinja2.Template:
    """A page of this room; every one is set in ``style.css`` and the colours of code cells."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True
    )
    environment.filters |= filters or {}
    light, dark = (
        HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", _DARK_CODE)
    )
    code = f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
    environment.globals["style"] = code + (_HERE / "style.css").read_text(encoding="utf-8")
    environment.globals["narrow"] = (_HERE / "narrow.js").read_text(encoding="utf-8")
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


def _draw_figures(node: Any, name: str, plotly_js: bool | str) -> None:
    drawn = 0
    for cell in node.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if _PLOTLY_MIME not in data:
                continue
            figure = data.pop(_PLOTLY_MIME)
            data["text/html"] = plotly.io.to_html(
                {"data": figure["data"], "layout": figure["layout"]},
                include_plotlyjs=plotly_js,
                full_html=False,
                div_id=f"{name}-{drawn}",  # not plotly's random one: equal notebooks, equal pages
                config={"displaylogo": False, "responsive": True},
                validate=False,
            )
            drawn += 1
            plotly_js = False  # the library once a page


def render_run(folder: Path, into: Path, *, plotly_js: bool | str = True) -> dict[str, Path]:
    """Render every executed notebook of a run that has no newer HTML. Phase name -> HTML file.

    papermill saves a running notebook in place every 30 s: one that is met half written is left for
    the next time.
    """
    made = {}
    for notebook in sorted((folder / "reports").glob("[0-9]*.ipynb")):
        html = into / f"{notebook.stem}.html"
        if not html.exists() or html.stat().st_mtime <= notebook.stat().st_mtime:
            try:
                render_notebook(notebook, html, plotly_js=plotly_js)
            except NotJSONError:
                continue
        made[notebook.stem] = html
    return made
