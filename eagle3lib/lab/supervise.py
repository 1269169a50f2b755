"""Run a command until it ends or our standard input closes; then leave nothing of it behind.

    python supervise.py GRACE_SECONDS COMMAND [ARGUMENT ...]

Used by :mod:`eagle3lib.lab.child`. Standard library and psutil only, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: orphaned descendants become ours, so we can find them


def main() -> int:
    grace_s, command = float(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda *_: _end(child, grace_s))
    threading.Thread(target=_wait_for_owner, args=(child, grace_s), daemon=True).start()
    code = child.wait()
    _end(child, grace_s)
    return code if code >= 0 else 128 - code


def _wait_for_owner(child: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    _end(child, grace_s)


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """SIGTERM to the group, a while to tidy up, then SIGKILL to all that is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _alive():
        time.sleep(0.1)
    for process in _alive():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _alive() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if _runs(p)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


if __name__ == "__main__":
    sys.exit(main())
