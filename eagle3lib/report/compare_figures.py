"""Figures and tables of a comparison of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.measure.compare import STATISTICS, Difference
from eagle3lib.report.style import GREY, LEGEND_BELOW, PARTS, SET_COLOURS, nothing_drawn, styled
from eagle3lib.report.tables import Shown, show

_ROW_PX, _PANEL_PX, _GAP_PX, _MARGINS_PX = 24, 76, 56, 146  # a gap: tick labels, then a title
_UNITS = {"acceptance length": "acceptance length, tokens a round", "speed-up": "speed-up, times"}
_DASHES = ("solid", "dash", "dot", "dashdot")


def side_by_side_table(lines: list[dict[str, Any]]) -> Shown:
    """``side_by_side``: a column a run; what a run lacks is a dash."""
    frame = pd.DataFrame(lines)
    columns = [c for c in frame.columns if c not in ("kind", "what")]
    return show(frame.assign(**{c: [_shown(v) for v in frame[c]] for c in columns}))


def _shown(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{int(value):,}" if isinstance(value, int | float) else str(value)


def differences_table(found: Sequence[Difference]) -> Shown:
    """One line a difference, those that can be compared first."""
    lines = [
        {
            "run": d.other,
            "beside": d.base,
            "set": d.set,
            "of": d.statistic,
            "there": f"{d.other_value:.3f}",
            "here": f"{d.base_value:.3f}",
            "difference": f"{d.difference:+.3f}",
            "95 % interval": "" if d.low is None else f"{d.low:+.3f} to {d.high:+.3f}",
            "verdict": d.verdict,
            "bootstrap": f"{'paired' if d.paired else 'unpaired'}, {_prompts(d)} prompts",
            "not comparable": d.reason,
        }
        for d in sorted(found, key=lambda d: bool(d.reason))
    ]
    return show(pd.DataFrame(lines))


def _prompts(d: Difference) -> str:
    return str(d.prompts[0]) if d.paired else f"{d.prompts[0]} and {d.prompts[1]}"


def forest(found: Sequence[Difference]) -> go.Figure:
    """Differences with their intervals, one panel a statistic; hollow where the two runs are not
    comparable, a cross where prompts are too few for an interval."""
    panels = [label for label in STATISTICS if any(d.statistic == label for d in found)]
    if not panels:
        return nothing_drawn("Nothing to compare: name more runs")
    lines = len({(d.other, d.set) for d in found})
    drawn_px = len(panels) * (_PANEL_PX + _ROW_PX * lines)
    figure = make_subplots(
        rows=len(panels),
        subplot_titles=[_UNITS.get(label, label) for label in panels],
        vertical_spacing=min(_GAP_PX / drawn_px, 0.9 / max(len(panels) - 1, 1)),
    )
    for row, label in enumerate(panels, start=1):
        for set_name in dict.fromkeys(d.set for d in found):
            mine = [d for d in found if (d.statistic, d.set) == (label, set_name)]
            if mine:
                figure.add_trace(_points(mine, set_name, row == 1), row=row, col=1)
        figure.add_vline(x=0, line={"color": GREY, "width": 1}, row=row, col=1)
    base = found[0].base
    title = f"Difference from run {base}, 95 % interval over prompts"
    styled(figure, title, "", "", _MARGINS_PX + drawn_px)
    figure.update_xaxes(zeroline=False).update_yaxes(autorange="reversed", title="")
    return figure.update_layout(margin={"l": 170, "t": 96})


def _points(mine: Sequence[Difference], set_name: str, legend: bool) -> go.Scatter:
    colour = SET_COLOURS.get(set_name, PARTS[4])
    ends = [(d.low, d.high) if d.low is not None and d.high is not None
            else (d.difference, d.difference) for d in mine]  # fmt: skip
    symbols = ["x" if d.low is None else "circle-open" if d.reason else "circle" for d in mine]
    return go.Scatter(
        # A difference of rounding alone would get an axis of its own size.
        x=[round(d.difference, 6) for d in mine],
        y=[f"{d.other}, {set_name}" for d in mine],
        name=set_name,
        legendgroup=set_name,
        showlegend=legend,
        mode="markers",
        marker={"color": colour, "size": 11, "symbol": symbols, "line": {"width": 2}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [high - d.difference for d, (_, high) in zip(mine, ends, strict=True)],
            "arrayminus": [d.difference - low for d, (low, _) in zip(mine, ends, strict=True)],
            "color": colour,
        },
        text=[
            f"{d.base_value:.3f} to {d.other_value:.3f}, {d.verdict}<br>"
            f"{'paired' if d.paired else 'unpaired'}, {_prompts(d)} prompts"
            + (f"<br>not comparable: {d.reason}" if d.reason else "")
            for d in mine
        ],
        hovertemplate="%{y}: %{x:+.3f}<br>%{text}<extra></extra>",
    )


def steps_of_runs(lines: list[dict[str, Any]]) -> go.Figure:
    """Acceptance per step of every run, a colour a run and a dash a prompt set."""
    figure = go.Figure()
    runs, sets = ([*dict.fromkeys(x[key] for x in lines)] for key in ("run", "set"))
    for run in runs:
        for set_name in sets:
            mine = [x for x in lines if (x["run"], x["set"]) == (run, set_name)]
            if not mine:
                continue
            colour = PARTS[0] if run == runs[0] else PARTS[2 + (runs.index(run) - 1) % 6]
            figure.add_scatter(
                x=[x["step"] for x in mine],
                y=[x["share"] for x in mine],
                name=f"{run}, {set_name}",
                mode="lines+markers",
                line={"color": colour, "dash": _DASHES[sets.index(set_name) % 4]},
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [(x["high"] or x["share"]) - x["share"] for x in mine],
                    "arrayminus": [x["share"] - (x["low"] or x["share"]) for x in mine],
                },
                text=[f"{x['rounds']:,} rounds" for x in mine],
                hovertemplate="step %{x}: %{y:.1%} of %{text}<extra>%{fullData.name}</extra>",
            )
    figure.update_yaxes(range=[0, 1], tickformat=".0%").update_xaxes(dtick=1)
    title = "Acceptance per step, 95 % interval over prompts"
    styled(figure, title, "draft step", "share of rounds that accepted it", 440)
    return figure.update_layout(legend=LEGEND_BELOW)
