"""Figures of the draft vocabulary."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from eagle3lib.report.style import BLUE, GREY, ORANGE, SET_COLOURS, styled


def coverage_figure(curve: pd.DataFrame, chosen: int) -> go.Figure:
    """Held-out coverage by size of the draft vocabulary, and what a head of that size costs."""
    figure = go.Figure()
    for name, part in curve.groupby("set"):
        costs = part[["head_bytes", "head_flops"]] / 1e6
        figure.add_scatter(
            x=part.draft_vocab_size,
            y=part.coverage,
            name=str(name),
            mode="lines+markers",
            line={"color": SET_COLOURS.get(str(name), GREY)},
            customdata=costs.to_numpy(),
            hovertemplate="%{x:,} tokens cover %{y:.2%}<br>head: %{customdata[0]:.1f} MB and "
            "%{customdata[1]:.1f} MFLOP a drafted token<extra>" + str(name) + "</extra>",
        )
    figure.add_vline(x=chosen, line={"color": ORANGE, "dash": "dash"}, annotation_text="chosen")
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%")
    return styled(
        figure, "Held-out answer tokens inside the draft vocabulary", "draft vocabulary", "coverage"
    )


def vocab_choice_figure(curve: pd.DataFrame, chosen: int, steps: int) -> go.Figure:
    """Estimated speed-up by size of the draft vocabulary: coverage gained against head read."""
    figure = go.Figure()
    for name, part in curve.groupby("set"):
        figure.add_scatter(
            x=part.draft_vocab_size,
            y=part.estimated_speedup,
            name=str(name),
            mode="lines+markers",
            line={"color": SET_COLOURS.get(str(name), GREY)},
            hovertemplate="%{x:,} tokens: %{y:.3f}<extra>" + str(name) + "</extra>",
        )
    figure.add_vline(x=chosen, line={"color": ORANGE, "dash": "dash"}, annotation_text="chosen")
    figure.update_xaxes(type="log")
    title = f"What the size is worth (estimate, K = {steps}, bandwidth alone)"
    return styled(figure, title, "draft vocabulary", "speed-up over no drafter")


def coverage_kinds_figure(table: pd.DataFrame) -> go.Figure:
    """Held-out coverage by kind of text; the bars say how many tokens they stand for."""
    lines = table.iloc[::-1]
    figure = go.Figure(
        go.Bar(
            x=lines.coverage,
            y=lines.kind,
            orientation="h",
            marker_color=BLUE,
            text=[f"{c:.1%} of {n:,}" for c, n in zip(lines.coverage, lines.tokens, strict=True)],
            textposition="inside",
            insidetextanchor="start",
            hovertemplate="%{y}: %{text} tokens<extra></extra>",
        )
    )
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure = styled(
        figure, "Held-out coverage by kind of text", "coverage", "", 140 + 34 * len(lines)
    )
    return figure.update_yaxes(automargin=True)
