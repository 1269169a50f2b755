"""The findings as cards, in notebook 07 and on the run's page: cost, evidence, figure, rows,
experiments, remedy and the command, which a press copies."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from IPython.display import HTML, display

from eagle3lib.diagnose.cause import QUESTIONS
from eagle3lib.lab.finding import Finding
from eagle3lib.report.html import page_template
from eagle3lib.report.style import BLUE, GREY, styled

_HERE = Path(__file__).parent
_PROOFS = {
    "shown": "shown by a counterfactual",
    "measured": "measured: a rule is broken",
    "suspected": "suspected: what is left when the rest is ruled out",
}


def show_findings(findings: Iterable[Finding]) -> None:
    """Every finding as a card in a notebook, with its figure below, drawn as every other there."""
    found = [f.as_dict() for f in findings]
    if not found:
        display(HTML(cards_html([])))
    for number, finding in enumerate(found, start=1):
        display(HTML(cards_html([finding], name=f"finding-{number}", drawn=False)))
        figure = series_figure(finding.get("series"))
        if figure is not None:
            display(figure)


def cards_html(findings: list[dict[str, Any]], *, name: str = "finding", drawn: bool = True) -> str:
    """HTML of findings as ``findings.json`` has them; also of those of before, without rows and
    figures. Where they are ``drawn``, the page has the figures' library already."""
    cards = []
    for number, finding in enumerate(findings, start=1):
        series = finding.get("series")
        figure = series_figure(series) if drawn else None
        cards.append(
            finding
            | {
                "number": number,
                "figure": _div(figure, f"{name}-{number}") if figure is not None else "",
                "spoken": _spoken(series),
                "asked": _asked(finding.get("question")),
                "told": _PROOFS.get(finding.get("proof", "")),
            }
        )
    css = (_HERE / "finding_cards.css").read_text(encoding="utf-8")
    return page_template("findings.html.j2").render(cards=cards, css=css, name=name)


def _div(figure: go.Figure, name: str) -> str:
    return plotly.io.to_html(
        figure,
        include_plotlyjs=False,
        full_html=False,
        div_id=name,
        config={"displaylogo": False, "responsive": True, "displayModeBar": False},
    )


def series_figure(series: dict[str, Any] | None) -> go.Figure | None:
    """A small figure of a cause's ``series``: bars by name, or a curve; None without one."""
    if not series or not series["values"]:
        return None
    names, values = list(series["names"]), list(series["values"])
    share = series["unit"] == "share"
    shown = [f"{v:.0%}" if share else f"{v:.4g}" for v in values]
    if series.get("line"):
        figure = go.Figure(
            go.Scatter(
                x=[float(n) for n in names], y=values, mode="lines+markers",
                line={"color": BLUE}, hovertemplate="%{x}: %{y:.4g}<extra></extra>",
            )
        )  # fmt: skip
        styled(figure, series["title"], "", series["unit"], 240)
    else:
        figure = go.Figure(
            go.Bar(
                y=names, x=values, orientation="h", text=shown, textposition="auto",
                marker_color=[BLUE, *[GREY] * (len(names) - 1)],
                hovertemplate="%{y}: %{text}<extra></extra>",
            )
        )  # fmt: skip
        styled(figure, series["title"], series["unit"], "", 110 + 34 * len(names))
        figure.update_yaxes(autorange="reversed", automargin=True)
    if share:
        axis = figure.update_yaxes if series.get("line") else figure.update_xaxes
        axis(tickformat=".0%", range=[0, 1.02])
    return figure.update_layout(title={"font": {"size": 13}}, margin={"t": 40, "b": 44})


def _spoken(series: dict[str, Any] | None) -> str:
    """The figure in words."""
    if not series or not series["values"]:
        return ""
    pairs = list(zip(series["names"], series["values"], strict=True))
    chosen = [pairs[0], pairs[-1]] if series.get("line") else pairs
    said = ", ".join(f"{name}: {value:.3g}" for name, value in chosen)
    return f"{series['title']} ({series['unit']}): {said}"


def _asked(question: int | None) -> str:
    return QUESTIONS[question - 1] if question else ""
