"""Ask the installed engines what their own code reads in a folder; each in a child with a deadline.

vLLM is asked in this environment (or ``EAGLE3_VLLM_PYTHON``'s), SGLang in that of
``EAGLE3_SGLANG_PYTHON``. Importing vLLM takes 20 s on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eagle3lib.lab.child import Child

DEADLINE_S = 240.0
_SCRIPT = Path(__file__).with_name("ask_reader.py")
_PYTHON = {"vllm": "EAGLE3_VLLM_PYTHON", "sglang": "EAGLE3_SGLANG_PYTHON"}


@dataclass(frozen=True)
class Answer:
    """``said`` is what the engine's code gave (see ask_reader.py), None where it was not asked;
    ``why_not`` then says why, ``installed`` whether there was an engine to ask."""

    engine: str
    said: dict[str, Any] | None = None
    why_not: str = ""
    installed: bool = False
    slots: dict[str, list[int] | None] = field(default_factory=dict)


def ask_engine(engine: str, drafter: Path, target: Path, deadline_s: float = DEADLINE_S) -> Answer:
    """What ``engine``'s own code reads in the folder ``drafter`` for the folder ``target``."""
    return ask_about(engine, [drafter], target, deadline_s)[0]


def ask_about(
    engine: str, drafters: Sequence[Path], target: Path, deadline_s: float = DEADLINE_S
) -> list[Answer]:
    """``ask_engine`` of several folders in one child; one answer a folder."""
    python, why_not = _python_of(engine)
    if not python:
        return [Answer(engine, why_not=why_not)] * len(drafters)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "answer.log"
        environment = {
            "OMP_NUM_THREADS": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",  # all are folders here
        }
        command = [python, str(_SCRIPT), engine, *(str(p.resolve()) for p in (target, *drafters))]
        with Child(command, log=log, env=environment) as child:
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                why_not = f"no answer in {deadline_s:.0f} s"
            else:
                last = child.last_lines(1)
                why_not = "" if code == 0 and last.startswith("[") else f"broke off: {last[:300]}"
    if why_not:
        return [Answer(engine, why_not=why_not, installed=True)] * len(drafters)
    return [
        Answer(engine, said, installed=True, slots=said.get("slots") or {})
        for said in json.loads(last)
    ]


def _python_of(engine: str) -> tuple[str, str]:
    """(interpreter, ""), or ("", why there is none)."""
    variable = _PYTHON[engine]
    named = os.environ.get(variable, "")
    if named:
        return (named, "") if os.access(named, os.X_OK) else ("", f"{variable} is no Python")
    if engine == "vllm" and find_spec("vllm") is not None:
        return sys.executable, ""
    return "", f"not installed here ({variable} names no Python)"
