"""The page of ``eagle3 profile``: a step beside a round, by what the time is spent on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io
from plotly.subplots import make_subplots

from eagle3lib.lab.files import write_text
from eagle3lib.measure.arms import PLAIN
from eagle3lib.measure.trace_kinds import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    DRAFTER,
    ELEMENTWISE,
    HOST,
    IDLE,
    KINDS,
    MATRIX,
    OTHER,
    SAMPLING,
)
from eagle3lib.report.html import page_template
from eagle3lib.report.style import (
    BLUE,
    GREEN,
    GREY,
    LEAST_LABELLED,
    LEGEND_BELOW,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    styled,
)

_BLACK = "#333333"
COLOURS = {
    MATRIX: BLUE, ATTENTION: ORANGE, ELEMENTWISE: SKY, SAMPLING: PURPLE, DRAFTER: GREEN,
    OTHER: VERMILION, COPIES: YELLOW, COLLECTIVES: _BLACK, HOST: GREY, IDLE: PALE,
}  # fmt: skip
_LIGHT = {SKY, YELLOW, PALE, ORANGE}  # take dark letters


def unit_of(arm: dict[str, Any]) -> str:
    return "decode step" if arm["arm"] == PLAIN else "round"


def profile_bars(profile: dict[str, Any]) -> go.Figure:
    """Stacked bars of a step and of a round: milliseconds, and shares of each; idle is shown."""
    panels = ("milliseconds", "share of the time")
    figure = make_subplots(1, 2, subplot_titles=panels, horizontal_spacing=0.12)
    arms = profile["arms"]
    names = [unit_of(arm) for arm in arms]
    for kind in KINDS:
        took = [arm["kinds"][kind] for arm in arms]
        if not any(took):
            continue
        shares = [t / arm["step_s"] for t, arm in zip(took, arms, strict=True)]
        for column, (values, shown) in enumerate(
            (([1000 * t for t in took], "{:.1f}"), (shares, "{:.0%}")), start=1
        ):
            figure.add_bar(
                x=names,
                y=values,
                name=kind,
                legendgroup=kind,
                showlegend=column == 1,
                marker_color=COLOURS[kind],
                text=[
                    shown.format(v) if share >= LEAST_LABELLED else ""
                    for v, share in zip(values, shares, strict=True)
                ],
                textposition="inside",
                insidetextanchor="middle",
                insidetextfont={"color": _BLACK if COLOURS[kind] in _LIGHT else "white"},
                hovertemplate=kind
                + (": %{y:.2f} ms" if column == 1 else ": %{y:.1%}")
                + "<extra>%{x}</extra>",
                row=1,
                col=column,
            )
    figure = styled(figure, "Where a decode step and a round spend their time", "", "ms", 480)
    figure.update_layout(barmode="stack", legend=LEGEND_BELOW, margin_t=80)
    return figure.update_yaxes(tickformat=".0%", range=[0, 1], title="", row=1, col=2)


def profile_rows(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """A line a kind: seconds and share in each arm, and what the round adds to the step."""
    arms = profile["arms"]
    rows = []
    for kind in (*KINDS, "all"):
        took = [arm["step_s"] if kind == "all" else arm["kinds"][kind] for arm in arms]
        if any(took):
            shares = [t / arm["step_s"] for t, arm in zip(took, arms, strict=True)]
            added = took[1] - took[0] if len(took) > 1 else None
            rows.append({"kind": kind, "seconds": took, "shares": shares, "added_s": added})
    return rows


def facts(profile: dict[str, Any]) -> list[str]:
    """What is to be read beside the figures: the profiler's price, the round's cost, notes."""
    told = []
    for arm in profile["arms"]:
        fast, slow = arm["unprofiled"]["step_s"], arm["profiled"]["step_s"]
        told.append(
            f"{arm['arm']}: {arm['steps']} steps of the trace; a {unit_of(arm)} takes "
            f"{1000 * fast:.2f} ms without the profiler, {1000 * slow:.2f} ms with it "
            f"({arm['slowdown']:.2f} times)"
        )
        told += [f"{arm['arm']}: {note}" for note in arm["notes"]]
    if profile["round_cost"] is not None:
        length = profile["arms"][1]["acceptance_length"]
        told.append(
            f"a round costs {profile['round_cost']:.2f} plain steps (both without the profiler); "
            f"acceptance length on these prompts {length:.2f}"
        )
    return told


def write_profile_page(profile: dict[str, Any], folder: Path) -> Path:
    """``index.html`` beside ``profile.json``: one file that needs no network."""
    figure = plotly.io.to_html(
        profile_bars(profile),
        include_plotlyjs=True,
        full_html=False,
        div_id="figure-profile",
        config={"displaylogo": False, "responsive": True},
    )
    html = page_template("profile.html.j2", {"ms": lambda s: f"{1000 * s:.3f}"}).render(
        profile=profile,
        figure=figure,
        rows=profile_rows(profile),
        facts=facts(profile),
        units=[unit_of(arm) for arm in profile["arms"]],
    )
    write_text(folder / "index.html", html)
    return folder / "index.html"
