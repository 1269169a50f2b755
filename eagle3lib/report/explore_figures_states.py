"""Figures of the hidden-state explorer: what every layer's state is like, and which slots count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from eagle3lib.measure.compare import acceptance_length, bootstrap
from eagle3lib.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SET_COLOURS,
    VERMILION,
    nothing_drawn,
    styled,
)
from eagle3lib.target.layer_stats import LayerStates, Lens, Outliers

_LAYER = "state before layer (last: before the final norm)"
# Light is little in every figure: one hue, so that it reads in grey and by the colour-blind.
_BLUES = [[0, "#f7fbff"], [0.5, "#6baed6"], [1, "#08306b"]]
_BASELINE_DASHES = {"unigram": "dot", "bigram": "dash"}


def size_curves(lines: list[dict[str, Any]], slots: Sequence[int]) -> go.Figure:
    """Root mean square of the states over layers: answer positions, and first tokens."""
    names = [line["layer"] for line in lines]
    figure = go.Figure()
    for key in ("p95", "p5"):
        figure.add_scatter(
            x=names, y=[line[key] for line in lines], mode="lines", line={"width": 0},
            fill="tonexty" if key == "p5" else None, fillcolor="rgba(0,114,178,0.2)",
            name="5 to 95 % of answer positions", showlegend=key == "p5", hoverinfo="skip",
        )  # fmt: skip
    figure.add_scatter(
        x=names,
        y=[line["p50"] for line in lines],
        customdata=[[line["p5"], line["p95"], line["positions"]] for line in lines],
        name="answer positions, median",
        mode="lines+markers",
        line={"color": BLUE},
        hovertemplate="layer %{x}: %{y:.3g} (5 %: %{customdata[0]:.3g}, 95 %: %{customdata[1]:.3g},"
        " %{customdata[2]:,} positions)<extra></extra>",
    )
    figure.add_scatter(
        x=names,
        y=[line["first_token"] for line in lines],
        name="first token of the prompt",
        mode="lines+markers",
        line={"color": ORANGE, "dash": "dash"},
        hovertemplate="layer %{x}: %{y:.3g}<extra>first token</extra>",
    )
    figure.update_yaxes(type="log")
    _mark_slots(figure, names, slots)
    return _below(styled(figure, "Size of the states", _LAYER, "root mean square"))


def outlier_map(found: LayerStates, outliers: Outliers) -> go.Figure:
    """The most extreme dimensions, layer by layer: how many times the median dimension's size."""
    names = [found.name(i) for i in range(len(found.layers))]
    ratio = outliers.ratio.T
    figure = go.Figure(
        go.Heatmap(
            x=names,
            y=[f"dim {d}" for d in outliers.dimensions.tolist()],
            z=ratio.clamp_min(1e-3).log10().tolist(),
            customdata=[
                list(zip(a, b, strict=True))
                for a, b in zip(ratio.tolist(), outliers.energy.T.tolist(), strict=True)
            ],
            colorscale=_BLUES,
            zmin=0,
            xgap=1,
            ygap=1,
            colorbar={
                "title": {"text": "times the<br>median"},
                "tickvals": [0, 1, 2, 3],
                "ticktext": ["1", "10", "100", "1000"],
            },
            hovertemplate="layer %{x}, %{y}: %{customdata[0]:.1f} times the median dimension, "
            "%{customdata[1]:.1%} of the sum of squares<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(type="category")
    title = f"Outlier dimensions ({found.states.shape[1]:,} answer positions)"
    return styled(figure, title, _LAYER, "", 120 + 24 * len(outliers.dimensions))


def lens_curves(lines: list[dict[str, Any]], slots: Sequence[int]) -> go.Figure:
    """How early the target knows: its head over every layer's state, against its final say."""
    figure = make_subplots(
        rows=2,
        shared_xaxes=True,
        subplot_titles=("first choice is the next token", "distance from the final distribution"),
        vertical_spacing=0.12,
    )
    names = [line["layer"] for line in lines]
    counts = [[line["right"], line["positions"]] for line in lines]
    figure.add_scatter(
        x=names, y=[a / b for a, b in counts], customdata=counts, mode="lines+markers",
        line={"color": BLUE}, showlegend=False, row=1, col=1,
        hovertemplate="layer %{x}: %{customdata[0]:,} of %{customdata[1]:,}, %{y:.1%}"
        "<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=names, y=[line["divergence"] for line in lines], mode="lines+markers",
        customdata=[[line["entropy"], line["positions"]] for line in lines],
        line={"color": PURPLE}, showlegend=False, row=2, col=1,
        hovertemplate="layer %{x}: %{y:.2f} nats, entropy %{customdata[0]:.2f} nats, "
        "%{customdata[1]:,} positions<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    title = "Logit lens: the target's own head over every layer"
    figure = styled(figure, title, _LAYER, "share", 560)
    figure.update_xaxes(title="", row=1, col=1)
    figure.update_yaxes(title="KL divergence, nats", rangemode="tozero", row=2, col=1)
    for row in (1, 2):
        _mark_slots(figure, names, slots, row=row, col=1)
    return figure.update_layout(margin_t=80)


def lens_reading(
    found: LayerStates, lens: Lens, decode: Callable[[list[int]], str], titles: Sequence[str]
) -> go.Figure:
    """What every layer would say at the first positions of an answer; a menu picks the answer."""
    figure = go.Figure()
    names = [found.name(i) for i in range(len(found.layers))]
    rows = list(dict.fromkeys(found.row.tolist()))
    for row in rows:
        at = (found.row == row).nonzero()[:, 0]
        words = [[_word(decode, token) for token in line] for line in lens.choice[:, at].tolist()]
        truth = [_word(decode, token) for token in found.next_ids[at].tolist()]
        figure.add_heatmap(
            x=list(range(len(at))),
            y=names,
            z=lens.choice_log_prob[:, at].exp().tolist(),
            text=words,
            customdata=[truth] * len(names),
            texttemplate="%{text}",
            textfont={"size": 10},
            colorscale=_BLUES,
            zmin=0,
            zmax=1,
            xgap=1,
            ygap=1,
            visible=row == rows[0],
            colorbar={"title": {"text": "probability"}, "tickformat": ".0%"},
            hovertemplate="layer %{y} says %{text} (%{z:.0%}); the answer goes on with "
            "%{customdata}<extra></extra>",
        )
    ticks = [_axis_words(found, row, decode) for row in rows]
    menu = [
        {
            "label": title,
            "method": "update",
            "args": [{"visible": [i == j for j in range(len(rows))]}, {"xaxis.ticktext": words}],
        }
        for i, (title, words) in enumerate(zip(titles, ticks, strict=True))
    ]
    longest = max(map(len, ticks))
    figure.update_xaxes(tickvals=list(range(longest)), ticktext=ticks[0], tickangle=-50)
    figure = styled(
        figure, "What each layer would say next", "the token that really comes next", "layer",
        140 + 20 * len(names),
    )  # fmt: skip
    figure.update_yaxes(type="category")
    figure.update_layout(meta={"least_width": 240 + 40 * longest})
    return _menu(figure, menu, "dropdown")


def similarity_maps(found: LayerStates, maps: dict[str, Float[Tensor, "L L"]]) -> go.Figure:
    """Likeness of layers, one map at a time: buttons choose the measure."""
    names = [found.name(i) for i in range(len(found.layers))]
    figure = go.Figure()
    for number, (name, values) in enumerate(maps.items()):
        figure.add_heatmap(
            x=names,
            y=names,
            z=values.tolist(),
            colorscale=_BLUES,
            zmin=0,
            zmax=1,
            visible=number == 0,
            colorbar={"title": {"text": name}},
            hovertemplate="layers %{x} and %{y}: %{z:.3f}<extra>" + name + "</extra>",
        )
    menu = [
        {"label": name, "method": "restyle", "args": ["visible", [n == name for n in maps]]}
        for name in maps
    ]
    title = f"Likeness of layers ({found.states.shape[1]:,} positions)"
    figure = styled(figure, title, _LAYER, "state before layer", 520)
    figure.update_xaxes(type="category", constrain="domain")
    figure.update_yaxes(type="category", scaleanchor="x", constrain="domain")
    return _menu(figure, menu, "buttons")


def correlation_curves(lines: list[dict[str, Any]], slots: Sequence[int]) -> go.Figure:
    """Rank correlation of accepted drafts with what each layer shows at the same position."""
    names, figure = [line["layer"] for line in lines], go.Figure()
    shown = [key for key in lines[0] if key not in ("layer", "positions")]
    for key, colour in zip(shown, (GREY, BLUE, GREEN, VERMILION), strict=True):
        figure.add_scatter(
            x=names,
            y=[line[key] for line in lines],
            name=key,
            mode="lines+markers",
            line={"color": colour},
            customdata=[line["positions"] for line in lines],
            hovertemplate="layer %{x}: %{y:+.2f}, %{customdata:,} positions<extra>"
            + key + "</extra>",
        )  # fmt: skip
    # What independent positions would give by chance; those of one answer are not independent.
    chance = 1.96 / lines[0]["positions"] ** 0.5
    figure.add_hrect(y0=-chance, y1=chance, fillcolor=PALE, opacity=0.4, line_width=0)
    figure.add_hline(y=0, line={"color": GREY, "width": 1})
    _mark_slots(figure, names, slots)
    return _below(
        styled(
            figure, "Where acceptance goes with the state (grey: chance)", _LAYER,
            "rank correlation with accepted drafts", 420,
        )
    )  # fmt: skip


def knock_out_bars(lines: list[dict[str, Any]]) -> go.Figure:
    """The trained drafter without a slot, with one slot alone and with none; whiskers are the 95 %
    interval of the difference from it as trained, over the same conversations."""
    whole = lines[0]["acceptance_length"]
    longest = max(line["acceptance_length"] for line in lines)
    changes = [_change(line, lines[0]) for line in lines]
    figure = go.Figure(
        go.Bar(
            y=[line["slots"] for line in lines],
            x=[line["acceptance_length"] for line in lines],
            orientation="h",
            marker_color=[BLUE if line is lines[0] else GREY for line in lines],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [high - at for at, _, high in changes],
                "arrayminus": [at - low for at, low, _ in changes],
                "color": ORANGE,
            },
            customdata=[
                [line["accepted"], line["rounds"], _change_words(change, line)]
                for line, change in zip(lines, changes, strict=True)
            ],
            hovertemplate="%{y}: %{x:.3f}, %{customdata[0]:,} accepted in %{customdata[1]:,} rounds"
            "<br>%{customdata[2]}<extra></extra>",
        )
    )
    figure.add_vline(x=whole, line={"color": BLUE, "dash": "dot"})
    most = max([longest, *(whole + high for _, _, high in changes)])
    figure.update_xaxes(range=[1, 1 + 1.1 * (most - 1) if most > 1 else 2])
    # The lengths stand with the names: at the ends of the bars there are whiskers.
    names = [f"{line['slots']}: {line['acceptance_length']:.2f}" for line in lines]
    figure.update_yaxes(
        autorange="reversed", type="category", tickvals=[x["slots"] for x in lines], ticktext=names
    )
    title = "The trained drafter without a slot's information"
    label = "acceptance length, tokens a round (simulated)"
    return styled(figure, title, label, "slots", 120 + 32 * len(lines))


def _change(line: dict[str, Any], whole: dict[str, Any]) -> tuple[float, float, float]:
    """(difference, low, high) of the acceptance length from ``whole``'s, paired over conversations;
    without an interval where they are too few."""
    both = np.array([(*a, *b) for a, b in zip(whole["conversations"], line["conversations"],
                                              strict=True)], dtype=float)  # fmt: skip

    def difference(sums: np.ndarray) -> np.ndarray:
        return acceptance_length(sums[..., 2:]) - acceptance_length(sums[..., :2])

    at = float(difference(both.sum(0)))
    low, high = bootstrap(both, difference)
    return (at, at, at) if low is None or high is None else (at, low, high)


def _change_words(change: tuple[float, float, float], line: dict[str, Any]) -> str:
    at, low, high = change
    of = f"{len(line['conversations'])} conversations"
    if low == high:
        return f"{at:+.3f} from as trained, {of}"
    return f"{at:+.3f} from as trained ({low:+.3f} to {high:+.3f}, {of})"


def ablation_bars(lines: list[dict[str, Any]]) -> go.Figure:
    """Short trainings on other slots, beside what sees no state."""
    if not lines:
        return nothing_drawn("No other slots were trained on: ablation_epochs=2 does so")
    figure = go.Figure()
    for set_name, colour in SET_COLOURS.items():
        mine = [line for line in lines if line["set"] == set_name]
        if not mine:
            continue
        figure.add_bar(
            x=[line["slots"] for line in mine],
            y=[line["acceptance_length"] for line in mine],
            name=set_name,
            marker_color=colour,
            text=[f"{line['acceptance_length']:.2f}" for line in mine],
            textposition="outside",
            customdata=[[x["accepted"], x["rounds"], x["tokens seen"]] for x in mine],
            hovertemplate="slots %{x}: %{y:.3f}, %{customdata[0]:,} accepted in %{customdata[1]:,} "
            "rounds, %{customdata[2]:,} tokens seen<extra>" + set_name + "</extra>",
        )
        for label, dash in _BASELINE_DASHES.items():
            figure.add_hline(
                y=mine[0][label], line={"color": colour, "dash": dash},
                annotation_text=f"{label}, {set_name}", annotation_font_size=11,
            )  # fmt: skip
    most = max(max(x["acceptance_length"], x["bigram"], x["unigram"]) for x in lines)
    figure.update_yaxes(range=[1, 1 + 1.2 * (most - 1) if most > 1 else 2])
    figure.update_xaxes(type="category")
    seen = lines[0]["tokens seen"]
    title = f"Short trainings on other slots, {seen:,} tokens each"
    return styled(figure, title, "slots", "held-out acceptance length (simulated)")


def _mark_slots(
    figure: go.Figure, names: Sequence[str], slots: Sequence[int], **where: int
) -> None:
    figure.update_xaxes(type="category")
    for slot in slots:
        if str(slot) in names:
            figure.add_vline(
                x=names.index(str(slot)), line={"color": GREY, "dash": "dot", "width": 1},
                annotation_text=f"slot {slot}", annotation_font_size=11, **where,
            )  # fmt: skip


def _below(figure: go.Figure) -> go.Figure:
    """A legend of long names stands below the title, from the left."""
    return figure.update_layout(legend={"x": 0, "xanchor": "left", "y": 1.06}, margin_t=110)


def _menu(figure: go.Figure, buttons: list[dict[str, Any]], kind: str) -> go.Figure:
    menu = {
        "type": kind, "direction": "down" if kind == "dropdown" else "right", "buttons": buttons,
        "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom", "pad": {"b": 4},
    }  # fmt: skip
    return figure.update_layout(updatemenus=[menu], margin_t=90)


def _word(decode: Callable[[list[int]], str], token: int) -> str:
    """A token as text whose spaces and line ends can be seen."""
    text = decode([token]).replace("\n", "⏎").replace(" ", "·").replace("\t", "⇥")
    return text.replace("<", "&lt;")[:10] or "∅"


def _axis_words(found: LayerStates, row: int, decode: Callable[[list[int]], str]) -> list[str]:
    return [_word(decode, token) for token in found.next_ids[found.row == row].tolist()]
