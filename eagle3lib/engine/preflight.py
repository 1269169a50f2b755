"""What would break a start, found in seconds and before weights load.

``check_preflight`` collects; the checks look, and stop or delete nothing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

from eagle3lib.engine.ask_sampler import ASKED
from eagle3lib.engine.command import LOOPBACK
from eagle3lib.engine.config import EngineConfig, check_config, interpreter
from eagle3lib.engine.gpus import Gpu, gpus
from eagle3lib.engine.ports import free_port
from eagle3lib.engine.servers import running_servers
from eagle3lib.engine.vllm import engine_env
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding

_IMPORT_DEADLINE_S = 180.0  # a cold import of vLLM from a network disk takes more than a minute
_COLLECTIVE_DEADLINE_S = 60.0
_MODULES = {"vllm": "vllm.engine.arg_utils", "sglang": "sglang.srt.server_args"}
_OPEN_FILES = 4096  # vLLM asks for more than 65,000 and warns; below this, servers have failed
_LEAST_DISK_BYTES = 10 * 2**30  # compiled graphs and kernels, and the log
_DEFAULT_SHARE = 0.9
_ENGINE_NAMES = re.compile(
    r"\bvllm\.entrypoints|\bvllm serve|\bsglang(?:\.launch_server|::)|VLLM::|EngineCore"
)
# Segments of vLLM's message queues and of NCCL, multiprocessing's semaphores and arrays.
_SHARED = re.compile(r"^(psm_|nccl-|sem\.mp-|torch_|vllm|VLLM|sglang)")
_STALE_AFTER_S = 60.0
_ALLREDUCE = Path(__file__).with_name("allreduce.py")
_SAMPLER = Path(__file__).with_name("ask_sampler.py")
_EQUAL = 1e-6
# Run by the engine's interpreter; it asks the engine that is installed, no table of ours.
_KERNELS = """
import json, sys
import torch
told = {"torch_archs": torch.cuda.get_arch_list(), "attention": {}}
if sys.argv[1] == "vllm":
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    capability = DeviceCapability(int(sys.argv[2]), int(sys.argv[3]))
    for backend in AttentionBackendEnum:
        try:
            told["attention"][backend.name] = bool(
                backend.get_class().supports_compute_capability(capability))
        except Exception:
            continue
print("kernels", json.dumps(told))
"""


def check_preflight(
    config: EngineConfig, port: int = 0, host: str = LOOPBACK, *, log: Path
) -> list[Finding]:
    """Everything below, cheap checks first; what needs the engine is left out without it."""
    found = check_config(config) + check_port(port, host) + check_disk(log)
    found += check_open_files() + check_stale()
    present = gpus()
    found += check_gpus(config, present)
    missing = check_importable(config)
    if missing:
        return found + missing
    found += check_kernels(config, present)
    found += [] if present else check_sampling(config)
    if config.gpus > 1 and len(present) > 1:
        found += check_collective(config, "nccl")
    return found


def check_port(port: int, host: str = LOOPBACK) -> list[Finding]:
    try:
        free_port(port, host)
    except UserError as error:
        remedy = "choose port 0 (any), or stop the process that holds it"
        return [Finding("port_taken", "error", error.found, remedy=remedy, where=f"{host}:{port}")]
    return []


def check_importable(config: EngineConfig, deadline_s: float = _IMPORT_DEADLINE_S) -> list[Finding]:
    """Import the engine in a child: a broken kernel library shows here, not after the weights."""
    remedy = "make setup-sglang" if config.engine == "sglang" else "make setup"
    try:
        python = interpreter(config.engine)
        done = subprocess.run(
            [python, "-c", f"import {_MODULES[config.engine]}"],
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
    except UserError as error:
        return [Finding("engine_missing", "error", error.found, remedy=remedy)]
    except (OSError, subprocess.TimeoutExpired) as error:
        title = f"{config.engine} can't be imported: {error}"
        return [Finding("engine_missing", "error", title, remedy=remedy, where=python)]
    if done.returncode == 0:
        return []
    title = f"{config.engine} can't be imported"
    evidence = done.stderr.strip()[-500:]
    return [Finding("engine_missing", "error", title, evidence, remedy, where=python)]


def check_gpus(config: EngineConfig, present: list[Gpu]) -> list[Finding]:
    """Enough GPUs, and as much of each free as the engine will claim; else who holds it."""
    if not present:
        return []  # a CPU, or no NVML to ask
    if config.gpus > len(present):
        title = f"{config.gpus} GPUs asked for, {len(present)} here"
        remedy = "lower tensor, pipeline or data parallel"
        return [Finding("gpu_count", "error", title, remedy=remedy)]
    found, share = [], config.memory_share or _DEFAULT_SHARE
    for gpu in present[: config.gpus]:
        if gpu.free_bytes >= share * gpu.memory_bytes:
            continue
        held = "; ".join(
            f"process {h.pid} ({h.name})"
            + (f" {h.memory_bytes / 2**30:.1f} GiB" if h.memory_bytes is not None else "")
            for h in gpu.holders
        )
        found += [
            Finding(
                "gpu_memory",
                "error",
                f"GPU {gpu.index} ({gpu.name}) has {gpu.free_bytes / 2**30:.1f} of "
                f"{gpu.memory_bytes / 2**30:.1f} GiB free, {share:.0%} are asked for",
                evidence=f"held by {held}" if held else "held by processes that NVML does not show",
                remedy="stop them (eagle3 stop ends ours), or lower memory_share",
            )
        ]
    return found


def check_stale() -> list[Finding]:
    """Engines that run without being ours, and shared memory that no process uses."""
    ours = {s.pid for s in running_servers()} | {s.pgid for s in running_servers()}
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
            family = {process.pid, *(p.pid for p in process.parents())}
        except psutil.Error:
            continue
        if _ENGINE_NAMES.search(line) and not family & ours and "supervise.py" not in line:
            title = f"an engine runs that eagle3 did not start: process {process.pid}"
            remedy = f"if nobody needs it: kill {process.pid}"
            found += [Finding("stale_engine", "warning", title, line[:200], remedy)]
    left = _unused_shared_memory()
    if left:
        size = sum(p.stat().st_size for p in left if p.exists())
        title = f"{len(left)} files of {size / 2**20:.0f} MiB are left in /dev/shm"
        names = ", ".join(p.name for p in left[:5])
        remedy = f"rm {' '.join(str(p) for p in left[:5])}" + (" ..." if len(left) > 5 else "")
        found += [Finding("stale_shared_memory", "note", title, names, remedy, where="/dev/shm")]
    return found


def _unused_shared_memory(folder: Path = Path("/dev/shm")) -> list[Path]:
    """Segments of engines that no process has mapped; young ones may be of a start under way."""
    if not folder.is_dir():
        return []
    old = time.time() - _STALE_AFTER_S
    named = [p for p in folder.iterdir() if _SHARED.match(p.name) and p.stat().st_mtime < old]
    if not named:
        return []
    used: set[str] = set()
    for process in psutil.process_iter():
        try:
            used |= {m.path for m in process.memory_maps(grouped=True) if "/dev/shm" in m.path}
        except (psutil.Error, OSError):
            continue
    return sorted(p for p in named if str(p) not in used)


def check_disk(log: Path) -> list[Finding]:
    folder = next(p for p in (log.resolve().parent, *log.resolve().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if free >= _LEAST_DISK_BYTES:
        return []
    title = f"{free / 2**30:.1f} GiB of disk are free"
    remedy = "free some: compiled graphs, kernels and logs need up to 10 GiB"
    return [Finding("disk", "warning", title, remedy=remedy, where=str(folder))]


def check_open_files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= _OPEN_FILES or soft == resource.RLIM_INFINITY:
        return []
    title = f"a process may open {soft} files (hard limit {hard})"
    remedy = f"ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}"
    return [Finding("open_files", "warning", title, remedy=remedy)]


def check_kernels(
    config: EngineConfig, present: list[Gpu], deadline_s: float = _IMPORT_DEADLINE_S
) -> list[Finding]:
    """Are there kernels for these GPUs in torch, and which attention backends does vLLM run?"""
    found = []
    for major, minor in sorted({gpu.capability for gpu in present}):
        argv = [interpreter(config.engine), "-c", _KERNELS, config.engine, str(major), str(minor)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s)
            told = json.loads(done.stdout.rsplit("kernels ", 1)[1])
        except (OSError, subprocess.TimeoutExpired, IndexError, ValueError) as error:
            title = f"{config.engine}'s kernels could not be asked for: {error!r}"
            return [Finding("kernels_unknown", "note", title)]
        found += kernel_findings(config, (major, minor), told)
    return found


def kernel_findings(config: EngineConfig, capability: tuple[int, int], told: dict) -> list[Finding]:
    """What is missing on GPUs of a compute capability, and how it is built.

    ``told`` has ``torch_archs`` (["sm_90", ...]) and ``attention`` {backend: supported}. A binary
    for sm_XY runs on the same major version from Y on; compute_XY (PTX) on anything later.
    """
    major, minor = capability
    archs = [(kind, int(number)) for kind, number in
             re.findall(r"(sm|compute)_(\d+)", " ".join(told["torch_archs"]))]  # fmt: skip
    wanted, found = 10 * major + minor, []
    runs = any(a <= wanted and (kind == "compute" or a // 10 == major) for kind, a in archs)
    build = (
        f"an engine built for it: TORCH_CUDA_ARCH_LIST={major}.{minor} pip install "
        f"--no-build-isolation --no-binary {config.engine} {config.engine}, on a torch whose CUDA "
        "knows it"
    )
    if archs and not runs:
        title = f"torch has no kernels for compute capability {major}.{minor} (sm_{wanted})"
        found += [Finding("kernels_torch", "error", title, " ".join(told["torch_archs"]), build)]
    missing = sorted(name for name, there in told["attention"].items() if not there)
    asked = config.attention_backend
    if asked is not None and asked in missing:
        title = f"attention backend {asked} does not run on sm_{wanted}"
        there = sorted(name for name, there in told["attention"].items() if there)
        found += [Finding("kernels_attention", "error", title, remedy=f"one of {', '.join(there)}")]
    elif missing and major >= 12:
        title = f"on sm_{wanted} these attention backends are missing: {', '.join(missing)}"
        remedy = f"the engine chooses among the others; for more, {build}"
        found += [Finding("kernels_attention", "note", title, remedy=remedy)]
    return found


def check_sampling(config: EngineConfig, deadline_s: float = _IMPORT_DEADLINE_S) -> list[Finding]:
    """Does vLLM on a CPU, with a drafter, sample at the temperature that is asked for?

    Asked of the installed one, in the environment that its server gets."""
    if config.engine != "vllm" or config.drafter is None:
        return []
    env = {**os.environ, **engine_env(1, config)}
    argv = [interpreter("vllm"), "-c", _SAMPLER.read_text(encoding="utf-8")]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s, env=env)
        told = json.loads(done.stdout.strip().rsplit("\n", 1)[-1])
    except subprocess.TimeoutExpired:
        return [
            Finding(
                "sampling_unknown", "note", f"vLLM's sampler did not answer within {deadline_s:g} s"
            )
        ]
    except (OSError, ValueError):
        title = "vLLM's sampler could not be asked how it samples with a drafter"
        return [Finding("sampling_unknown", "note", title, done.stderr.strip()[-300:])]
    return sampling_findings(told)


def sampling_findings(told: dict[str, float | None]) -> list[Finding]:
    """``told``: the temperature that a drafted token got where 0.7 was asked for, by vLLM ``alone``
    and ``with_plugins``, as its server has it (see ``ask_sampler``)."""
    alone, served = told["alone"], told["with_plugins"]
    if alone is None or abs(alone - ASKED) < _EQUAL:
        return []
    evidence = f"a drafted token's temperature is {alone:g} where {ASKED} is asked for"
    if served is not None and abs(served - ASKED) < _EQUAL:
        title = "vLLM's CPU sampling with a drafter is wrong, and mended in servers of eagle3"
        remedy = "started by anybody else, serve greedily or without a drafter (vLLM issue 55005)"
        return [Finding("sampling_mended", "note", title, evidence, remedy)]
    title = "above temperature 0 this vLLM's answers with a drafter are not the target's"
    remedy = "temperature 0, or no drafter; unset VLLM_PLUGINS; vLLM issue 55005 has the cause"
    return [Finding("sampling_broken", "warning", title, evidence, remedy)]


def check_collective(
    config: EngineConfig, backend: str = "nccl", deadline_s: float = _COLLECTIVE_DEADLINE_S
) -> list[Finding]:
    """Two ranks sum a tensor; a hang is named before the model loads, and P2P off is tried."""
    told = _all_reduce(config, backend, deadline_s, p2p=config.p2p)
    if not told:
        return []
    remedy = "read NCCL's log (NCCL_DEBUG=INFO); a newer NCCL; eager"
    if config.p2p and backend == "nccl" and not _all_reduce(config, backend, deadline_s, p2p=False):
        remedy = "with P2P off it works: --no-p2p (NCCL_P2P_DISABLE=1)"
    title = f"an all-reduce of two ranks ({backend}) {told.splitlines()[0]}"
    return [Finding("collective", "error", title, evidence=told[-600:], remedy=remedy)]


def _all_reduce(config: EngineConfig, backend: str, deadline_s: float, *, p2p: bool) -> str:
    """What happened, empty when it worked."""
    python = interpreter(config.engine)
    argv = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {"OMP_NUM_THREADS": "1"} | ({} if p2p else {"NCCL_P2P_DISABLE": "1"})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with Child([*argv, str(_ALLREDUCE), backend], log=log, env=env) as child:
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                return f"does not return within {deadline_s:.0f} s\n{child.last_lines()}"
        return "" if code == 0 else f"fails (exit code {code})\n{child.last_lines()}"
