"""What an engine is started with: one description for vLLM and SGLang, and what can't be said.

The words are ours; :mod:`eagle3lib.engine.vllm` and :mod:`eagle3lib.engine.sglang` translate them
into each engine's flags. Read in vLLM 0.32/0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding

Engine = Literal["vllm", "sglang"]
SERVED_NAME = "target"
PYTHON_VARIABLE: dict[Engine, str] = {
    "vllm": "EAGLE3_VLLM_PYTHON",
    "sglang": "EAGLE3_SGLANG_PYTHON",
}


@dataclass(frozen=True)
class EngineConfig:
    """What decides an engine's numbers; two arms differ in ``drafter`` alone.

    ``topk`` and ``tree_tokens`` describe a drafted tree, ``tree_tokens`` without its root (the
    target's own token); a chain of K drafts is ``topk`` 1.
    """

    target: Path
    dtype: str = "bfloat16"
    max_model_len: int = 1024
    max_num_seqs: int = 16
    drafter: Path | None = None
    num_speculative_tokens: int = 3
    compile: bool = False  # False: eager, no graphs
    threads: int | None = None  # None: the cores that are free when it starts
    kv_cache_gb: int = 1  # on a CPU
    extra_flags: tuple[str, ...] = ()
    engine: Engine = "vllm"
    topk: int = 1
    tree_tokens: int | None = None
    drafter_dtype: str | None = None
    attention_backend: str | None = None
    drafter_attention_backend: str | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    quantization: str | None = None  # None: what the target's config.json says
    drafter_quantization: str | None = None  # None: its weights are not quantised
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    memory_share: float | None = None  # of a GPU's memory, for weights and cache; None: engine's
    prefix_cache: bool = False  # a prompt asked twice must cost twice when arms are compared
    trust_remote_code: bool = False
    p2p: bool = True  # False: NCCL copies through host memory
    modules: Path | None = None  # a folder of modules that its process may import

    @property
    def gpus(self) -> int:
        """Ranks, one GPU each (on a CPU: one process each)."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


def check_config(config: EngineConfig) -> list[Finding]:
    """What the engine could not be told, or would silently change."""
    found = [*_check_parallel(config), *_check_common(config)]
    if config.drafter is not None:
        found += _check_speculation(config)
    return found


def _error(code: str, title: str, evidence: str, remedy: str) -> Finding:
    return Finding(code, "error", title, evidence, remedy, where="engine settings")


def _check_common(config: EngineConfig) -> list[Finding]:
    if config.memory_share is not None and not 0 < config.memory_share <= 1:
        return [
            _error(
                "engine_memory_share",
                f"memory_share is {config.memory_share}",
                "a share of a GPU's memory above 0 and up to 1",
                "leave it out to take the engine's own",
            )
        ]
    return []


def _check_parallel(config: EngineConfig) -> list[Finding]:
    sizes = (config.tensor_parallel, config.pipeline_parallel, config.data_parallel)
    if min(sizes) < 1:
        return [
            _error(
                "engine_parallel",
                f"tensor, pipeline and data parallel are {sizes}",
                "1 or more each",
                "1 means: not split",
            )
        ]
    return []


def _check_speculation(config: EngineConfig) -> list[Finding]:
    k, topk, found = config.num_speculative_tokens, config.topk, []
    if k < 1 or topk < 1:
        return [_error("engine_tree", f"K is {k}, topk {topk}", "1 or more each", "K=3 topk=1")]
    if config.drafter_dtype not in (None, config.dtype):
        found += [
            _error(
                "engine_drafter_dtype",
                f"drafter in {config.drafter_dtype}, target in {config.dtype}",
                "both engines run the drafter in the target's dtype; neither has a flag for it",
                "serve both in one dtype, or quantise the drafter (drafter_quantization)",
            )
        ]
    if config.engine == "vllm" and (topk > 1 or config.tree_tokens not in (None, k)):
        found += [
            _error(
                "engine_tree",
                f"vLLM drafts chains; asked for topk {topk}, {config.tree_tokens} tree tokens",
                f"topk 1 and {k} tree tokens",
                "serve trees with SGLang",
            )
        ]
    elif config.engine == "sglang" and not k <= tree_tokens(config) <= _most_tree_tokens(k, topk):
        # SGLang adjusts such numbers at topk 1 and pads the tree otherwise (SpecForge issue 310).
        found += [
            _error(
                "engine_tree",
                f"{tree_tokens(config)} tree tokens in {k} steps of topk {topk}",
                f"{k} to {_most_tree_tokens(k, topk)} (without the root)",
                "leave tree_tokens out, or change K or topk",
            )
        ]
    return found


def tree_tokens(config: EngineConfig) -> int:
    """Tokens drafted in a round, without the root: K for a chain."""
    if config.tree_tokens is not None:
        return config.tree_tokens
    return config.num_speculative_tokens * config.topk


def _most_tree_tokens(k: int, topk: int) -> int:
    """A level's candidates come from the topk best nodes of the one before, topk from each."""
    return topk + (k - 1) * topk * topk


def interpreter(engine: Engine) -> str:
    """The Python that has the engine. SGLang and vLLM can't share one, their pins differ.

    Raises ``UserError`` when SGLang's is not named, or a named one does not exist.
    """
    named = os.environ.get(PYTHON_VARIABLE[engine], "")
    if not named and engine == "vllm":
        return sys.executable
    if not named or not os.access(named, os.X_OK):
        raise UserError(
            f"{PYTHON_VARIABLE[engine]} is {named!r}",
            expected=f"the Python of an environment that has {engine}",
            next="make setup-sglang, then export EAGLE3_SGLANG_PYTHON=.venv-sglang/bin/python"
            if engine == "sglang"
            else "unset it to use this environment, or name another Python",
        )
    return named


def shared_environment(config: EngineConfig) -> dict[str, str]:
    """What every engine gets: no usage statistics, no network for a local target."""
    env = {
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # a hang must not keep its last lines in a buffer
    }
    if config.target.is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if not config.p2p:
        env["NCCL_P2P_DISABLE"] = "1"
    if config.modules is not None:
        before = os.environ.get("PYTHONPATH")
        env["PYTHONPATH"] = os.pathsep.join([str(config.modules), *([before] if before else [])])
    return env
