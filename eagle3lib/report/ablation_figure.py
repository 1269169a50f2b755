"""The figure of the loss ablation: acceptance length at T = 0 and T = 1, a point a variant."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.measure.ablation import GREEDY, SAMPLED, Estimate, finalists
from eagle3lib.report.style import BLUE, GREY, ORANGE, SKY, styled

_TITLES = {GREEDY: "T = 0", SAMPLED: "T = 1"}
Found = dict[str, dict[str, Estimate]]


def ablation_figure(
    offline: Found,
    served: Found,
    baselines: dict[str, dict[str, float]],
    winner: str,
    reference: str,
    seeds: dict[str, dict[str, list[float]]] | None = None,
) -> go.Figure:
    """Which loss wins, by how much: a line a variant, the best score on top, beside each point what
    it gains over ``reference``.

    ``baselines``: judgement -> name -> acceptance length of what is no trained drafter;
    ``served``: may be empty; ``seeds``: variant -> judgement -> offline length of each seed.
    """
    order = finalists(offline, len(offline))[::-1]
    figure = make_subplots(1, 2, subplot_titles=list(_TITLES.values()), shared_yaxes=True)
    series = (("held out, offline", offline, BLUE), ("served by vLLM", served, ORANGE))
    for column, judgement in enumerate(_TITLES, start=1):
        _add_seeds(figure, column, seeds or {}, judgement, order)
        for name, found, colour in series:
            shown = [v for v in order if judgement in found.get(v, {})]
            own = [found[v][judgement] for v in shown]
            figure.add_scatter(
                x=[e.value for e in own],
                y=shown,
                mode="markers+text",
                marker={"color": colour, "size": 9},
                text=["" if v == reference else _gain(found[v], judgement) for v in shown],
                textposition="top center" if name == series[0][0] else "bottom center",
                textfont={"color": colour, "size": 11},
                error_x={
                    "array": [e.high - e.value for e in own],
                    "arrayminus": [e.value - e.low for e in own],
                },
                name=name,
                legendgroup=name,
                showlegend=column == 1 and bool(own),
                row=1,
                col=column,
            )
        for name, length in baselines.get(judgement, {}).items():
            figure.add_vline(
                x=length,
                line={"color": GREY, "dash": "dot"},
                annotation_text=name,
                annotation_textangle=-90,
                row=1,
                col=column,
            )
    figure.update_yaxes(categoryorder="array", categoryarray=order)
    title = f"Acceptance length by loss: {_verdict(served or offline, winner, reference)}"
    return styled(figure, title, "", "", height=140 + 52 * len(order))


def _add_seeds(
    figure: go.Figure,
    column: int,
    seeds: dict[str, dict[str, list[float]]],
    judgement: str,
    order: list[str],
) -> None:
    points = [(x, v) for v in order for x in seeds.get(v, {}).get(judgement, [])]
    if points:
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[v for _, v in points],
            mode="markers",
            marker={"color": SKY, "size": 6, "symbol": "line-ns-open"},
            name="each seed, offline",
            legendgroup="seeds",
            showlegend=column == 1,
            row=1,
            col=column,
        )


def _gain(found: dict[str, Estimate], judgement: str) -> str:
    """What the length gains over the reference's, in per cent, with its interval."""
    e = found[f"{judgement}_ratio"]
    return f"{e.value - 1:+.1%} ({e.low - 1:+.1%} to {e.high - 1:+.1%})"


def _verdict(found: Found, winner: str, reference: str) -> str:
    if winner == reference:
        return f"none is shown to beat {reference}"
    gains = (f"{_gain(found[winner], name)} at {title}" for name, title in _TITLES.items())
    return f"{winner} beats {reference}, {', '.join(gains)}"
