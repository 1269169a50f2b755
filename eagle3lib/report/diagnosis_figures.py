"""Figures of the diagnosis: where tokens are lost, and what each counterfactual would give."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from pandas.io.formats.style import Styler

from eagle3lib.report.style import BLUE, GREY, ORANGE, nothing_drawn, styled
from eagle3lib.report.tables import facts_table


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


def acceptance_by_group(groups: list[dict[str, Any]]) -> go.Figure:
    """Acceptance length of every group with its interval, splits under each other; small groups are
    hollow. Splits of a single group say nothing and are left out."""
    names = [g["split"] for g in groups]
    shown = [g for g in groups if names.count(g["split"]) > 1 and g["acceptance_length"]]
    if not shown:
        return nothing_drawn("No rounds in two groups of the same split.")
    shown.reverse()  # the first stands on top
    figure = go.Figure(
        go.Scatter(
            x=[g["acceptance_length"] for g in shown],
            y=[f"{g['split']}: {g['group']}" for g in shown],
            mode="markers",
            marker={"size": 9, "color": BLUE,
                    "symbol": ["circle-open" if g["small"] else "circle" for g in shown]},
            error_x={
                "symmetric": False, "color": GREY,
                "array": [(g["high"] or g["acceptance_length"]) - g["acceptance_length"]
                          for g in shown],
                "arrayminus": [g["acceptance_length"] - (g["low"] or g["acceptance_length"])
                               for g in shown],
            },
            customdata=[[g["rounds"], g["answers"], _percent(g["coverage"]),
                         "; too small for an interval" if g["small"] else ""] for g in shown],
            hovertemplate="%{y}<br>%{x:.2f} tokens a round, %{customdata[0]:,} rounds of "
            "%{customdata[1]} answers%{customdata[3]}<br>in the draft vocabulary: %{customdata[2]}"
            "<extra></extra>",
        )
    )  # fmt: skip
    title = "Acceptance length by group (95 % over answers; hollow: too small)"
    return styled(figure, title, "tokens a round", "", 120 + 22 * len(shown))


def groups_table(groups: list[dict[str, Any]]) -> Styler:
    """Every group with its counts."""
    lines = [
        {
            "split": g["split"], "group": g["group"], "answers": g["answers"],
            "rounds": g["rounds"], "tokens a round": g["acceptance_length"],
            "95 %": "too small" if g["low"] is None else f"{g['low']:.2f} to {g['high']:.2f}",
            "in the draft vocabulary": _percent(g["coverage"]),
            "of the served tokens": _percent(g["served_share"]),
            "of the trained tokens": _percent(g["trained_share"]),
        }
        for g in groups
    ]  # fmt: skip
    return facts_table(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
