"""Published shapes of targets, as the lab ships them, and SmolLM2's."""

from __future__ import annotations

import copy
from typing import Any

from eagle3lib.plan.source import shipped_config

LLAMA_8B = shipped_config("meta-llama/Llama-3.1-8B-Instruct")
QWEN3_8B = shipped_config("Qwen/Qwen3-8B")
QWEN3_30B = shipped_config("Qwen/Qwen3-30B-A3B")
DEEPSEEK_V3 = shipped_config("deepseek-ai/DeepSeek-V3")
KIMI_K25 = shipped_config("moonshotai/Kimi-K2.5")
GPT_OSS_120B = shipped_config("openai/gpt-oss-120b")
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
}  # fmt: skip

PUBLIC = {
    "llama-3.1-8b": LLAMA_8B, "qwen3-8b": QWEN3_8B, "qwen3-30b-a3b": QWEN3_30B,
    "deepseek-v3": DEEPSEEK_V3, "kimi-k2.5": KIMI_K25, "gpt-oss-120b": GPT_OSS_120B,
    "smollm2-135m": SMOLLM2,
}  # fmt: skip


def changed(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return copy.deepcopy(config) | changes
