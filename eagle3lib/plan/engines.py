"""Which installed engine serves a target with EAGLE-3: asked of the engine itself, in a child.

Lists in documents go out of date; an engine's registry is what will decide when it starts. Asking
takes the seconds that importing the engine takes (15 to 20 on two cores).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3lib.lab.child import Child
from eagle3lib.lab.finding import Finding

SGLANG_PYTHON = "EAGLE3_SGLANG_PYTHON"
DEADLINE_S = 180.0
_SCRIPT = Path(__file__).with_name("ask_engine.py")


def ask_engines(architecture: str, deadline_s: float = DEADLINE_S) -> list[dict[str, Any]]:
    """One line an engine: version, whether it knows the architecture, whether with EAGLE-3, and a
    verdict in words. vLLM is asked in this environment, SGLang in that of EAGLE3_SGLANG_PYTHON."""
    pythons = {"vllm": sys.executable, "sglang": os.environ.get(SGLANG_PYTHON, "")}
    return [_ask(name, python, architecture, deadline_s) for name, python in pythons.items()]


def _ask(engine: str, python: str, architecture: str, deadline_s: float) -> dict[str, Any]:
    line: dict[str, Any] = {"engine": engine, "version": None, "known": None, "eagle3": None}
    if not python:
        return line | {"verdict": f"not installed ({SGLANG_PYTHON} names no Python)"}
    if not Path(python).exists():
        return line | {"verdict": f"not installed (no Python at {python})"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "answer.log"
        environment = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        command = [python, str(_SCRIPT), engine, architecture]
        with Child(command, log=log, env=environment) as child:
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                return line | {"verdict": f"gave no answer within {deadline_s:.0f} s"}
            last = child.last_lines(1)
    if code != 0:
        return line | {"verdict": f"could not be asked: {last}"}
    line |= json.loads(last)
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
