"""Figures of the answers and of the states captured from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.data.roles import ROLES, SCAFFOLDING, UNKNOWN
from eagle3lib.data.rows import AnswerRow
from eagle3lib.report.style import (
    BLUE,
    GREEN,
    GREY,
    LEAST_LABELLED,
    ORANGE,
    PALE,
    PARTS,
    PURPLE,
    SET_COLOURS,
    SKY,
    VERMILION,
    styled,
)

_ROLE_COLOURS = {
    "system": PURPLE,
    "user": BLUE,
    "assistant": SKY,
    "tool": VERMILION,
    SCAFFOLDING: PALE,
    UNKNOWN: GREY,
    "reasoning": ORANGE,
    "answer": GREEN,
}


def length_histograms(rows: Iterable[AnswerRow]) -> go.Figure:
    """Prompt and answer lengths in tokens, side by side, by set and split."""
    lengths: dict[str, dict[str, list[int]]] = {"prompts": {}, "answers": {}}
    for row in rows:
        name = f"{row.set} {row.split}"
        lengths["prompts"].setdefault(name, []).append(len(row.prompt_token_ids))
        lengths["answers"].setdefault(name, []).append(len(row.answer_token_ids))
    figure = make_subplots(cols=2, subplot_titles=list(lengths), horizontal_spacing=0.08)
    for column, sets in enumerate(lengths.values(), start=1):
        for name, values in sorted(sets.items()):
            figure.add_histogram(
                x=values,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                opacity=0.75 if name.endswith("train") else 0.4,
                nbinsx=30,
                marker_color=SET_COLOURS.get(name.split()[0], GREY),
                row=1,
                col=column,
            )
    figure.update_layout(barmode="overlay")
    figure = styled(figure, "Lengths", "tokens", "rows")
    # Above the panels' own titles.
    return figure.update_layout(legend_y=1.1, margin_t=80)


def share_bars(counts: dict[str, dict[str, int]], title: str, unit: str) -> go.Figure:
    """What each set is made of: one bar a set, its parts as shares of all that it holds.

    ``counts``: set -> part -> count. Parts keep the order in which they come first.
    """
    parts = list(dict.fromkeys(part for count in counts.values() for part in count))
    parts.sort(key=lambda part: ROLES.index(part) if part in ROLES else len(ROLES))
    spare = iter(PARTS)
    figure = go.Figure()
    for part in parts:
        values = [count.get(part, 0) for count in counts.values()]
        totals = [max(sum(count.values()), 1) for count in counts.values()]
        shares = [value / total for value, total in zip(values, totals, strict=True)]
        figure.add_bar(
            y=list(counts),
            x=shares,
            name=part,
            orientation="h",
            marker_color=_ROLE_COLOURS.get(part) or next(spare, GREY),
            customdata=values,
            text=[f"{share:.0%}" if share >= LEAST_LABELLED else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{y}}, {part}: %{{customdata:,}} {unit}, %{{x:.1%}}<extra></extra>",
        )
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    figure = styled(figure, title, f"share of {unit}", "", 190 + 50 * len(counts))
    # The parts are many: their legend stands below the title, not beside it.
    return figure.update_layout(legend={"x": 0, "xanchor": "left"}, margin_t=90)


def ngram_bars(runs: list[dict[str, Any]]) -> go.Figure:
    """The commonest word runs by the share of answers that hold them, the commonest on top."""
    lines = pd.DataFrame(runs, columns=["words", "answers", "share"]).iloc[::-1]
    figure = go.Figure(
        go.Bar(
            x=lines.share,
            y=lines.words,
            orientation="h",
            marker_color=BLUE,
            customdata=lines.answers,
            hovertemplate="%{y}: %{customdata} answers, %{x:.1%}<extra></extra>",
        )
    )
    figure.update_xaxes(tickformat=".0%")
    figure = styled(figure, "Commonest word runs", "share of answers", "", 120 + 22 * len(lines))
    return figure.update_yaxes(automargin=True)


def state_norms(norms: pd.DataFrame) -> go.Figure:
    """Distribution of the states' root mean square by slot."""
    figure = go.Figure()
    for name, part in norms.groupby("state", sort=False):
        figure.add_box(y=part.rms, name=str(name), marker_color=BLUE, showlegend=False)
    figure.update_yaxes(type="log")
    return styled(figure, "Size of the captured states", "state", "root mean square")
