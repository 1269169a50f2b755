"""A figure in a sentence with its numbers: for who hears a page, and where none can be drawn."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import plotly.graph_objects as go

_MOST_SERIES = 8  # more are counted, not read out


def describe_figure(figure: go.Figure | dict[str, Any]) -> str:
    """Title, axis, and every series with its ends; the range of a table of colours.

    A figure as a notebook keeps it, with numpy's arrays packed, is told as well as plotly's own.
    """
    shown = go.Figure(figure, skip_invalid=True) if isinstance(figure, dict) else figure
    told = [words for trace in shown.data if (words := _series(trace))]
    title, axis = shown.layout.title.text, shown.layout.yaxis.title.text
    head = ", ".join(_plain(text) for text in (title, axis) if text)
    more = len(told) - _MOST_SERIES
    told = told[:_MOST_SERIES] + ([f"and {more} more"] if more > 0 else [])
    return f"{head or 'A figure'}. " + "; ".join(told)


def _series(trace: Any) -> str:
    if getattr(trace, "z", None) is not None:
        return _colours(trace)
    places, values = getattr(trace, "x", None), getattr(trace, "y", None)
    if getattr(trace, "orientation", None) == "h":
        places, values = values, places
    if places is None or values is None:
        return ""
    points = [
        (place, value)
        for place, value in zip(_unpacked(places), _unpacked(values), strict=False)
        if value is not None and value == value  # neither a gap nor a nan
    ]
    ends = points[:1] if len(points) == 1 else [*points[:1], *points[-1:]]
    if not ends:
        return ""
    name = f"{_plain(trace.name)}: " if trace.name else ""
    return name + " to ".join(f"{_number(value)} at {_number(place)}" for place, value in ends)


def _colours(trace: Any) -> str:
    cells = np.asarray([list(_unpacked(row)) for row in _unpacked(trace.z)], dtype=float)
    known = cells[np.isfinite(cells)]
    if not known.size:
        return ""
    rows, columns = cells.shape
    name = f"{_plain(trace.name)}: " if trace.name else ""
    return f"{name}{rows} rows of {columns}, from {_number(known.min())} to {_number(known.max())}"


def _unpacked(values: Any) -> Any:
    """plotly packs numpy's arrays as ``{"dtype", "bdata"[, "shape"]}``."""
    if not isinstance(values, dict):
        return values
    from base64 import b64decode

    flat = np.frombuffer(b64decode(values["bdata"]), dtype=values["dtype"])
    shape = str(values.get("shape", flat.size))
    return flat.reshape([int(part) for part in shape.split(",")]).tolist()


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return _plain(str(value))
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _plain(text: str) -> str:
    return re.sub(r"<[^>]+>", " ", text).strip()
