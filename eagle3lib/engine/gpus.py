"""The machine's NVIDIA GPUs through NVML, where nvidia-ml-py is installed and a driver answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from eagle3lib.lab.machine import visible_gpus


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU; ``memory_bytes`` is None where the driver hides it."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int
    holders: tuple[Holder, ...] = ()


def gpus() -> list[Gpu]:
    """The GPUs that an engine started here would use (``CUDA_VISIBLE_DEVICES``), with who holds
    their memory; [] without NVML or without a GPU."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [_gpu(nvml, i) for i in visible_gpus(uuids)]


def gpu_use(pids: set[int]) -> int:
    """Utilisation (percent, summed) of the GPUs that these processes use; 0 without NVML."""
    with _nvml() as nvml:
        if nvml is None:
            return 0
        used = 0
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if any(p.pid in pids for p in _running(nvml, handle)):
                used += int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        return used


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetName(handle)),
        tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        int(memory.total),
        int(memory.free),
        tuple(_holder(p) for p in _running(nvml, handle)),
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value  # bytes before nvidia-ml-py 12


def _running(nvml: Any, handle: Any) -> list[Any]:
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:  # a MIG slice, or a driver that does not tell
        return []


def _holder(process: Any) -> Holder:
    try:
        name = " ".join(psutil.Process(process.pid).cmdline()[:4])
    except psutil.Error:  # another container's, or another user's
        name = "?"
    memory = process.usedGpuMemory
    return Holder(process.pid, name, None if memory is None else int(memory))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, no GPU
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()
