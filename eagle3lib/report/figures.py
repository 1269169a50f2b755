"""Figures of training, acceptance and speed."""

from __future__ import annotations

import json
import time
from typing import Any

import plotly.graph_objects as go
from IPython.display import display

from eagle3lib.report.style import (
    ARM_COLOURS,
    BASELINE,
    BLUE,
    ENGINE,
    ORANGE,
    PURPLE,
    SET_COLOURS,
    SIMULATOR,
    styled,
)

_PLOTLY_MIME = "application/vnd.plotly.v1+json"


def acceptance_per_step(
    compared: dict[str, Any],
    baseline: list[float] | None = None,
    title: str = "Acceptance per step",
) -> go.Figure:
    """Share of rounds that accepted step 1..K: the engine, the simulator, and a bigram for
    scale."""
    figure = go.Figure()
    series = [
        ("engine (served)", compared["engine"]["per_step"], ENGINE),
        ("simulator (offline)", compared["simulator"]["per_step"], SIMULATOR),
    ]
    if baseline:
        series.append(("bigram, no hidden state", baseline, BASELINE))
    for name, values, colour in series:
        steps = [str(k + 1) for k in range(len(values))]
        figure.add_bar(
            x=steps,
            y=values,
            name=name,
            marker_color=colour,
            text=[f"{v:.0%}" for v in values],
            textposition="outside",
            hovertemplate="step %{x}: %{y:.1%}<extra>" + name + "</extra>",
        )
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return styled(figure, title, "draft step", "share of rounds that accepted it")


def arms_bars(metrics: dict[str, Any]) -> go.Figure:
    """Tokens per second of every arm and set; whiskers span the repeats."""
    figure = go.Figure()
    arms = list(dict.fromkeys(line["arm"] for line in metrics["arms"]))
    for arm in arms:
        lines = [line for line in metrics["arms"] if line["arm"] == arm]
        speeds = [line["tokens_per_s"] for line in lines]
        up = [max(line["repeat_tokens_per_s"]) - s for line, s in zip(lines, speeds, strict=True)]
        down = [s - min(line["repeat_tokens_per_s"]) for line, s in zip(lines, speeds, strict=True)]
        figure.add_bar(
            x=[line["set"] for line in lines],
            y=speeds,
            name=arm,
            marker_color=ARM_COLOURS.get(arm, PURPLE),
            text=[f"{s:.1f}" for s in speeds],
            textposition="inside",
            insidetextanchor="middle",
            error_y={"type": "data", "array": up, "arrayminus": down},
        )
    title = f"Speed of the arms ({load_words(metrics)})"
    return styled(figure, title, "prompt set", "tokens per second, one reader")


def load_words(metrics: dict[str, Any]) -> str:
    """How many requests of the headline were in flight; benchmarks of before told none: one."""
    load = metrics.get("concurrency", 1)
    return "one request at a time" if load == 1 else f"{load} requests in flight"


def training_curves(rows: list[dict[str, Any]]) -> go.Figure:
    """Loss of each training-time-test step over the updates."""
    updates = [r for r in rows if r["kind"] == "train"]
    figure = go.Figure()
    steps = max((len(r["steps"]) for r in updates), default=0)
    for k in range(steps):
        shade = 0.35 + 0.65 * (1 - k / max(steps, 1))
        figure.add_scatter(
            x=[r["update"] for r in updates],
            y=[r["steps"][k]["loss"] for r in updates],
            name=f"step {k + 1}",
            mode="lines",
            opacity=shade,
            line={"color": BLUE, "width": 2 if k == 0 else 1},
        )
    return styled(figure, "Training loss per step", "update", "loss (nats)")


def heldout_curves(rows: list[dict[str, Any]]) -> go.Figure:
    """Simulated acceptance length on held-out answers over the epochs, with the n-gram
    baselines."""
    found = [r for r in rows if r["kind"] == "evaluation"]
    figure = go.Figure()
    for name, colour in SET_COLOURS.items():
        points = [
            (r["epoch"], r["sets"][name]["acceptance_length"]) for r in found if name in r["sets"]
        ]
        if points:
            figure.add_scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                name=name,
                mode="lines+markers",
                line={"color": colour},
            )
    for name, counts in (found[0].get("baselines", {}) if found else {}).items():
        if name.endswith("_workload"):
            figure.add_hline(
                y=counts["acceptance_length"],
                line={"color": BASELINE, "dash": "dot"},
                annotation_text=name.removesuffix("_workload"),
            )
    return styled(figure, "Held-out acceptance length (simulated)", "epoch", "tokens a round")


class LiveCurves:
    """A figure in a notebook that follows the training: one output, replaced as rows arrive."""

    def __init__(self, every_s: float = 5.0):
        self._handle: Any = None
        self._every_s, self._drawn_s, self._drawn_rows = every_s, 0.0, 0

    def __call__(self, rows: list[dict[str, Any]], *, last: bool = False) -> None:
        due = last or time.monotonic() - self._drawn_s >= self._every_s
        if not due or len(rows) == self._drawn_rows:
            return
        # The bare MIME bundle: a Figure object displays itself anew instead of updating.
        bundle = {_PLOTLY_MIME: json.loads(training_curves(rows).to_json())}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
        self._drawn_s, self._drawn_rows = time.monotonic(), len(rows)


def round_agreement(answers: list[Any]) -> go.Figure:
    """Engine against simulator, one row an answer and one cell a round: equal, cut, or parted."""
    longest = max((len(a.round_pairs()) for a in answers), default=0)
    cells, texts = [], []
    for answer in answers:
        pairs = answer.round_pairs()
        line = [0.5 if cut else float(theirs == ours) for theirs, ours, cut in pairs]
        text = [
            f"engine {theirs}, simulator {ours}" + (", cut" if cut else "")
            for theirs, ours, cut in pairs
        ]
        cells.append(line + [None] * (longest - len(line)))
        texts.append(text + [""] * (longest - len(text)))
    figure = go.Figure(
        go.Heatmap(
            z=cells,
            text=texts,
            hovertemplate="answer %{y}, round %{x}: %{text}<extra></extra>",
            colorscale=[[0, "#D55E00"], [0.5, ORANGE], [1, "#bcd7ea"]],
            zmin=0,
            zmax=1,
            showscale=False,
            xgap=1,
            ygap=1,
        )
    )
    title = "Rounds: equal (blue), cut last round (orange), parted (red)"
    return styled(figure, title, "round", "answer", height=120 + 18 * len(answers))
