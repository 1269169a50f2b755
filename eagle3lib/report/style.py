"""The one look of every figure: readable in print, colour-blind safe.

Colours are Okabe and Ito's; a series keeps its colour in every figure.
"""

from __future__ import annotations

import plotly.graph_objects as go

from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#6e6e6e"
SKY, VERMILION, PALE, YELLOW = "#56B4E9", "#D55E00", "#c9c9c9", "#F0E442"
ENGINE, SIMULATOR, BASELINE, PLAIN_ARM = BLUE, ORANGE, GREY, GREY
PARTS = (BLUE, PALE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW)
SET_COLOURS = {"workload": BLUE, "general": GREEN}
ARM_COLOURS = {PLAIN: GREY, REFERENCE: BLUE, OWN: GREEN}  # whichever arms there are
# For many names: below the figure there is room for them.
LEGEND_BELOW = {"y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"}
LEAST_LABELLED = 0.04  # share below which a part has no room for its number


def styled(figure: go.Figure, title: str, x: str, y: str, height: int = 380) -> go.Figure:
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left", "font": {"size": 16}},
        template="plotly_white",
        colorway=PARTS,  # of series that are given no colour
        height=height,
        margin={"l": 60, "r": 20, "t": 56, "b": 50},
        legend={"orientation": "h", "y": 1.02, "x": 1, "xanchor": "right", "yanchor": "bottom"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_xaxes(title=x)
    # Of figures side by side the first column names what all of them share.
    return figure.update_yaxes(title=y, col=1) if figure._grid_ref else figure.update_yaxes(title=y)


def nothing_drawn(why: str) -> go.Figure:
    """A figure that says why there is none."""
    figure = styled(go.Figure(), why, "", "", 90)
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)
