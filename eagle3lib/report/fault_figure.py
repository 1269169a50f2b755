"""The table of the fault bench as a figure: a row a case, a column a result, causes on hover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from eagle3lib.lab.errors import UserError
from eagle3lib.report.style import BLUE, GREEN, ORANGE, VERMILION, styled

RESULTS = {"right": GREEN, "second": BLUE, "missed": ORANGE, "false": VERMILION}
_ROW_PIXELS = 15


def read_results(path: Path) -> list[dict[str, Any]]:
    """Lines of ``make faults`` (``docs/fault_bench.json``) whose fault means something in its run.
    Raises ``UserError`` where there is no such file."""
    if not path.exists():
        raise UserError(
            "there are no results of the fault bench", where=path,
            expected="what make faults keeps", next="make faults",
        )  # fmt: skip
    return [line for line in json.loads(path.read_text()) if line["result"] in RESULTS]


def result_counts(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases by run, part and result."""
    found = []
    for run, part in dict.fromkeys((line["run"], line["part"]) for line in lines):
        mine = [x["result"] for x in lines if (x["run"], x["part"]) == (run, part)]
        found.append(
            {"run": run, "part": part, "cases": len(mine)} | {r: mine.count(r) for r in RESULTS}
        )
    return found


def fault_figure(lines: list[dict[str, Any]], run: str) -> go.Figure:
    """Every case of ``run`` in the column of its result; what was found first is on hover."""
    mine = [line for line in lines if line["run"] == run]
    rows = [f"{line['case']}  {line['planted'][:70]}".strip() for line in mine]
    figure = go.Figure()
    for result, colour in RESULTS.items():
        chosen = [i for i, line in enumerate(mine) if line["result"] == result]
        figure.add_scatter(
            x=[result] * len(chosen), y=[rows[i] for i in chosen], mode="markers", name=result,
            marker={"symbol": "square", "size": 11, "color": colour},
            customdata=[_said(mine[i]) for i in chosen],
            hovertemplate="%{y}<br>%{customdata}<extra>%{x}</extra>",
        )  # fmt: skip
    figure.update_xaxes(categoryorder="array", categoryarray=list(RESULTS), side="top")
    figure.update_yaxes(
        categoryorder="array", categoryarray=rows, autorange="reversed", tickfont={"size": 10}
    )
    right = sum(line["result"] == "right" for line in mine)
    styled(figure, f"run {run}: {right} of {len(mine)} right", "", "")
    figure.update_layout(height=160 + _ROW_PIXELS * len(rows), margin={"l": 20}, showlegend=False)
    return figure


def _said(line: dict[str, Any]) -> str:
    first = ", ".join(" or ".join(names) for names in line["first"]) or "nothing"
    return f"wanted: {', '.join(line['wanted']) or 'nothing'}<br>first: {first}"
