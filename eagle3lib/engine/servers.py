"""Which servers this project has started: one file each under ``outputs/.servers``.

A process is ours only while its id *and* its start time are those on file: ids are used again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from eagle3lib.engine.health import healthy
from eagle3lib.engine.startup import StartupLog
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.run import outputs_root

# The supervisor gives the engine 10 s to end; what then is left is killed by it, or by us.
STOP_DEADLINE_S = 20.0
_SAME_START_S = 0.02  # psutil's start times are ticks since boot, read again they are equal


@dataclass(frozen=True)
class ServerState:
    """``pid`` is the supervisor's, whose end ends the engine; ``pgid`` the engine's own group."""

    id: str
    engine: str
    engine_version: str
    pid: int
    start_time: float  # seconds since 1970
    address: str
    command: list[str]
    target: str
    drafter: str | None
    log: str
    detached: bool
    model: str
    pgid: int | None = None
    pgid_start_time: float | None = None
    attempts: list[dict[str, Any]] = field(default_factory=list)

    def supervisor(self) -> psutil.Process | None:
        return _same_process(self.pid, self.start_time)

    def engine_process(self) -> psutil.Process | None:
        if self.pgid is None or self.pgid_start_time is None:
            return None
        return _same_process(self.pgid, self.pgid_start_time)

    @property
    def alive(self) -> bool:
        return self.supervisor() is not None or self.engine_process() is not None

    def condition(self) -> str:
        """ "ready", or how far its start has come."""
        if healthy(self.address):
            return "ready"
        reader = StartupLog(Path(self.log), "vllm" if self.engine == "vllm" else "sglang")
        phase = reader.poll().text()
        return "does not answer" if phase == "ready" else phase


def servers_folder() -> Path:
    return outputs_root() / ".servers"


def write_state(state: ServerState) -> None:
    write_json(servers_folder() / f"{state.id}.json", asdict(state))


def forget(server_id: str) -> None:
    (servers_folder() / f"{server_id}.json").unlink(missing_ok=True)


def running_servers() -> list[ServerState]:
    """Those that still run, oldest first; files of servers that are gone are removed."""
    found = []
    for path in servers_folder().glob("*.json"):
        try:
            state = ServerState(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:  # it ended while we looked
            continue
        except (ValueError, TypeError):
            raise UserError(
                "not a state file of a server", where=path, next="remove it by hand"
            ) from None
        if state.alive:
            found.append(state)
        else:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda s: s.start_time)


def process_start(pid: int) -> float | None:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def stop_server(state: ServerState) -> None:
    """End a server of ours and all that it started; a process that took over its id is spared.

    Raises ``UserError`` when something of it can't be ended.
    """
    ours = _descendants(state)
    supervisor = state.supervisor()
    if supervisor is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.terminate()
        with contextlib.suppress(psutil.TimeoutExpired, psutil.NoSuchProcess):
            supervisor.wait(STOP_DEADLINE_S)
    elif state.engine_process() is not None and state.pgid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(state.pgid, signal.SIGTERM)
        psutil.wait_procs(ours, timeout=STOP_DEADLINE_S / 2)
    for process in ours:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil checks the start time before it signals
    psutil.wait_procs(ours, timeout=5)
    left = [p for p in ours if _same_process(p.pid, p.create_time()) is not None]
    if left:
        raise UserError(
            f"process {left[0].pid} of {state.id} does not end", next="look at it with: ps -fp"
        )
    forget(state.id)


def _descendants(state: ServerState) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in (state.supervisor(), state.engine_process()):
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [process, *process.children(recursive=True)]
    return list({p.pid: p for p in found}.values())


def _same_process(pid: int, started: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - started) < _SAME_START_S
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def age_s(state: ServerState) -> float:
    return time.time() - state.start_time
