"""Ask an installed engine's own code: a script of ours, run by the engine's Python in a child.

The script imports nothing of the lab (SGLang lives in an environment of its own) and prints its
answer as JSON on its last line. Importing an engine takes 15 to 20 s on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eagle3lib.engine.config import PYTHON_VARIABLE, Engine, interpreter
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError

DEADLINE_S = 240.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Reply:
    """``said`` is what the script printed, None where there is none: ``why_not`` then says why, and
    ``installed`` whether there was an engine to ask."""

    said: Any = None
    why_not: str = ""
    installed: bool = True


def ask_installed(
    engine: Engine, script: Path, *words: str, offline: bool, deadline_s: float = DEADLINE_S
) -> Reply:
    """Run ``script ENGINE WORDS...`` by the engine's Python; what goes wrong is in the reply.
    ``offline``: nothing may be fetched from the Hub."""
    variable = PYTHON_VARIABLE[engine]
    if not os.environ.get(variable) and (engine != "vllm" or find_spec("vllm") is None):
        return Reply(why_not=f"not installed here ({variable} names no Python)", installed=False)
    try:
        python = interpreter(engine)
    except UserError as error:
        return Reply(why_not=f"not installed: {error.found}, no Python", installed=False)
    environment = _ENVIRONMENT | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "answer.log"
        with Child([python, str(script), engine, *words], log=log, env=environment) as child:
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                return Reply(why_not=f"no answer within {deadline_s:g} s")
            last = child.last_lines(1)
    if code != 0:
        return Reply(why_not=f"broke off: {last[:300]}")
    try:
        return Reply(json.loads(last))
    except json.JSONDecodeError:
        return Reply(why_not=f"no answer but: {last[:300]}")
