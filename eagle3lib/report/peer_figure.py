"""The figure of the peer benchmark: tokens a second block by block, acceptance length served."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.report.style import BLUE, GREEN, GREY, ORANGE, styled
from eagle3lib.training.peer import OWN, PEER

_COLOURS = {OWN: BLUE, PEER: ORANGE, "untrained": GREY}


def peer_figure(speed: dict[str, Any], quality: dict[str, Any]) -> go.Figure:
    """``speed`` and ``quality`` as :mod:`eagle3lib.measure.peer` summarises them."""
    figure = make_subplots(
        1, 2, subplot_titles=("training, tokens/s by block", "acceptance length, served")
    )
    blocks = speed["blocks"]
    for name, key in ((OWN, "own"), (PEER, "peer")):
        figure.add_bar(
            x=[str(i + 1) for i in range(len(blocks))],
            y=[b[key]["tokens"] / b[key]["seconds"] for b in blocks],
            name=name,
            marker_color=_COLOURS[name],
            texttemplate="%{y:.0f}",
            row=1,
            col=1,
        )
    lines = quality["drafters"]
    figure.add_bar(
        x=list(lines),
        y=[line["all"]["acceptance_length"] for line in lines.values()],
        marker_color=[_COLOURS.get(name, GREEN) for name in lines],
        texttemplate="%{y:.3f}",
        showlegend=False,
        row=1,
        col=2,
    )
    figure.update_yaxes(range=[1, None], row=1, col=2)
    ratio = speed["ratio"]
    title = f"{OWN} against {PEER}: {ratio['median']:.2f} times its tokens/s"
    return styled(figure, title, "", "")
