"""Child processes that can't outlive their owner, unless that is asked for: engines, training runs.

A child runs under ``supervise.py``, which holds a pipe from us. When the pipe closes, because we
closed it or because we died in whatever way (a killed kernel runs no ``finally``), the supervisor
ends the child's whole process group and everything that descends from it, and nothing else. A
detached child's supervisor holds both ends of that pipe itself, and ends the child on SIGTERM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path

_SUPERVISOR = Path(__file__).with_name("supervise.py")
STOP_DEADLINE_S = 20.0


class Child:
    """A running child with its log. Use as a context manager; leaving it stops the child."""

    def __init__(
        self,
        command: list[str],
        *,
        log: Path,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
        detached: bool = False,
    ):
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.command = log, command
        ends = os.pipe() if detached else ()
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, str(_SUPERVISOR), str(STOP_DEADLINE_S / 2), *command],
                stdin=ends[0] if ends else subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                pass_fds=ends,
                start_new_session=True,  # the terminal's Ctrl-C reaches us; we stop the child
            )
        for end in ends:
            os.close(end)
        self._detached = detached

    @property
    def pid(self) -> int:
        """Process id of the supervisor, the parent of everything that the child starts."""
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout_s: float | None = None) -> int:
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """End the child and all it started; waits until they are gone."""
        if self._process.stdin and not self._process.stdin.closed:
            self._process.stdin.close()
        if self._detached and self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def last_lines(self, count: int = 25) -> str:
        """The end of the log, for the error message when the child died."""
        if not self.log.exists():
            return ""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, maxlen=count)).rstrip()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
