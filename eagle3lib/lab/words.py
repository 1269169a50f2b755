"""Sizes, times and intervals as people read them, in one way everywhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def size_text(count: float) -> str:
    """Bytes in decimal units: ``828.0 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration_text(seconds: float) -> str:
    """Seconds as ``m:ss``, from an hour on ``h:mm:ss``, from two days on ``3 d 4:05:06``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24) if hours >= 48 else (0, hours)
    clock = f"{hours}:{minutes:02d}:{rest:02d}" if hours or days else f"{minutes}:{rest:02d}"
    return f"{days} d {clock}" if days else clock


def interval_text(speedup: dict[str, Any]) -> str:
    """The 95 % interval of a speed-up."""
    if speedup["low"] is None:
        return "too few prompts"
    return f"{speedup['low']:.2f} to {speedup['high']:.2f}"


def known_text(value: float | None, places: int = 2, unit: str = "") -> str:
    """A number with its unit; a word where it is None."""
    return "unknown" if value is None else f"{value:.{places}f}{unit}"


def time_text(iso: str) -> str:
    """A UTC time of a manifest or journal, to the minute; "" stays empty."""
    return iso[:16].replace("T", " ") + " UTC" if iso else ""


def now_text() -> str:
    return time_text(datetime.now(UTC).isoformat())
