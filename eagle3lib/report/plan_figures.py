"""Figures of the plan: what a step is made of, and where speculation pays."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from eagle3lib.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, styled


def step_parts_bars(lines: list[dict[str, Any]]) -> go.Figure:
    """What a plain step and a round spend their time on, by batch size (plan/step.py)."""
    colours = {
        "weights": BLUE,
        "experts": "#56B4E9",
        "keys and values": GREEN,
        "compute": PURPLE,
        "collectives": ORANGE,
        "layers": "#999999",
        "host": GREY,
        "drafter": "#D55E00",
    }
    rows = lines[::-1]
    names = [f"{line['what']}, batch {line['batch']}" for line in rows]
    figure = go.Figure()
    for part, colour in colours.items():
        values = [line.get(part, 0.0) for line in rows]
        if any(values):
            figure.add_bar(
                x=values,
                y=names,
                name=part,
                orientation="h",
                marker_color=colour,
                hovertemplate="%{y}: %{x:.2f} ms<extra>" + part + "</extra>",
            )
    figure.update_layout(barmode="stack")
    title = "What a decode step is made of"
    figure = styled(figure, title, "milliseconds (predicted)", "", 160 + 34 * len(rows))
    return figure.update_yaxes(automargin=True)


def break_even_curves(costs: list[dict[str, Any]]) -> go.Figure:
    """Acceptance length at which speculation pays, by K and batch size, under the one hoped for:
    a drafter pays where the dashed line is above the batch's own."""
    figure = go.Figure()
    batches = list(dict.fromkeys(line["batch"] for line in costs))
    palette = (BLUE, GREEN, PURPLE, "#D55E00", "#56B4E9")
    for number, batch in enumerate(batches):
        mine = [line for line in costs if line["batch"] == batch]
        figure.add_scatter(
            x=[line["K"] for line in mine],
            y=[line["round_cost"] for line in mine],
            name=f"batch {batch}",
            mode="lines+markers",
            line={"color": palette[number % len(palette)]},
            customdata=[line["speedup"] for line in mine],
            hovertemplate="K=%{x}: pays above %{y:.2f}, %{customdata:.2f}x<extra></extra>",
        )
    first = [line for line in costs if line["batch"] == batches[0]]
    figure.add_scatter(
        x=[line["K"] for line in first],
        y=[line["acceptance_length"] for line in first],
        name="hoped for",
        mode="lines",
        line={"color": ORANGE, "dash": "dash", "width": 3},
    )
    title = "From which acceptance length speculation pays"
    return styled(figure, title, "K, drafted tokens per round", "tokens a round")
