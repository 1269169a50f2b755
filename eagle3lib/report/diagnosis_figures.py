"""Figures of the diagnosis: where tokens are lost, and what each counterfactual would give."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from eagle3lib.report.style import BLUE, GREY, ORANGE, styled


def waterfall(levels: list[dict[str, Any]], title: str) -> go.Figure:
    """Levels of ``acceptance_waterfall`` or ``speed_waterfall``; losses stand on the bars."""
    names = [level["level"] for level in levels]
    values = [level["length"] for level in levels]
    if not levels:
        return styled(go.Figure(), f"{title}: nothing was measured", "", "")
    moves = ["absolute", *["relative"] * (len(levels) - 1), "total"]
    figure = go.Figure(
        go.Waterfall(
            x=[*names, "measured"],
            y=[values[0], *(-level["lost"] for level in levels[1:]), values[-1]],
            measure=moves,
            text=[f"{values[0]:.2f}", *(f"{-level['lost']:+.2f}" for level in levels[1:]),
                  f"{values[-1]:.2f}"],
            textposition="outside",
            decreasing={"marker": {"color": ORANGE}},
            increasing={"marker": {"color": BLUE}},
            totals={"marker": {"color": GREY}},
        )
    )  # fmt: skip
    figure.update_yaxes(range=[0, max(values) * 1.15])
    return styled(figure, title, "", "tokens a round")


def counterfactuals(table: list[dict[str, Any]]) -> go.Figure:
    """Share of the engine's rounds that each variant gives; the drafter as exported stands out."""
    lines = sorted(table, key=lambda o: o["rounds_equal"])
    shares = [o["rounds_equal"] / o["rounds"] if o["rounds"] else 0.0 for o in lines]
    figure = go.Figure(
        go.Bar(
            y=[o["variant"] for o in lines],
            x=shares,
            orientation="h",
            marker_color=[GREY if o["cause"] else BLUE for o in lines],
            text=[
                f"{o['rounds_equal']} of {o['rounds']}, length {o['acceptance_length'] or 1:.2f}"
                for o in lines
            ],
            textposition="auto",
            hovertemplate="%{y}: %{x:.1%} of the rounds<extra></extra>",
        )
    )
    figure.update_xaxes(range=[0, 1.02], tickformat=".0%")
    title = "Whose rounds are the engine's?"
    return styled(figure, title, "rounds equal to the engine's record", "", 90 + 22 * len(lines))
