"""Where rounds end, by draft step and kind of miss."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from eagle3lib.diagnose.predictions import ACCEPTED, KINDS, MISSES
from eagle3lib.report.style import BLUE, GREY, ORANGE, PURPLE, VERMILION, YELLOW, styled

# A miss keeps its colour and pattern of the token view.
_LOOKS = {"engine": (VERMILION, "x"), "outside": (VERMILION, ""), "other": (PURPLE, "."),
          "tie": (YELLOW, "/"), "first": (ORANGE, ""), "chain": (ORANGE, "/")}  # fmt: skip


def misses_by_step(lines: list[dict[str, Any]]) -> go.Figure:
    """``step_counts``: of the drafts that were checked at each step, the accepted and the missed
    ones by kind."""
    figure = go.Figure()
    totals = [sum(x[k] for k in (ACCEPTED, *MISSES)) for x in lines]
    for kind in (ACCEPTED, *MISSES):
        counts = [x[kind] for x in lines]
        if not any(counts):
            continue
        colour, pattern = _LOOKS.get(kind, (BLUE, ""))
        figure.add_bar(
            x=[f"step {x['step']}<br>{n:,} checked" for x, n in zip(lines, totals, strict=True)],
            y=[c / n if n else 0 for c, n in zip(counts, totals, strict=True)],
            name=KINDS[kind].removeprefix("miss").removeprefix(": ").strip(),
            marker={"color": colour, "pattern": {"shape": pattern, "fgcolor": GREY}},
            text=[f"{c:,}" for c in counts],
            hovertemplate="%{x}: %{y:.1%}, %{text} tokens<extra></extra>",
        )
    figure.update_layout(barmode="stack").update_yaxes(range=[0, 1], tickformat=".0%")
    styled(figure, "What became of the drafts that were checked", "", "share of them", 460)
    # The names are sentences: below the bars there is room for them.
    legend = {"orientation": "v", "y": -0.22, "yanchor": "top", "x": 0, "xanchor": "left"}
    return figure.update_layout(legend=legend, margin_b=60)
