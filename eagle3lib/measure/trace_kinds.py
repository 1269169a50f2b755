"""What the names in an engine's profile mean: kinds of work, marks of steps, scopes.

Names of operators (``aten::mm``), kernels (``nvjet_tst_...``, ``triton_red_fused_...``) and scopes
as vLLM 0.32, SGLang 0.5, torch 2.13 and NVIDIA's libraries write them. What no rule knows is
``OTHER`` and is shown as such.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MATRIX, ATTENTION, ELEMENTWISE = "matrix products", "attention", "norms and elementwise"
SAMPLING, COLLECTIVES, COPIES = "sampling", "collectives", "copies"
DRAFTER, OTHER, HOST, IDLE = "drafter", "other operators", "host", "idle"
# In the order in which they are drawn; where kernels overlap, the earlier one is charged, so that
# collectives and copies count for what they add alone.
KINDS = (
    MATRIX, ATTENTION, ELEMENTWISE, SAMPLING, DRAFTER, OTHER, COPIES, COLLECTIVES, HOST, IDLE,
)  # fmt: skip

# The first rule that finds something in the lower-case name decides.
_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        # On a CPU its fused loops (norms, rotary, activations) have no name but their graph's; the
        # library calls between them have their own.
        (ELEMENTWISE, r"compiledfxgraph"),
        # Inductor lists what it fused: only its templates are products, whatever else is named.
        (MATRIX, r"triton_tem_"),
        (ELEMENTWISE, r"triton_(poi|red|per|for)_|cpp_fused"),
        (
            COLLECTIVES,
            r"nccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|c10d::|"
            r"cross_device_reduce|gloo|::shm_",
        ),
        (
            ATTENTION,
            r"attention|attn|fmha|flash::|paged|(reshape|concat)_and_cache|set_.*kv_buffer|"
            r"kv_?cache|flashinfer::batch|merge_?states?|::mla|_mla_|flash_fwd|get_scheduler_metadata|"
            # what takes its place in hybrid targets
            r"delta_rule|_gdn_|_kda_|causal_conv1d|selective_s|mamba",
        ),
        (
            MATRIX,
            r"fused_(moe|experts)|moe_(.*gemm|mm|wna16)|grouped_mm|int_moe|expert.*gemm",
        ),
        (ELEMENTWISE, r"moe|expert|topk_softmax|topk_sigmoid"),
        (
            MATRIX,
            r"gemm|gemv|matmul|addmm|(^|::|_)b?mm($|_|out)|linear|cutlass|cublas|xmma|nvjet|"
            r"marlin|machete|splitk|scaled_mm|onednn_mm|mkldnn_|einsum",
        ),
        (
            SAMPLING,
            r"argmax|top_?k|top_?p|multinomial|exponential|sampl|reject|radixsort|aten::sort|"
            r"gumbel|verify_?tree|tree_?greedy|build_.*tree|penalt",
        ),
        (
            COPIES,
            r"memcpy|memset|copy_|aten::(_?to|_to_copy|copy|clone|contiguous|item)$|"
            r"_local_scalar_dense|pin_memory|copy_kernel|copybuffer|swap_blocks|aten::(lift|detach)",
        ),
        (
            ELEMENTWISE,
            r"norm|silu|gelu|relu|_and_mul|rotary|rope|elementwise|reduce_kernel|softmax|embedding|"
            r"index|gather|scatter|quant|slot_mapping|eagle_(prepare|step)|catarray|cumsum|scan|fill|aten::(add|sub|mul|div|pow|mean|sum|"
            r"rsqrt|exp|neg|cos|sin|sigmoid|tanh|where|cat|stack|arange|zero|zeros|ones|full|eq|ne|"
            r"lt|le|gt|ge|max|min|amax|amin|clamp|bitwise|logical|repeat_interleave|masked|"
            r"floor_divide|remainder|any|all|nonzero|flip|roll)(_\w*)?$",
        ),
    )
)
# vLLM: execute_context_C(tokens)_generation_G(tokens) around each step, C and G in requests.
_VLLM_STEP = re.compile(r"^execute_context_(\d+)\(.*\)_generation_(\d+)\(")
# SGLang: step[MODE bs=REQUESTS ...] around each forward, the drafter's own ones included.
_SGLANG_STEP = re.compile(r"^step\[(\w+) bs=(\d+)")
_SGLANG_DECODES = ("DECODE", "TARGET_VERIFY")
_SAMPLING_SCOPES = ("gpu_model_runner: sample",)
_DRAFTER_SCOPES = ("gpu_model_runner: draft", "draft", "draft_extend", "draft_forward")
# Engines without such a scope (vLLM's model runner V2) are recorded with Python's calls.
_DRAFTER_CALLS = re.compile(
    r"(vllm/v1/(worker/gpu/)?spec_decode/.*: propose$)|"
    r"(sglang/srt/speculative/eagle\w*\.py\(\d+\): (_?draft\w*|forward_draft\w*)$)"
)
_SAMPLING_CALLS = re.compile(
    r"vllm/v1/(worker/gpu/)?sample/.*: (sample|forward|__call__)$|"
    r"vllm/v1/(sample|worker/gpu/spec_decode)/rejection_sampler\w*\.py\(\d+\): "
)


@dataclass(frozen=True)
class StepMark:
    """One step of the engine: requests whose prompt it read, and for which it decoded."""

    prefills: int
    decodes: int
    verify: bool = False  # SGLang's mark of a round; vLLM's are alike

    @property
    def is_decode(self) -> bool:
        return self.decodes > 0 and self.prefills == 0


def kind_of(name: str) -> str | None:
    """The kind of an operator or kernel; None where no rule knows it."""
    lower = name.lower()
    return next((kind for kind, pattern in _RULES if pattern.search(lower)), None)


def step_of(name: str) -> StepMark | None:
    """What step a scope marks; None for any other scope."""
    if found := _VLLM_STEP.match(name):
        return StepMark(int(found[1]), int(found[2]))
    if found := _SGLANG_STEP.match(name):
        mode, requests = found[1], int(found[2])
        decodes = mode in _SGLANG_DECODES
        verify = mode == "TARGET_VERIFY"
        return StepMark(0 if decodes else requests, requests if decodes else 0, verify)
    return None


def is_drafter(name: str) -> bool:
    """Whether a scope, or a Python call, is the drafter's."""
    return name in _DRAFTER_SCOPES or bool(_DRAFTER_CALLS.search(name))


def is_sampling(name: str) -> bool:
    """Whether a scope, or a Python call, is that of sampling or of rejection."""
    return name in _SAMPLING_SCOPES or bool(_SAMPLING_CALLS.search(name))
