"""What would break a start is named before it: GPUs, ports, leftovers, kernels, collectives."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lib.engine import gpus, preflight
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.gpus import Gpu, Holder
from eagle3lib.engine.preflight import (
    check_collective,
    check_gpus,
    check_importable,
    check_kernels,
    check_open_files,
    check_port,
    check_preflight,
    check_stale,
    kernel_findings,
)

GIB = 2**30
CONFIG = EngineConfig(Path("/t"))


def gpu(index=0, free=139, holders=(), capability=(9, 0)):
    return Gpu(index, "H200", capability, 140 * GIB, free * GIB, tuple(holders))


def test_memory_that_is_missing_is_named_with_its_holder():
    assert check_gpus(CONFIG, [gpu()]) == []
    held = [Holder(77, "python train.py", 30 * GIB), Holder(78, "?", None)]
    (finding,) = check_gpus(CONFIG, [gpu(free=109, holders=held)])
    assert finding.severity == "error" and "109.0 of 140.0 GiB free" in finding.title
    assert "process 77 (python train.py) 30.0 GiB" in finding.evidence
    assert "process 78 (?)" in finding.evidence
    assert check_gpus(EngineConfig(Path("/t"), memory_share=0.7), [gpu(free=109)]) == []
    # Only the GPUs that the engine will take count.
    assert check_gpus(CONFIG, [gpu(), gpu(1, free=1)]) == []
    two = EngineConfig(Path("/t"), tensor_parallel=2)
    assert check_gpus(two, [gpu(), gpu(1, free=1)])[0].code == "gpu_memory"
    assert check_gpus(two, [gpu()])[0].code == "gpu_count"
    assert check_gpus(two, []) == []  # a CPU


class FakeNvml:
    """As nvidia-ml-py: one GPU, two processes, one of them unknown to this machine."""

    class NVMLError(Exception):
        pass

    fails = False

    def nvmlInit(self):
        if self.fails:
            raise self.NVMLError

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetName(self, handle):
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}0ab"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=140 * GIB, free=100 * GIB)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        return [9, 0]

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=55)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=40 * GIB),
                SimpleNamespace(pid=2**30, usedGpuMemory=None)]  # fmt: skip


def test_gpus_are_read_through_nvml_and_nothing_without_it(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.gpus() == [] and gpus.gpu_use({os.getpid()}) == 0
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    (found,) = gpus.gpus()
    assert (found.name, found.capability, found.free_bytes) == ("NVIDIA H200", (9, 0), 100 * GIB)
    assert [h.memory_bytes for h in found.holders] == [40 * GIB, None]
    assert "pytest" in found.holders[0].name and found.holders[1].name == "?"
    assert gpus.gpu_use({os.getpid()}) == 55 and gpus.gpu_use({1}) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    assert gpus.gpus() == [found]
    nvml.fails = True  # the package is there, the driver is not
    assert gpus.gpus() == []


def test_a_taken_port_is_an_error_with_its_holder():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (finding,) = check_port(port)
        assert finding.severity == "error" and f"process {os.getpid()}" in finding.title
    assert check_port(port) == [] and check_port(0) == []


def test_a_strangers_engine_is_named_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    with subprocess.Popen([*command, "-m", "vllm.entrypoints.cli.main", "serve"]) as stranger:
        found = [f for f in check_stale() if f"process {stranger.pid}" in f.title]
        assert [f.severity for f in found] == ["warning"] and str(stranger.pid) in found[0].remedy
        assert stranger.poll() is None
        stranger.kill()


def test_our_own_engine_is_not_called_stale(stub):
    with stub("works") as server:
        shown = " ".join(f.title for f in check_stale())
        assert f"process {server.state.pgid}" not in shown


def test_shared_memory_that_nobody_uses_is_named_and_kept(tmp_path):
    old = tmp_path / "psm_dead"
    for path in (old, tmp_path / "psm_new", tmp_path / "of-somebody-else"):
        path.write_bytes(b"x" * 10)
    for path in (old, tmp_path / "of-somebody-else"):
        os.utime(path, (1, 1))
    assert preflight._unused_shared_memory(tmp_path) == [old] and old.exists()
    assert preflight._unused_shared_memory(tmp_path / "none") == []


def test_a_low_limit_of_open_files_is_a_warning(monkeypatch):
    limits = {"now": (1024, 65536)}
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: limits["now"])
    (finding,) = check_open_files()
    assert "1024" in finding.title and finding.remedy == "ulimit -n 65536"
    limits["now"] = (65536, 65536)
    assert check_open_files() == []


def test_an_engine_that_breaks_or_hangs_at_import_is_found(tmp_path, monkeypatch):
    python = tmp_path / "python"
    monkeypatch.setenv("EAGLE3_SGLANG_PYTHON", str(python))
    config = EngineConfig(Path("/t"), engine="sglang")
    for script, told in (
        ("exit 0", None),
        ("echo 'ImportError: libcuda.so.1' >&2; exit 1", "libcuda.so.1"),
        ("exec sleep 30", "timed out"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        found = check_importable(config, deadline_s=1.0)
        assert bool(found) == (told is not None)
        assert not found or told in found[0].title + found[0].evidence


HOPPER = ["sm_80", "sm_86", "sm_90", "sm_100"]


@pytest.mark.parametrize(("capability", "archs", "code"), [
    ((9, 0), HOPPER, None),
    ((8, 9), HOPPER, None),  # a binary for sm_86 runs on later GPUs of the same major version
    ((12, 0), HOPPER, "kernels_torch"),  # SM120: a binary for sm_100 does not run there
    ((12, 0), [*HOPPER, "compute_100"], None),  # PTX is compiled by the driver
    ((12, 1), [*HOPPER, "sm_120"], None),
    ((7, 5), HOPPER, "kernels_torch"),
    ((12, 0), [], None),  # a CPU build tells nothing
])  # fmt: skip
def test_a_gpu_without_kernels_is_named_with_the_way_to_build(capability, archs, code):
    found = kernel_findings(CONFIG, capability, {"torch_archs": archs, "attention": {}})
    assert [f.code for f in found] == ([code] if code else [])
    if code:
        major, minor = capability
        assert f"TORCH_CUDA_ARCH_LIST={major}.{minor}" in found[0].remedy


def test_attention_backends_that_sm120_lacks_are_told_and_refused_when_asked_for():
    told = {"torch_archs": ["sm_120"], "attention": {"FLASHMLA": False, "TRITON_MLA": True}}
    (finding,) = kernel_findings(CONFIG, (12, 0), told)
    assert finding.severity == "note" and "FLASHMLA" in finding.title
    asked = EngineConfig(Path("/t"), attention_backend="FLASHMLA")
    (finding,) = kernel_findings(asked, (12, 0), told)
    assert finding.severity == "error" and "TRITON_MLA" in finding.remedy


def test_an_engine_that_tells_nothing_of_its_kernels_is_a_note(stub):
    (finding,) = check_kernels(stub("works").config, [gpu()])
    assert finding.code == "kernels_unknown" and finding.severity == "note"


def test_two_ranks_sum_a_tensor_and_a_hang_is_named():
    assert check_collective(CONFIG, "gloo") == []
    (finding,) = check_collective(CONFIG, "gloo", deadline_s=0.5)
    assert finding.severity == "error" and "does not return within 0 s" in finding.title


def test_p2p_off_is_the_remedy_when_it_helps(monkeypatch):
    def all_reduce(config, backend, deadline_s, *, p2p):
        return "does not return within 60 s\nlast line" if p2p else ""

    monkeypatch.setattr(preflight, "_all_reduce", all_reduce)
    (finding,) = check_collective(EngineConfig(Path("/t"), tensor_parallel=2))
    assert "NCCL_P2P_DISABLE=1" in finding.remedy and "last line" in finding.evidence


def test_preflight_collects_and_leaves_the_engine_out_when_it_is_missing(stub, tmp_path):
    config = stub("works").config
    codes = {f.code for f in check_preflight(config, log=tmp_path / "log") if f.severity == "error"}
    assert codes == set()
    bad = EngineConfig(tmp_path, memory_share=2.0)
    codes = {f.code for f in check_preflight(bad, log=tmp_path / "log")}
    assert "engine_memory_share" in codes
