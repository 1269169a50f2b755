"""The figure of the loss ablation: acceptance length at T = 0 and T = 1, a point a variant."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.measure.ablation import GREEDY, SAMPLED, Estimate, finalists
from eagle3lib.report.style import BLUE, GREY, ORANGE, styled

_TITLES = {GREEDY: "T = 0", SAMPLED: "T = 1"}
Found = dict[str, dict[str, Estimate]]


def ablation_figure(
    offline: Found, served: Found, baselines: dict[str, dict[str, float]], winner: str
) -> go.Figure:
    """``baselines``: judgement -> name -> acceptance length of what is no trained drafter;
    ``served``: may be empty. Variants by their score, the best on top."""
    order = finalists(offline, len(offline))[::-1]
    figure = make_subplots(1, 2, subplot_titles=list(_TITLES.values()), shared_yaxes=True)
    series = (("held out, offline", offline, BLUE), ("served by vLLM", served, ORANGE))
    for column, judgement in enumerate(_TITLES, start=1):
        for name, found, colour in series:
            shown = [v for v in order if judgement in found.get(v, {})]
            own = [found[v][judgement] for v in shown]
            figure.add_scatter(
                x=[e.value for e in own],
                y=shown,
                mode="markers",
                marker={"color": colour, "size": 9},
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
    return styled(figure, f"Acceptance length by loss: the default is {winner}", "", "")
