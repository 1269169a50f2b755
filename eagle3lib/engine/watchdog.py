"""Loading or hanging? Signs of life of an engine's processes, and their stacks when there are none.

A start that shows no log, no CPU, no GPU and no disk activity for a while is a hang. Ranks that
spin in a collective do use CPU and GPU: those are caught by the deadline, with the same stacks.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from eagle3lib.engine.gpus import gpu_use

STALL_S = 180.0
# An engine that only waits wakes up to poll its pipes; one that works uses a good part of a core.
_IDLE_CORES = 0.05
_STACK_DEADLINE_S = 20.0
_MOST_PROCESSES = 16  # a stack dump of 8 ranks and their helpers is long enough to read


@dataclass
class Activity:
    """``stalled_s`` seconds since the process tree under ``pid`` last showed a sign of life."""

    pid: int
    log_bytes: Callable[[], int]
    _counts: tuple[int, int, int] = field(init=False, default=(0, 0, 0))
    _cpu_s: float = field(init=False, default=0.0)
    _sampled: float = field(init=False, default_factory=time.monotonic)
    _alive: float = field(init=False, default_factory=time.monotonic)
    stalled_s: float = field(init=False, default=0.0)

    def sample(self) -> float:
        """Look once more (call it every second or so); returns ``stalled_s``."""
        now = time.monotonic()
        cpu_s, counts = self._count()
        elapsed_s = max(now - self._sampled, 1e-3)
        busy = (cpu_s - self._cpu_s) / elapsed_s > _IDLE_CORES
        if busy or counts != self._counts or gpu_use(_pids(self.pid)) > 0:
            self._alive = now
        self._cpu_s, self._counts, self._sampled = cpu_s, counts, now
        self.stalled_s = now - self._alive
        return self.stalled_s

    def _count(self) -> tuple[float, tuple[int, int, int]]:
        """CPU seconds; and log bytes, MiB of disk (a log's own lines are less), processes."""
        cpu_s, disk, found = 0.0, 0, tree(self.pid)
        for process in found:
            with contextlib.suppress(psutil.Error, OSError, AttributeError):
                times = process.cpu_times()
                cpu_s += times.user + times.system
                io = process.io_counters()
                disk += io.read_bytes + io.write_bytes
        return cpu_s, (self.log_bytes(), disk // 2**20, len(found))


def tree(pid: int) -> list[psutil.Process]:
    """All that descends from ``pid``: the engine and its ranks, without the supervisor itself."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _pids(pid: int) -> set[int]:
    return {process.pid for process in tree(pid)}


def stacks(pid: int, python: str = sys.executable) -> str:
    """Python stacks of every process under ``pid`` through py-spy; without it, what the system
    tells of each (state, what it waits for, threads)."""
    spy = _py_spy(python)
    parts = []
    for process in tree(pid)[:_MOST_PROCESSES]:
        with contextlib.suppress(psutil.Error):
            title = f"process {process.pid} ({process.name()}, {process.status()})"
            told = _dump(spy, process.pid) if spy else _waits_for(process)
            parts.append(f"{title}\n{told}")
    if parts and not spy:
        parts.append("no py-spy here, so no stacks: pip install py-spy")
    return "\n".join(parts)


def _py_spy(python: str) -> str | None:
    beside = (Path(p).parent / "py-spy" for p in (python, sys.executable))
    return next((str(p) for p in beside if p.exists()), shutil.which("py-spy"))


def _dump(spy: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [spy, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_STACK_DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"  no stack: {error}"
    return (done.stdout if done.returncode == 0 else f"  no stack: {done.stderr}").rstrip()


def _waits_for(process: psutil.Process) -> str:
    channel = Path(f"/proc/{process.pid}/wchan")
    waits = channel.read_text() if channel.exists() else ""
    return f"  {process.num_threads()} threads, waits in {waits or 'nothing'}"
