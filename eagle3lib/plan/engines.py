"""Which installed engine serves a target with EAGLE-3: asked of the engine itself, in a child.

Lists in documents go out of date; an engine's registry is what will decide when it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3lib.engine.ask import DEADLINE_S, ask_installed
from eagle3lib.engine.config import PYTHON_VARIABLE, Engine
from eagle3lib.lab.finding import Finding

SGLANG_PYTHON = PYTHON_VARIABLE["sglang"]
_SCRIPT = Path(__file__).with_name("ask_engine.py")


def ask_engines(architecture: str, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """One line an engine: version, whether it knows the architecture, whether with EAGLE-3, and a
    verdict in words."""
    return [_ask(engine, architecture, deadline_s) for engine in PYTHON_VARIABLE]


def _ask(engine: Engine, architecture: str, deadline_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {"engine": engine, "version": None, "known": None, "eagle3": None}
    reply = ask_installed(engine, _SCRIPT, architecture, offline=False, deadline_s=deadline_s)
    if reply.why_not:
        return line | {"verdict": reply.why_not}
    line |= reply.said
    return line | {"verdict": _verdict(line)}


def _verdict(line: dict[str, Any]) -> str:
    if line["version"] is None:
        return "not installed"
    if not line["known"]:
        return "does not know this architecture"
    return "serves it with EAGLE-3" if line["eagle3"] else "serves it, but not with EAGLE-3"


def check_engines(
    engines: Sequence[dict[str, Any]], architecture: str, *, here: bool
) -> list[Finding]:
    """An error when what is installed can't serve the target with EAGLE-3; where nothing is
    installed, an error only if this machine is the one that is to serve (``here``)."""
    if any(line["eagle3"] for line in engines):
        return []
    installed = [line for line in engines if line["version"] is not None]
    evidence = "; ".join(f"{line['engine']}: {line['verdict']}" for line in engines)
    if not installed:
        return [
            Finding(
                "engine",
                "error" if here else "warning",
                "no engine was found that could be asked",
                evidence,
                f"make setup; or name SGLang's Python in {SGLANG_PYTHON}",
                "00_plan",
            )
        ]
    return [
        Finding(
            "engine-support",
            "error",
            f"no installed engine serves {architecture} with EAGLE-3",
            evidence,
            "a newer engine, or another target",
            "00_plan",
        )
    ]
