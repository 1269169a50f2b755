"""An engine's own torch profiler: started and stopped over HTTP, its traces found when whole.

Both engines answer POST /start_profile and /stop_profile. vLLM does so when its profiler was
configured at its start (``EngineConfig.trace_folder``), and writes a trace a rank before it answers
the stop; SGLang always does, takes folder and options with the request, and may still write when it
answers. Read in vLLM 0.32 and SGLang 0.5.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
from pathlib import Path

from eagle3lib.engine.access import open_url
from eagle3lib.engine.config import EngineConfig
from eagle3lib.lab.errors import UserError

_START_S = 120.0
STOP_S = 600.0  # a trace with stacks of some hundred steps takes minutes to write
_POLL_S = 0.5
_SETTLED_LOOKS = 3  # a trace whose size stays for so many looks is whole


def start_profiler(url: str, config: EngineConfig) -> None:
    """Record from now on. Raises ``UserError`` where the server has no profiler."""
    body = None
    if config.engine == "sglang":
        body = {
            "output_dir": str(_folder(config).resolve()),
            "activities": ["CPU", "GPU"],
            "with_stack": config.trace_stacks,
            "record_shapes": False,
        }
    _post(f"{url}/start_profile", body, _START_S)


def stop_profiler(url: str, config: EngineConfig, deadline_s: float = STOP_S) -> list[Path]:
    """Stop, and the traces when they are whole, one a rank, by name.

    Raises ``UserError`` when none came, or none became whole in time.
    """
    _post(f"{url}/stop_profile", None, deadline_s)
    folder, seen, settled = _folder(config), {}, 0
    # vLLM's are written when it has answered; SGLang may still be at it.
    end = time.monotonic() + (deadline_s if config.engine == "sglang" else min(deadline_s, 10.0))
    while True:
        sizes = {p: p.stat().st_size for p in traces_in(folder)}
        settled = settled + 1 if sizes and sizes == seen else 0
        if settled >= _SETTLED_LOOKS:
            return sorted(sizes)
        if time.monotonic() > end:
            raise UserError(
                "the engine's trace does not become whole"
                if sizes
                else "the engine's profiler wrote no trace",
                expected="a file *.trace.json or *.trace.json.gz",
                where=folder,
                next="read the engine's log: its profiler says there why it failed",
            )
        seen = sizes
        time.sleep(_POLL_S)


def traces_in(folder: Path) -> list[Path]:
    """Chrome traces as both engines name them."""
    return [p for p in sorted(folder.rglob("*.trace.json*")) if p.suffix in (".json", ".gz")]


def _folder(config: EngineConfig) -> Path:
    assert config.trace_folder is not None, "an engine that was started without a trace folder"
    return config.trace_folder


def _post(address: str, body: dict[str, object] | None, timeout_s: float) -> None:
    try:
        with open_url(address, timeout_s, {} if body is None else body) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", errors="replace").strip()
        missing = error.code in (404, 405)
        raise UserError(
            "this server has no profiler" if missing else f"its profiler says {said!r}",
            expected="an engine whose torch profiler is on (eagle3 profile starts one)",
            where=f"{address}: HTTP {error.code}",
            next="read the engine's log; vLLM needs --profiler-config at its start",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise UserError(
            f"the profiler does not answer: {error}",
            expected=f"an answer within {timeout_s:.0f} s",
            where=address,
            next="the engine may have died, or its trace be too large: ask for fewer tokens",
        ) from None
