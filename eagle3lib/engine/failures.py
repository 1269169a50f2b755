"""Why a start failed: its class, read from log, phase, exit code and stacks, and what to try next.

Classes come from public reports of vLLM and SGLang: a first collective that never returns (P2P
paths, NCCL with graphs), graph capture, kernels that the GPU's architecture lacks, memory,
checkpoints, ports.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.startup import GRAPHS, STARTING
from eagle3lib.lab.errors import UserError

PORT, MEMORY, CACHE, KERNEL = "port taken", "out of memory", "no room for the cache", "kernel"
CHECKPOINT, COLLECTIVE, CAPTURE = "bad checkpoint", "collective", "graph capture"
DIED, HANG, MUTE = "died", "hang", "healthy without tokens"

_SIGNS: tuple[tuple[str, str], ...] = (
    (PORT, r"address already in use|Errno 98|[Pp]ort\b.{0,40}\balready in use"),
    (CACHE, r"No available memory for the cache blocks|leave no GPU memory for the KV cache"
            r"|Please try to increase --mem-fraction-static|KV cache is needed, which is larger"),
    (MEMORY, r"out of memory|OutOfMemoryError|\bMemoryError\b|Cannot allocate memory"
             r"|less than desired GPU memory utilization|CUBLAS_STATUS_ALLOC_FAILED"),
    (KERNEL, r"no kernel image is available|is not compatible with the current PyTorch"
             r"|undefined symbol|not compiled for|[Uu]nsupported (?:compute capability|arch)"
             r"|compute capability .{0,60}not supported|an illegal instruction was encountered"
             r"|not supported (?:on|for) (?:this GPU|sm_?\d+)|No valid attention backend"),
    (CHECKPOINT, r"SafetensorError|HeaderTooLarge|InvalidHeader|size mismatch|shape mismatch"
                 r"|weights? (?:were|was) not initialized|architectures .{0,80}not supported"
                 r"|architecture \S+ is not supported|does not recognize this architecture"
                 r"|KeyError: '\S*(?:weight|proj|norm|embed|lm_head)|not a valid JSON"
                 r"|Cannot find any model weights|does not appear to have a file named"
                 r"|no file named|Unrecognized model"),
    (COLLECTIVE, r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclRemoteError"
                 r"|NCCL error|DistStoreError|DistBackendError|collective operation timeout"
                 r"|Watchdog caught collective"),
    (CAPTURE, r"stream is capturing|Capture .*graph failed|cudaErrorStreamCapture"),
)  # fmt: skip
_IN_COLLECTIVE = re.compile(
    r"all_?reduce|all_?gather|broadcast_|barrier|init_process_group|new_group|ncclComm"
    r"|_rendezvous|init_distributed|custom_all_reduce",
    re.IGNORECASE,
)
_KILLED = 137  # 128 + SIGKILL: the kernel's out-of-memory killer, when nobody else did it
_ADVICE = {
    PORT: "choose port 0 (any), or stop the process that holds it",
    MEMORY: "stop what holds the GPU's memory (eagle3 serve names it), or lower memory_share, "
    "max_num_seqs or max_model_len",
    CACHE: "raise memory_share, or lower max_model_len",
    KERNEL: "another attention backend, or an engine built for this GPU (TORCH_CUDA_ARCH_LIST)",
    CHECKPOINT: "check the folder that the log names: eagle3 doctor for a drafter",
    COLLECTIVE: "NCCL_P2P_DISABLE=1 (P2P off), then eager, then a newer NCCL",
    CAPTURE: "eager (no graphs), or another attention backend",
    HANG: "read the stacks; then eager, another attention backend, P2P off",
    MUTE: "read the stacks; then eager or another attention backend",
    DIED: "read the log from its first ERROR on",
}


@dataclass(frozen=True)
class Failure:
    """One failed start, or a server that stopped answering."""

    kind: str
    what: str  # one sentence
    phase: str
    last_lines: str
    stacks: str = ""

    @property
    def advice(self) -> str:
        return _ADVICE[self.kind]

    def error(self, *, expected: str, where: Path) -> EngineFailure:
        stacks = f"\nstacks:\n{self.stacks}" if self.stacks else ""
        return EngineFailure(
            f"{self.what} [{self.kind}]; its last lines:\n{self.last_lines}{stacks}",
            expected=expected,
            where=where,
            next=self.advice,
            failure=self,
        )


class EngineFailure(UserError):
    """A ``UserError`` that carries its :class:`Failure`."""

    def __init__(self, found: str, *, failure: Failure, **more: object):
        super().__init__(found, **more)  # type: ignore[arg-type]
        self.failure = failure


def classify_death(log_text: str, phase: str, code: int) -> str:
    """Class of an engine that ended by itself; the first sign that its log holds, in the order of
    how much it explains (memory that runs out while capturing is memory)."""
    for kind, pattern in _SIGNS:
        if re.search(pattern, log_text):
            return kind
    if code == _KILLED:
        return MEMORY
    return CAPTURE if phase == GRAPHS else DIED


def classify_hang(log_text: str, phase: str, stacks: str, gpus: int) -> str:
    """Class of an engine that lives and gets nowhere.

    A rank that died while the others wait leaves its sign in the log; else the stacks say where
    they wait, and without stacks the phase does.
    """
    for kind, pattern in _SIGNS:
        if kind != PORT and re.search(pattern, log_text):
            return kind
    if phase == GRAPHS:
        return CAPTURE
    if _IN_COLLECTIVE.search(stacks) or (gpus > 1 and phase == STARTING):
        return COLLECTIVE
    return HANG


def remedies(kind: str, config: EngineConfig) -> list[tuple[str, EngineConfig]]:
    """(name, changed settings) to try after a failure, in order; [] where no setting would help."""
    eager = ("eager", replace(config, compile=False)) if config.compile else None
    backend = _other_backend(config)
    other = (f"attention backend {backend}", replace(config, attention_backend=backend))
    no_p2p = ("P2P off", replace(config, p2p=False)) if config.gpus > 1 and config.p2p else None
    share = config.memory_share or 0.9
    fewer = ("half the requests at once", replace(config, max_num_seqs=config.max_num_seqs // 2))
    smaller = (
        f"memory share {share - 0.1:.2f}",
        replace(config, memory_share=round(share - 0.1, 2)),
    )
    larger = (f"memory share {0.95:.2f}", replace(config, memory_share=0.95))
    lists: dict[str, list[tuple[str, EngineConfig] | None]] = {
        COLLECTIVE: [no_p2p, eager],
        CAPTURE: [eager, other, no_p2p],
        KERNEL: [other, eager],
        HANG: [eager, other, no_p2p],
        MUTE: [eager, other, no_p2p],
        MEMORY: [smaller if share > 0.3 else None, fewer if config.max_num_seqs > 1 else None],
        CACHE: [larger if share < 0.95 else None],
    }
    return [r for r in lists.get(kind, []) if r is not None and r[1] != config]


def _other_backend(config: EngineConfig) -> str:
    """Triton's kernels are compiled on the machine itself: they run on any GPU."""
    if config.engine == "sglang":
        return "flashinfer" if config.attention_backend == "triton" else "triton"
    triton = "TRITON_MLA" if _is_mla(config.target) else "TRITON_ATTN"
    return "FLASHINFER" if config.attention_backend == triton else triton


def _is_mla(target: Path) -> bool:
    try:
        config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # a Hub id, or a folder that fails on its own
    return "kv_lora_rank" in {**config, **(config.get("text_config") or {})}
