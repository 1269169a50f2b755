"""What a plan runs on: data-sheet figures of GPUs, or this machine's own bandwidth measured.

Data sheets (NVIDIA, AMD): memory in bytes, memory bandwidth, dense bf16 FLOP/s (never the doubled
"with sparsity" figure), bandwidth of the interconnect in one direction. The latency of one
collective is an estimate, not from a data sheet: about 10 us over NVLink (engines' one-shot
all-reduce), about 50 us over PCIe. The latter follows from one published-size case: Kimi-K2.5 INT4
on eight PCIe GPUs decoded 82.5 tokens a second with 51.5 % of a step in all-reduce, which over 122
collectives is 51 us each. A layer's dozen kernels start one after another, about 20 us in all
however little they read: an estimate too, which a sparse target at batch 1 feels most.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import cores
from eagle3lib.lab.params import PlanParams

# Shares of the peak that are reached. GPU: engines decode a Llama-3.1-8B at 61 to 76 % of H100
# bandwidth at batch 1, and capture and train at 43 to 44 % of the FLOPs (published SpecForge runs).
# CPU: vLLM decodes SmolLM2 at 40 tok/s, a third of two cores' bandwidth, and capture at 1,840 tok/s
# is all that their matrix products give (docs/lab_log.md).
_GPU_BANDWIDTH_SHARE, _GPU_COMPUTE_SHARE = 0.65, 0.43
_CPU_BANDWIDTH_SHARE, _CPU_COMPUTE_SHARE = 0.35, 0.95
_CPU_FLOPS_PER_CORE = 200e9  # bf16 matrix products with AVX-512, measured on two cores: 390 to 420
_NVLINK_S, _PCIE_S, _LAYER_S = 10e-6, 50e-6, 20e-6


@dataclass(frozen=True)
class Device:
    """One processor of a plan; a CPU machine counts as one."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float
    flops_per_s: float
    link_bytes_per_s: float
    collective_s: float
    bandwidth_share: float = _GPU_BANDWIDTH_SHARE
    compute_share: float = _GPU_COMPUTE_SHARE
    layer_s: float = _LAYER_S
    source: str = "data sheet"

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


def _gpu(name: str, gb: float, gb_per_s: float, tflops: float, link: float, wait: float) -> Device:
    return Device(name, gb * 1e9, gb_per_s * 1e9, tflops * 1e12, link * 1e9, wait)


GPUS: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("l4", 24, 300, 121, 32, _PCIE_S),
        _gpu("l40s", 48, 864, 362, 32, _PCIE_S),
        _gpu("rtx-3090", 24, 936, 71, 32, _PCIE_S),
        _gpu("rtx-4090", 24, 1008, 165, 32, _PCIE_S),
        _gpu("rtx-5090", 32, 1792, 209, 64, _PCIE_S),
        _gpu("rtx-pro-6000", 96, 1792, 503, 64, _PCIE_S),
        _gpu("a100-80gb", 80, 2039, 312, 300, _NVLINK_S),
        _gpu("h100", 80, 3350, 989, 450, _NVLINK_S),
        _gpu("h200", 141, 4800, 989, 450, _NVLINK_S),
        _gpu("b200", 180, 7700, 2250, 900, _NVLINK_S),
        _gpu("mi300x", 192, 5300, 1307, 448, _NVLINK_S),
    )
}
# How nvidia-smi names them, longest first: "RTX PRO 6000" before "RTX 6000".
_SEEN = {
    "rtx pro 6000": "rtx-pro-6000", "rtx 5090": "rtx-5090", "rtx 4090": "rtx-4090",
    "rtx 3090": "rtx-3090", "l40s": "l40s", "h200": "h200", "h100": "h100", "b200": "b200",
    "a100": "a100-80gb", "l4": "l4",
}  # fmt: skip


def choose_device(cfg: PlanParams, machine: dict[str, Any]) -> Device:
    """The device of ``cfg.gpu`` with the figures that were given by hand put in.

    ``auto`` is this machine's first GPU, or its CPU with the bandwidth measured now (0.3 s).
    Raises ``UserError`` for a name that is not in the table and not given by hand.
    """
    name = cfg.gpu.lower()
    if name == "auto":
        name = _name_of(machine["gpus"][0]["name"]) if machine["gpus"] else "cpu"
    if name == "cpu":
        device = _this_cpu(machine, cfg.bandwidth_gb_per_s)
    elif name in GPUS:
        device = GPUS[name]
    elif cfg.bandwidth_gb_per_s and cfg.tflops and cfg.memory_gb:
        device = Device(name, 0, 0, 0, _PCIE_S, _PCIE_S, source="given")
    else:
        raise UserError(
            f"no GPU {cfg.gpu!r} in the table",
            expected=f"auto, cpu, {', '.join(GPUS)}; or all of bandwidth_gb_per_s, tflops and "
            "memory_gb given",
            where="parameter 'gpu'",
        )
    if cfg.gpu.lower() == "auto" and machine["gpus"]:
        device = replace(device, memory_bytes=float(machine["gpus"][0]["memory_bytes"]))
    return _given(device, cfg)


def _given(device: Device, cfg: PlanParams) -> Device:
    """What the parameters give by hand stands above the table."""
    values = {
        "bandwidth_bytes_per_s": cfg.bandwidth_gb_per_s * 1e9,
        "flops_per_s": cfg.tflops * 1e12,
        "memory_bytes": cfg.memory_gb * 1e9,
        "link_bytes_per_s": cfg.link_gb_per_s * 1e9,
        "collective_s": cfg.collective_us * 1e-6,
        "layer_s": cfg.layer_us * 1e-6,
        "bandwidth_share": cfg.bandwidth_share,
        "compute_share": cfg.compute_share,
    }
    given = {name: value for name, value in values.items() if value}
    source = f"{device.source}; given: {', '.join(given)}" if given else device.source
    return replace(device, **given, source=source)  # type: ignore[arg-type]


def _name_of(product: str) -> str:
    return next((name for seen, name in _SEEN.items() if seen in product.lower()), product)


def _this_cpu(machine: dict[str, Any], given_gb_per_s: float) -> Device:
    bandwidth = given_gb_per_s * 1e9 or measured_bandwidth()
    return Device(
        "cpu",
        float(machine["memory_available_bytes"]),
        bandwidth,
        _CPU_FLOPS_PER_CORE * machine["cores"],
        bandwidth,
        0.0,
        _CPU_BANDWIDTH_SHARE,
        _CPU_COMPUTE_SHARE,
        0.0,
        "given" if given_gb_per_s else "bandwidth measured now",
    )


def measured_bandwidth(seconds: float = 0.3) -> float:
    """Bytes per second that this machine's cores read together: the best of some rounds in which
    every core sums 64 MB of its own, far beyond any cache."""
    blocks = [np.ones(2**23, dtype=np.int64) for _ in range(cores())]
    best, end = 0.0, time.monotonic() + seconds
    with ThreadPoolExecutor(len(blocks)) as pool:
        while time.monotonic() < end or best == 0.0:
            started = time.perf_counter()
            list(pool.map(np.sum, blocks))  # numpy lets go of the interpreter's lock in a sum
            elapsed_s = time.perf_counter() - started
            best = max(best, sum(b.nbytes for b in blocks) / elapsed_s)
    return best


def gpu_table() -> list[dict[str, Any]]:
    """The table as plain values, for people."""
    return [
        {
            "gpu": name,
            "memory_gb": d.memory_bytes / 1e9,
            "bandwidth_gb_per_s": d.bandwidth_bytes_per_s / 1e9,
            "bf16_tflops": d.flops_per_s / 1e12,
            "link_gb_per_s": d.link_bytes_per_s / 1e9,
            "collective_us (estimate)": round(d.collective_s * 1e6),
        }
        for name, d in GPUS.items()
    ]
