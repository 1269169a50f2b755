"""Every figure of the lab, drawn with plotly in one theme: readable in print, colour-blind safe.

Colours are Okabe and Ito's; a series keeps its colour in every figure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from IPython.display import display
from plotly.subplots import make_subplots

from eagle3lib.data.roles import ROLES, SCAFFOLDING, UNKNOWN
from eagle3lib.data.rows import AnswerRow

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#6e6e6e"
ENGINE, SIMULATOR, BASELINE, PLAIN_ARM = BLUE, ORANGE, GREY, GREY
_PLOTLY_MIME = "application/vnd.plotly.v1+json"
_SET_COLOURS = {"workload": BLUE, "general": GREEN}
SKY, VERMILION, PALE, YELLOW = "#56B4E9", "#D55E00", "#c9c9c9", "#F0E442"
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
_PARTS = (BLUE, PALE, GREEN, ORANGE, PURPLE, SKY, VERMILION, YELLOW)
_LEAST_LABELLED = 0.04  # share below which a part has no room for its number


def _styled(figure: go.Figure, title: str, x: str, y: str, height: int = 380) -> go.Figure:
    figure.update_layout(
        title={"text": title, "x": 0, "xanchor": "left", "font": {"size": 16}},
        template="plotly_white",
        height=height,
        margin={"l": 60, "r": 20, "t": 56, "b": 50},
        legend={"orientation": "h", "y": 1.02, "x": 1, "xanchor": "right", "yanchor": "bottom"},
        font={"family": "system-ui, sans-serif", "size": 13},
    )
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure


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
    return _styled(figure, title, "draft step", "share of rounds that accepted it")


def arms_bars(metrics: dict[str, Any]) -> go.Figure:
    """Tokens per second of every arm and set; whiskers span the repeats."""
    figure = go.Figure()
    arms = list(dict.fromkeys(line["arm"] for line in metrics["arms"]))
    palette = dict(zip(arms, (GREY, BLUE, GREEN, PURPLE), strict=False))
    for arm in arms:
        lines = [line for line in metrics["arms"] if line["arm"] == arm]
        speeds = [line["tokens_per_s"] for line in lines]
        up = [max(line["repeat_tokens_per_s"]) - s for line, s in zip(lines, speeds, strict=True)]
        down = [s - min(line["repeat_tokens_per_s"]) for line, s in zip(lines, speeds, strict=True)]
        figure.add_bar(
            x=[line["set"] for line in lines],
            y=speeds,
            name=arm,
            marker_color=palette[arm],
            text=[f"{s:.1f}" for s in speeds],
            textposition="inside",
            insidetextanchor="middle",
            error_y={"type": "data", "array": up, "arrayminus": down},
        )
    return _styled(
        figure, "Speed of the arms (one request at a time)", "prompt set", "tokens per second"
    )


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
    return _styled(figure, "Training loss per step", "update", "cross-entropy (nats)")


def heldout_curves(rows: list[dict[str, Any]]) -> go.Figure:
    """Simulated acceptance length on held-out answers over the epochs, with the n-gram
    baselines."""
    found = [r for r in rows if r["kind"] == "evaluation"]
    figure = go.Figure()
    for name, colour in _SET_COLOURS.items():
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
    return _styled(figure, "Held-out acceptance length (simulated)", "epoch", "tokens a round")


def coverage_figure(curve: pd.DataFrame, chosen: int) -> go.Figure:
    """Held-out coverage by size of the draft vocabulary."""
    figure = go.Figure()
    for name, part in curve.groupby("set"):
        figure.add_scatter(
            x=part.draft_vocab_size,
            y=part.coverage,
            name=str(name),
            mode="lines+markers",
            line={"color": _SET_COLOURS.get(str(name), GREY)},
        )
    figure.add_vline(x=chosen, line={"color": ORANGE, "dash": "dash"}, annotation_text="chosen")
    figure.update_xaxes(type="log")
    figure.update_yaxes(tickformat=".0%")
    return _styled(
        figure, "Held-out answer tokens inside the draft vocabulary", "draft vocabulary", "coverage"
    )


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
                marker_color=_SET_COLOURS.get(name.split()[0], GREY),
                row=1,
                col=column,
            )
    figure.update_layout(barmode="overlay")
    figure = _styled(figure, "Lengths", "tokens", "rows")
    # Above the panels' own titles.
    return figure.update_layout(legend_y=1.1, margin_t=80)


def share_bars(counts: dict[str, dict[str, int]], title: str, unit: str) -> go.Figure:
    """What each set is made of: one bar a set, its parts as shares of all that it holds.

    ``counts``: set -> part -> count. Parts keep the order in which they come first.
    """
    parts = list(dict.fromkeys(part for count in counts.values() for part in count))
    parts.sort(key=lambda part: ROLES.index(part) if part in ROLES else len(ROLES))
    spare = iter(_PARTS)
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
            text=[f"{share:.0%}" if share >= _LEAST_LABELLED else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{y}}, {part}: %{{customdata:,}} {unit}, %{{x:.1%}}<extra></extra>",
        )
    figure.update_layout(barmode="stack", legend_traceorder="normal")
    figure.update_xaxes(range=[0, 1], tickformat=".0%")
    figure = _styled(figure, title, f"share of {unit}", "", 190 + 50 * len(counts))
    # The parts are many: their legend stands below the title, not beside it.
    return figure.update_layout(legend={"x": 0, "xanchor": "left"}, margin_t=90)


def state_norms(norms: pd.DataFrame) -> go.Figure:
    """Distribution of the states' root mean square by slot."""
    figure = go.Figure()
    for name, part in norms.groupby("state", sort=False):
        figure.add_box(y=part.rms, name=str(name), marker_color=BLUE, showlegend=False)
    figure.update_yaxes(type="log")
    return _styled(figure, "Size of the captured states", "state", "root mean square")


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
    return _styled(figure, title, "round", "answer", height=120 + 18 * len(answers))


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
    figure = _styled(figure, "Commonest word runs", "share of answers", "", 120 + 22 * len(lines))
    return figure.update_yaxes(automargin=True)


def step_parts_bars(lines: list[dict[str, Any]]) -> go.Figure:
    """What a plain step and a round spend their time on, by batch size (plan/step.py)."""
    colours = {
        "weights": BLUE,
        "experts": "#56B4E9",
        "keys and values": GREEN,
        "compute": PURPLE,
        "collectives": ORANGE,
        "layers": "#999999",
        "host": GREY,
        "drafter": "#D55E00",
    }
    rows = lines[::-1]
    names = [f"{line['what']}, batch {line['batch']}" for line in rows]
    figure = go.Figure()
    for part, colour in colours.items():
        values = [line.get(part, 0.0) for line in rows]
        if any(values):
            figure.add_bar(
                x=values,
                y=names,
                name=part,
                orientation="h",
                marker_color=colour,
                hovertemplate="%{y}: %{x:.2f} ms<extra>" + part + "</extra>",
            )
    figure.update_layout(barmode="stack")
    title = "What a decode step is made of"
    figure = _styled(figure, title, "milliseconds (predicted)", "", 160 + 34 * len(rows))
    return figure.update_yaxes(automargin=True)


def break_even_curves(costs: list[dict[str, Any]]) -> go.Figure:
    """Acceptance length at which speculation pays, by K and batch size, under the one hoped for:
    a drafter pays where the dashed line is above the batch's own."""
    figure = go.Figure()
    batches = list(dict.fromkeys(line["batch"] for line in costs))
    palette = (BLUE, GREEN, PURPLE, "#D55E00", "#56B4E9")
    for number, batch in enumerate(batches):
        mine = [line for line in costs if line["batch"] == batch]
        figure.add_scatter(
            x=[line["K"] for line in mine],
            y=[line["round_cost"] for line in mine],
            name=f"batch {batch}",
            mode="lines+markers",
            line={"color": palette[number % len(palette)]},
            customdata=[line["speedup"] for line in mine],
            hovertemplate="K=%{x}: pays above %{y:.2f}, %{customdata:.2f}x<extra></extra>",
        )
    first = [line for line in costs if line["batch"] == batches[0]]
    figure.add_scatter(
        x=[line["K"] for line in first],
        y=[line["acceptance_length"] for line in first],
        name="hoped for",
        mode="lines",
        line={"color": ORANGE, "dash": "dash", "width": 3},
    )
    title = "From which acceptance length speculation pays"
    return _styled(figure, title, "K, drafted tokens per round", "tokens a round")
