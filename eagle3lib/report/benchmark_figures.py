"""Figures of the benchmark's sweeps: speed over load, acceptance and cost over K, arrival."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eagle3lib.measure.arms import OWN, PLAIN
from eagle3lib.report.style import ARM_COLOURS, BLUE, GREEN, GREY, ORANGE, styled

_LENGTH, _COST, _EVEN = BLUE, ORANGE, GREY
_DASHES = {"vllm": "solid", "sglang": "dash"}


def load_curves(metrics: dict[str, Any], set_name: str = "workload") -> go.Figure:
    """Tokens per second of the whole machine over requests in flight; one line an arm, engine and
    K. One concurrency gives points."""
    figure = go.Figure()
    lines = [p for p in _plain_points(metrics, set_name) if not _repeated_baseline(p, metrics)]
    keys = dict.fromkeys((p["engine"], p["arm"], p["num_speculative_tokens"]) for p in lines)
    for engine, arm, steps in keys:
        mine = [
            p
            for p in lines
            if (p["engine"], p["arm"], p["num_speculative_tokens"]) == (engine, arm, steps)
        ]
        mine.sort(key=lambda p: p["concurrency"])
        name = f"{engine}, {arm}" + (f", K={steps}" if steps else "")
        figure.add_scatter(
            x=[p["concurrency"] for p in mine],
            y=[p["throughput_tokens_per_s"] for p in mine],
            name=name,
            mode="lines+markers",
            line={"color": ARM_COLOURS[arm], "dash": _DASHES[engine]},
            hovertemplate="%{x} in flight: %{y:.1f} tok/s<extra>" + name + "</extra>",
        )
    figure.update_xaxes(type="log", dtick="L1" if len(_loads(lines)) < 2 else None)
    return styled(
        figure, "Speed under load", "requests in flight", "tokens per second, all readers"
    )


def pays_curves(metrics: dict[str, Any], set_name: str = "workload") -> go.Figure:
    """Acceptance length against the cost of a round over K, one panel a concurrency: the drafter
    pays where the length is above the cost."""
    lines = [p for p in _plain_points(metrics, set_name) if p["arm"] == OWN and p["speedup"]]
    loads = _loads(lines) or [1]
    figure = make_subplots(
        cols=len(loads), subplot_titles=[f"{n} in flight" for n in loads], shared_yaxes=True
    )
    for column, load in enumerate(loads, start=1):
        mine = [p for p in lines if p["concurrency"] == load]
        mine.sort(key=lambda p: p["num_speculative_tokens"])
        steps = [p["num_speculative_tokens"] for p in mine]
        series = (
            ("acceptance length", [p["acceptance"]["acceptance_length"] for p in mine], _LENGTH),
            ("cost of a round, plain steps", [p["round_cost"] for p in mine], _COST),
        )
        for name, values, colour in series:
            figure.add_scatter(
                x=steps,
                y=values,
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                mode="lines+markers",
                line={"color": colour},
                hovertemplate="K=%{x}: %{y:.2f}<extra>" + name + "</extra>",
                row=1,
                col=column,
            )
    figure = styled(
        figure, "Where speculation pays", "drafted per round (K)", "tokens, plain steps"
    )
    return figure.update_xaxes(dtick=1).update_layout(legend_y=1.1, margin_t=80)


def arrival_bars(metrics: dict[str, Any], set_name: str = "workload") -> go.Figure:
    """First token and wait between tokens of the headline's arms: median, whisker to the 99th
    percentile."""
    figure = make_subplots(cols=2, subplot_titles=("first token", "between tokens"))
    lines = [line for line in metrics["arms"] if line["set"] == set_name]
    for column, name in enumerate(("first_token_s", "inter_token_s"), start=1):
        known = [line for line in lines if line.get(name)]
        p50 = [1000 * line[name]["p50"] for line in known]
        p99 = [1000 * line[name]["p99"] for line in known]
        figure.add_bar(
            x=[line["arm"] for line in known],
            y=p50,
            marker_color=[ARM_COLOURS[line["arm"]] for line in known],
            error_y={
                "type": "data",
                "array": [b - a for a, b in zip(p50, p99, strict=True)],
                "symmetric": False,
                "arrayminus": [0] * len(p50),
            },
            hovertemplate="%{x}: median %{y:.1f} ms<extra></extra>",
            showlegend=False,
            row=1,
            col=column,
        )
    figure = styled(figure, "When tokens arrive (median, whisker to p99)", "", "milliseconds", 340)
    return figure.update_layout(margin_t=80)


def along_curves(metrics: dict[str, Any], along: str, set_name: str = "workload") -> go.Figure:
    """Acceptance length, cost of a round and speed-up of our drafter along ``context_tokens`` or
    ``temperature``, at the headline's K and load; the headline is one of the points."""
    other = "temperature" if along == "context_tokens" else "context_tokens"
    head = {
        "num_speculative_tokens": metrics["num_speculative_tokens"],
        "concurrency": metrics["concurrency"],
        other: metrics["temperature"] if other == "temperature" else 0,
    }
    figure = go.Figure()
    series = (
        ("acceptance length", _LENGTH, lambda p: p["acceptance"]["acceptance_length"]),
        ("cost of a round, plain steps", _COST, lambda p: p["round_cost"]),
        ("speed-up", ARM_COLOURS[OWN], lambda p: (p["speedup"] or {}).get("value")),
    )
    for engine in dict.fromkeys(p["engine"] for p in metrics["points"]):
        mine = [
            p
            for p in metrics["points"]
            if (p["engine"], p["arm"], p["set"]) == (engine, OWN, set_name)
            and all(p[name] == value for name, value in head.items())
        ]
        # A prompt as it is has a length too: the mean of what the server counted.
        at = [
            p["prompt_tokens"] / p["requests"] if along == "context_tokens" else p[along]
            for p in mine
        ]
        order = sorted(range(len(mine)), key=at.__getitem__)
        for name, colour, value in series:
            figure.add_scatter(
                x=[at[i] for i in order],
                y=[value(mine[i]) for i in order],
                name=f"{engine}, {name}",
                mode="lines+markers",
                line={"color": colour, "dash": _DASHES[engine]},
                hovertemplate="%{x:.4g}: %{y:.2f}<extra>" + f"{engine}, {name}</extra>",
            )
    words = {"context_tokens": "prompt tokens (mean)", "temperature": "temperature"}
    title = "Along the context" if along == "context_tokens" else "Along the temperature"
    return styled(figure, title, words[along], "tokens, plain steps, times")


def sweep_curves(metrics: dict[str, Any]) -> list[go.Figure]:
    """A figure for each of context and temperature that was swept; none in the demo."""
    values = {
        name: {p[name] for p in metrics["points"]} for name in ("context_tokens", "temperature")
    }
    return [along_curves(metrics, name) for name, found in values.items() if len(found) > 1]


def outside_bars(metrics: dict[str, Any]) -> list[go.Figure]:
    """Tokens per second of each arm by our client and by ``vllm bench serve``; none without it."""
    lines = metrics["outside"]
    if not lines:
        return []
    name = "tokens_per_s" if metrics["concurrency"] == 1 else "throughput_tokens_per_s"
    figure = go.Figure()
    for client, colour in zip(
        dict.fromkeys(p["client"] for p in lines), (GREEN, GREY), strict=True
    ):
        mine = [p for p in lines if p["client"] == client]
        figure.add_bar(
            x=[p["arm"] for p in mine],
            y=[p[name] for p in mine],
            name=client,
            marker_color=colour,
            hovertemplate="%{x}: %{y:.1f} tok/s<extra>" + client + "</extra>",
        )
    return [
        styled(figure, "Two clients, the same servers and prompts", "", "tokens per second", 340)
    ]


def _plain_points(metrics: dict[str, Any], set_name: str) -> list[dict[str, Any]]:
    """The crossing of K and concurrency, without the sweeps of temperature and context."""
    return [
        p
        for p in metrics["points"]
        if p["set"] == set_name
        and p["temperature"] == metrics["temperature"]
        and not p["context_tokens"]
    ]


def _repeated_baseline(line: dict[str, Any], metrics: dict[str, Any]) -> bool:
    """The engine alone is measured again beside each K; its first curve is enough to see."""
    return line["arm"] == PLAIN and line["compared_with_k"] != metrics["num_speculative_tokens"]


def _loads(lines: list[dict[str, Any]]) -> list[int]:
    return sorted({p["concurrency"] for p in lines})
