"""Figures of the acceptance explorer: curves with their intervals and counts, published figures,
expected speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from eagle3lib.diagnose.expected_speed import CostModel, speedup_grid
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.published import PUBLISHED, Published
from eagle3lib.report.style import (
    GREY,
    LEGEND_BELOW,
    ORANGE,
    PARTS,
    PURPLE,
    SET_COLOURS,
    nothing_drawn,
    styled,
)

Line = dict[str, Any]
_TREE_X = "tree"
_JOINED = "lines+markers"


def per_step(lines: Sequence[Line]) -> go.Figure:
    """Share of rounds that accept step k, and (dashed) of those that reached it."""
    figure = go.Figure()
    for name in dict.fromkeys(x["set"] for x in lines):
        mine = [x for x in lines if x["set"] == name]
        for of, dash in (("rounds", "solid"), ("reached", "dash")):
            known = [x for x in mine if x[of]]
            figure.add_scatter(
                x=[x["step"] for x in known],
                y=[x["accepted"] / x[of] for x in known],
                name=name if of == "rounds" else f"{name}, of those that reached it",
                mode="lines+markers",
                line={"color": SET_COLOURS.get(name, GREY), "dash": dash},
                text=[f"{x['accepted']:,} of {x[of]:,} rounds" for x in known],
                hovertemplate="step %{x}: %{y:.1%}, %{text}<extra>%{fullData.name}</extra>",
            )
    figure.update_yaxes(range=[0, 1], tickformat=".0%").update_xaxes(dtick=1)
    return styled(figure, "Acceptance per step", "draft step", "share accepted")


def length_curve(
    lines: Sequence[Line], x: Callable[[Line], str], title: str, label: str, mode: str = _JOINED
) -> go.Figure:
    """Acceptance length with its interval along ``x``, in the lines' order; hovering tells prompts
    and rounds. ``mode``: "markers" where places have no order."""
    figure = go.Figure()
    places = list(dict.fromkeys(x(line) for line in lines))
    for number, name in enumerate(dict.fromkeys(line["set"] for line in lines)):
        mine = [line for line in lines if line["set"] == name]
        values = [line["acceptance_length"] for line in mine]
        known = [
            (v, line["low"] or v, line["high"] or v) for v, line in zip(values, mine, strict=True)
        ]
        figure.add_scatter(
            # Side by side, so that intervals at the same place don't cover each other.
            x=[places.index(x(line)) + 0.06 * number for line in mine],
            y=values,
            name=name,
            mode=mode,
            marker={"size": 8},
            line={"color": SET_COLOURS.get(name, PURPLE)},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high - v for v, _, high in known],
                "arrayminus": [v - low for v, low, _ in known],
                "thickness": 1,
            },
            text=[
                f"{x(line)}: {line['prompts']:,} prompts, {line['rounds']:,} rounds"
                + ("" if line["low"] else ", too few prompts for an interval")
                for line in mine
            ],
            hovertemplate="%{text}<br>%{y:.3f} tokens a round<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(
        tickmode="array", tickvals=list(range(len(places))), ticktext=places,
        range=[-0.5, len(places) - 0.4],
    )  # fmt: skip
    return styled(figure, f"Acceptance length {title}", label, "tokens a round")


def spans(line: Line) -> str:
    return f"{line['from']:,}" if line["from"] == line["to"] else f"{line['from']:,}-{line['to']:,}"


def training_tokens(lines: Sequence[Line]) -> go.Figure:
    """Held-out acceptance length over the tokens trained on."""
    if not lines:
        return nothing_drawn("No held-out acceptance: the training evaluated none")
    figure = go.Figure()
    for name in dict.fromkeys(x["set"] for x in lines):
        mine = [x for x in lines if x["set"] == name]
        figure.add_scatter(
            x=[x["trained_tokens"] for x in mine],
            y=[x["acceptance_length"] for x in mine],
            name=name,
            mode="lines+markers",
            line={"color": SET_COLOURS.get(name, GREY)},
            text=[f"pass {x['epoch']}, {x['rounds']:,} rounds" for x in mine],
            hovertemplate="%{x:,} tokens (%{text}): %{y:.3f}<extra>%{fullData.name}</extra>",
        )
    title = "Held-out acceptance length over training (simulated)"
    return styled(figure, title, "tokens trained on, every pass", "tokens a round")


def beside_published(runs: dict[str, Sequence[Line]]) -> go.Figure:
    """Acceptance length over K: runs (lines, ``lengths_by_k``) and published figures (marks)."""
    figure = go.Figure()
    most = max([x["num_speculative_tokens"] for lines in runs.values() for x in lines] + [7])
    for number, (run, lines) in enumerate(runs.items()):
        for name in dict.fromkeys(x["set"] for x in lines):
            mine = [x for x in lines if x["set"] == name]
            figure.add_scatter(
                x=[x["num_speculative_tokens"] for x in mine],
                y=[x["acceptance_length"] for x in mine],
                name=f"run {run}, {name}",
                mode="lines+markers",
                line={"color": PARTS[(0, 2, 3, 5)[number % 4]],
                      "dash": "solid" if name == "workload" else "dot"},
                text=[f"{x['rounds']:,} rounds" for x in mine],
                hovertemplate="K=%{x}: %{y:.2f}, %{text}<extra>%{fullData.name}</extra>",
            )  # fmt: skip
    for tree, symbol in ((False, "diamond-open"), (True, "cross-open")):
        figure.add_trace(_marks([p for p in PUBLISHED if p.tree is tree], tree, symbol, most + 1))
    ticks = list(range(1, most + 1))
    figure.update_xaxes(tickmode="array", tickvals=[*ticks, most + 1], ticktext=[*ticks, _TREE_X])
    figure.update_yaxes(rangemode="tozero")
    title = "Acceptance length, and what others published"
    styled(figure, title, "drafted per round (K)", "tokens a round", 520)
    return figure.update_layout(legend=LEGEND_BELOW)


def _marks(found: list[Published], tree: bool, symbol: str, tree_x: int) -> go.Scatter:
    return go.Scatter(
        x=[p.steps or tree_x for p in found],
        y=[p.acceptance_length for p in found],
        name="published, tree" if tree else "published, chain",
        mode="markers",
        marker={"color": PURPLE if tree else GREY, "symbol": symbol, "size": 10},
        text=[
            f"{p.target}, {p.prompts}"
            + ("" if p.temperature is None else f", T = {p.temperature:g}")
            + f"<br>{p.source}"
            for p in found
        ],
        hovertemplate="%{y:.2f}: %{text}<extra></extra>",
    )


def published_rows() -> list[Line]:
    """The published figures as a table."""
    return [
        {
            "target": p.target,
            "prompts": p.prompts,
            "K": "tree" if p.steps is None else p.steps,
            "temperature": "not stated" if p.temperature is None else f"{p.temperature:g}",
            "acceptance length": p.acceptance_length,
            "source": p.source,
        }
        for p in PUBLISHED
    ]


def expected_speedups(
    model: CostModel | None,
    counts: Counts,
    points: Sequence[Line],
    most_steps: int,
    most_concurrency: int,
) -> go.Figure:
    """The surface over K and concurrency, or the curve over K where one concurrency was measured;
    measured points stand on it."""
    if model is None or not counts.per_step:
        return nothing_drawn(f"No expected speed-up: {_why_none(model)}")
    most_steps = max([most_steps, *(p["num_speculative_tokens"] for p in points)])
    steps = list(range(1, most_steps + 1))
    if model.crowd is None:
        return _curve(model, counts, points, steps)
    loads = sorted({*_doublings(most_concurrency), *(p["concurrency"] for p in points)})
    grid = speedup_grid(model, counts, steps, loads)
    figure = go.Figure(
        go.Heatmap(
            x=steps, y=[str(n) for n in loads], z=grid, zmid=1, colorscale="RdBu",
            colorbar={"title": "speed-up"}, texttemplate="%{z:.2f}",
            hovertemplate="K=%{x}, %{y} in flight: %{z:.2f} times<extra>expected</extra>",
        )
    )  # fmt: skip
    figure.add_scatter(
        x=[p["num_speculative_tokens"] for p in points],
        y=[str(p["concurrency"]) for p in points],
        mode="markers",
        name="measured",
        marker={"opacity": 0, "size": 20},  # hovering tells; the frame is drawn below
        text=[_measured(p) for p in points],
        hovertemplate="measured, K=%{x}, %{y} in flight: %{text}<extra></extra>",
    )
    for p in points:
        k, row = p["num_speculative_tokens"], loads.index(p["concurrency"])
        figure.add_shape(
            type="rect", x0=k - 0.47, x1=k + 0.47, y0=row - 0.45, y1=row + 0.45,
            line={"color": "#000", "width": 2},
        )  # fmt: skip
    figure.update_xaxes(dtick=1, range=[0.5, most_steps + 0.5])
    figure.update_yaxes(type="category", range=[-0.5, len(loads) - 0.5])
    title = "Expected speed-up; what was measured is framed"
    return styled(figure, title, "drafted per round (K)", "requests in flight", 420)


def speedups_over_load(
    model: CostModel | None, counts: Counts, points: Sequence[Line], most_steps: int, most: int
) -> go.Figure:
    """Expected speed-up over the requests in flight up to ``most``, with the measured ones. A
    slider chooses K; the largest measured one is drawn first."""
    if model is None or not counts.per_step:
        return nothing_drawn(f"No speed-up over the load: {_why_none(model)}")
    if model.crowd is None:
        return nothing_drawn("No speed-up over the load: one concurrency was measured")
    shown = max(p["num_speculative_tokens"] for p in points)
    steps = list(range(1, max(most_steps, shown) + 1))
    loads = sorted({*_doublings(most), *(p["concurrency"] for p in points)})
    figure = go.Figure()
    for k in steps:
        grid = speedup_grid(model, counts, [k], loads)
        here = [p for p in points if p["num_speculative_tokens"] == k]
        values = [p["speedup"]["value"] for p in here]
        figure.add_scatter(
            x=loads, y=[row[0] for row in grid], name="expected", visible=k == shown,
            mode="lines+markers", line={"color": ORANGE},
            hovertemplate=f"K={k}, %{{x}} in flight: %{{y:.2f}} times<extra>expected</extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=[p["concurrency"] for p in here],
            y=values,
            name="measured",
            visible=k == shown,
            mode="markers",
            marker={"color": SET_COLOURS["workload"], "size": 10, "symbol": "square"},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [p["speedup"]["high"] - v for p, v in zip(here, values, strict=True)],
                "arrayminus": [v - p["speedup"]["low"] for p, v in zip(here, values, strict=True)],
            },
            text=[_measured(p) for p in here],
            hovertemplate="%{x} in flight: %{text}<extra>measured</extra>",
        )
    figure.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="engine alone")
    figure.update_xaxes(type="log", tickvals=loads, ticktext=[str(n) for n in loads])
    top = max(v for trace in figure.data for v in (*trace.y, 1.0))
    figure.update_yaxes(range=[0, 1.15 * top])  # the same for every K
    styled(figure, "Speed-up over the load, by K", "requests in flight", "times as fast", 470)
    slider = {
        "active": steps.index(shown),
        "currentvalue": {"prefix": "K = "},
        "pad": {"t": 50},
        "steps": [
            {
                "label": str(k),
                "method": "restyle",
                "args": ["visible", [at == k for at in steps for _ in range(2)]],
            }
            for k in steps
        ],
    }
    return figure.update_layout(sliders=[slider])


def _curve(
    model: CostModel, counts: Counts, points: Sequence[Line], steps: Sequence[int]
) -> go.Figure:
    (row,) = speedup_grid(model, counts, steps, [model.concurrency])
    figure = go.Figure()
    figure.add_scatter(
        x=list(steps), y=row, name="expected", mode="lines+markers", line={"color": ORANGE},
        hovertemplate="K=%{x}: %{y:.2f} times<extra>expected</extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=[p["num_speculative_tokens"] for p in points],
        y=[p["speedup"]["value"] for p in points],
        name="measured",
        mode="markers",
        marker={"color": SET_COLOURS["workload"], "size": 12, "symbol": "square"},
        text=[_measured(p) for p in points],
        hovertemplate="K=%{x}: %{text}<extra>measured</extra>",
    )
    figure.add_hline(y=1, line={"color": GREY, "dash": "dot"}, annotation_text="engine alone")
    figure.update_xaxes(dtick=1).update_yaxes(rangemode="tozero")
    title = f"Expected speed-up at {model.concurrency} in flight, the only one measured"
    return styled(figure, title, "drafted per round (K)", "times as fast")


def _why_none(model: CostModel | None) -> str:
    if model is None:
        return "none was measured on five prompts or more"
    return "the engine told no steps"


def _measured(point: Line) -> str:
    speed = point["speedup"]
    interval = "" if speed["low"] is None else f" ({speed['low']:.2f} to {speed['high']:.2f})"
    return f"{speed['value']:.2f}{interval}, {point['requests']} requests"


def _doublings(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
