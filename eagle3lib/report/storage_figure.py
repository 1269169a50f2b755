"""The figure of the storage bench: ways of capture, reads in both orders, bytes and acceptance."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.report.style import BLUE, GREEN, GREY, ORANGE, styled

_COLOURS = {"capture": BLUE, "prefill": GREY}


def storage_figure(
    ways: list[dict[str, Any]], reads: list[dict[str, Any]], sizes: list[dict[str, Any]]
) -> go.Figure:
    """``ways`` of ``target.capture_bench``, ``reads`` of ``target.storage_bench``, ``sizes`` of
    ``training.bench_states``."""
    figure = make_subplots(
        1,
        3,
        subplot_titles=(
            "capture, tokens per CPU second",
            "shuffled over stored order",
            "bytes a token, of four bf16 states",
        ),
    )
    mine = [line for line in ways if line["clock"] == "cpu"]
    figure.add_bar(
        x=[line["way"] for line in mine],
        y=[line["tokens_per_s"] for line in mine],
        marker_color=[_COLOURS.get(line["way"], ORANGE) for line in mine],
        texttemplate="%{y:.0f}",
        row=1,
        col=1,
    )
    for col, lines, key, colour in (
        (2, reads, "ratio", GREEN),
        (3, sizes, "of_four_bf16_states", BLUE),
    ):
        figure.add_bar(
            x=[line["format"] for line in lines],
            y=[line[key] for line in lines],
            marker_color=colour,
            texttemplate="%{y:.2f}",
            row=1,
            col=col,
        )
    figure.update_layout(showlegend=False)
    best = max(line["capture_over_it"] for line in mine if line["way"] == "padded")
    return styled(figure, f"Capture is {best:.2f} times as fast as padded batches of 8", "", "")
