"""Figures of the roofline: speed under the limits, what is moved for a token, cost and speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.report.style import BLUE, GREEN, GREY, LEGEND_BELOW, ORANGE, PARTS, styled

Line = dict[str, Any]
_ARMS = {"plain": ("engine alone", GREY), "drafted": ("with drafter", GREEN)}
_DASHES = {"bandwidth": "dash", "compute": "dot"}


def roofline_curves(lines: Sequence[Line], limits: dict[str, dict[str, list[Line]]]) -> go.Figure:
    """Tokens per second over requests in flight, a panel an engine, under both limits of each arm.
    ``limits``: by engine and arm, as ``plan/roofline.py`` has them."""
    figure = _panels(lines)
    for column, engine in enumerate(_engines(lines), start=1):
        mine = [line for line in lines if line["engine"] == engine]
        for arm, (name, colour) in _ARMS.items():
            shared = {"row": 1, "col": column}
            for limit, dash in _DASHES.items():
                label = f"{limit} limit, {name}"
                figure.add_scatter(
                    x=[p["batch"] for p in limits[engine][arm]],
                    y=[p[limit] for p in limits[engine][arm]],
                    name=label, legendgroup=label, showlegend=column == 1, mode="lines",
                    line={"color": colour, "dash": dash, "width": 1}, **shared,
                )  # fmt: skip
            figure.add_scatter(
                x=[line[arm]["in_flight"] for line in mine],
                y=[line[arm]["tokens_per_s"] for line in mine],
                customdata=[[line["concurrency"], line[arm]["share_of_limit"]] for line in mine],
                name=name, legendgroup=name, showlegend=column == 1, mode="lines+markers",
                line={"color": colour, "width": 3},
                hovertemplate="%{customdata[0]} asked, %{x:.1f} in flight: %{y:,.0f} tok/s, "
                "%{customdata[1]:.1%} of the limit<extra>" + name + "</extra>", **shared,
            )  # fmt: skip
    figure.update_xaxes(type="log").update_yaxes(type="log")
    title, y = "Measured, and what the machine allows", "tokens per second, all readers"
    return _below(styled(figure, title, "requests in flight (mean)", y, 460))


def moved_bars(lines: Sequence[Line]) -> go.Figure:
    """Bytes by part, and FLOPs, that a token costs, either arm at each load of the first engine
    (another engine's differ in context and acceptance alone)."""
    mine = [line for line in lines if line["engine"] == lines[0]["engine"]]
    names = [f"{line['concurrency']}, {label}" for line in mine for label, _ in _ARMS.values()]
    told = [line[arm] for line in mine for arm in _ARMS]
    figure = make_subplots(1, 2, subplot_titles=("megabytes read", "MFLOP"))
    parts = dict.fromkeys(part for line in told for part in line["bytes_per_token"])
    for part, colour in zip(parts, PARTS, strict=False):
        sizes = [line["bytes_per_token"].get(part, 0) / 1e6 for line in told]
        if any(sizes):
            figure.add_bar(x=names, y=sizes, name=part, marker_color=colour, row=1, col=1)
    figure.add_bar(x=names, y=[line["flops_per_token"] / 1e6 for line in told], name="FLOPs",
                   marker_color=PARTS[4], row=1, col=2)  # fmt: skip
    figure.update_layout(barmode="stack")
    title = "What a token costs, by requests in flight"
    return _below(styled(figure, title, "", "", 460))


def cost_curves(lines: Sequence[Line]) -> go.Figure:
    """Cost of a round, measured and modelled, over requests in flight, a panel an engine."""
    figure = _panels(lines)
    series = (
        ("measured", lambda line: line["cost"], GREEN, "solid"),
        ("plan's model", lambda line: line["planned"]["cost"], GREY, "dash"),
        ("calibrated at the lowest load", lambda line: line["calibrated"]["cost"], BLUE, "dot"),
    )
    _draw(figure, lines, series)
    return _below(styled(figure, "Cost of a round: measured and modelled", "requests in flight",
                         "plain steps", 420))  # fmt: skip


def speedup_curves(lines: Sequence[Line]) -> go.Figure:
    """Speed-up beside acceptance length and what the model expects; below 1 it does not pay."""
    figure = _panels(lines)
    series = (
        ("measured speed-up", lambda line: line["speedup"], GREEN, "solid"),
        ("acceptance length, the most it can be", lambda line: line["acceptance_length"], BLUE,
         "dash"),
        ("acceptance length / cost of a round", lambda line: line["acceptance_length"]
         / line["cost"], ORANGE, "solid"),
        ("expected, plan's model", lambda line: line["planned"]["speedup"], GREY, "dash"),
        ("expected, calibrated", lambda line: line["calibrated"]["speedup"], BLUE, "dot"),
    )  # fmt: skip
    _draw(figure, lines, series)
    figure.add_hline(y=1, line={"color": GREY, "width": 1})
    return _below(styled(figure, "Speed-up, and where it ends", "requests in flight", "times", 440))


def terms_bars(lines: Sequence[Line]) -> go.Figure:
    """What a round costs beyond a plain step, part by part, for each engine and load."""
    figure = go.Figure()
    names = [f"{line['engine']}, {line['concurrency']}" for line in lines]
    for part, colour in zip(dict.fromkeys(t for x in lines for t in x["terms"]),
                            (*PARTS, GREY, GREEN), strict=False):  # fmt: skip
        values = [line["terms"][part] for line in lines]
        if any(abs(v) > 0.005 for v in values):
            figure.add_bar(x=names, y=values, name=part, marker_color=colour)
    figure.add_scatter(
        x=names, y=[line["acceptance_length"] - 1 for line in lines], mode="markers",
        name="accepted a round: pays while above the stack",
        marker={"symbol": "line-ew-open", "size": 28, "color": "black", "line": {"width": 3}},
    )  # fmt: skip
    figure.update_layout(barmode="relative")
    return _below(styled(figure, "What a round costs beyond a plain step", "engine, in flight",
                         "plain steps", 440))  # fmt: skip


def _engines(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["engine"] for line in lines))


def _panels(lines: Sequence[Line]) -> go.Figure:
    engines = _engines(lines)
    return make_subplots(cols=len(engines), subplot_titles=engines, shared_yaxes=True)


def _draw(figure: go.Figure, lines: Sequence[Line], series: Sequence[tuple[Any, ...]]) -> None:
    for column, engine in enumerate(_engines(lines), start=1):
        mine = [line for line in lines if line["engine"] == engine]
        for name, value, colour, dash in series:
            figure.add_scatter(
                x=[line["concurrency"] for line in mine], y=[value(line) for line in mine],
                name=name, legendgroup=name, showlegend=column == 1, mode="lines+markers",
                line={"color": colour, "dash": dash}, row=1, col=column,
                hovertemplate="%{x} in flight: %{y:.2f}<extra>" + name + "</extra>",
            )  # fmt: skip
    loads = sorted({line["concurrency"] for line in lines})
    figure.update_xaxes(type="log", tickvals=loads, ticktext=loads)


def _below(figure: go.Figure) -> go.Figure:
    return figure.update_layout(legend=LEGEND_BELOW, margin_t=80)
