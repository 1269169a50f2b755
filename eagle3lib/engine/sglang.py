"""Our engine settings as flags and environment of ``sglang.launch_server`` (SGLang 0.5.23)."""

from __future__ import annotations

from eagle3lib.engine.config import SERVED_NAME, EngineConfig, tree_tokens

MODULE = ["sglang.launch_server"]


def flags(config: EngineConfig) -> list[str]:
    """Command-line flags, without address."""
    flags = ["--model-path", str(config.target), "--served-model-name", SERVED_NAME]
    flags += ["--dtype", config.dtype, "--context-length", str(config.max_model_len)]
    flags += ["--max-running-requests", str(config.max_num_seqs), "--random-seed", "0"]
    flags += ["--sampling-defaults", "openai"]  # none out of the model's generation_config.json
    flags += ["--enable-metrics", "--log-level-http", "warning"]
    for flag, size in (
        ("--tp-size", config.tensor_parallel),
        ("--pp-size", config.pipeline_parallel),
        ("--dp-size", config.data_parallel),
    ):
        flags += [flag, str(size)] if size > 1 else []
    for flag, value in (
        ("--attention-backend", config.attention_backend),
        ("--quantization", config.quantization),
        ("--reasoning-parser", config.reasoning_parser),
        ("--tool-call-parser", config.tool_parser),
        ("--mem-fraction-static", config.memory_share),
    ):
        flags += [flag, str(value)] if value is not None else []
    flags += [] if config.prefix_cache else ["--disable-radix-cache"]
    # "--disable-cuda-graph" is the deprecated spelling of this pair.
    flags += [] if config.compile else ["--disable-decode-cuda-graph"]
    flags += [] if config.compile else ["--disable-prefill-cuda-graph"]
    flags += ["--trust-remote-code"] if config.trust_remote_code else []
    return flags + _speculation(config) + list(config.extra_flags)


def _speculation(config: EngineConfig) -> list[str]:
    if config.drafter is None:
        return []
    flags = ["--speculative-algorithm", "EAGLE3"]
    flags += ["--speculative-draft-model-path", str(config.drafter)]
    flags += ["--speculative-num-steps", str(config.num_speculative_tokens)]
    flags += ["--speculative-eagle-topk", str(config.topk)]
    # SGLang counts the root, the target's own token, among the draft tokens.
    flags += ["--speculative-num-draft-tokens", str(tree_tokens(config) + 1)]
    # Left out, the drafter inherits the target's quantisation and fails to load, or loads wrongly.
    flags += ["--speculative-draft-model-quantization", config.drafter_quantization or "unquant"]
    if config.drafter_attention_backend is not None:
        flags += ["--speculative-draft-attention-backend", config.drafter_attention_backend]
    return flags


def environment(threads: int, config: EngineConfig) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(threads)}
    if config.trace_folder is not None:
        env["SGLANG_TORCH_PROFILER_DIR"] = str(config.trace_folder.resolve())
    return env
