"""Small random targets of real families, each saved as the Hugging Face folder of its real class.

``save_target(folder, family)``; families are the keys of ``FAMILIES``. The MLA ones have the shapes
that vLLM's CPU kernel takes: latent 512, rotary 64, YaRN.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3lib.target.int4 import KIMI_IGNORES, pack_int4

VOCAB = 320
IMAGE_ID = 300
_COMMON = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "initializer_range": 0.15, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_MLA = _COMMON | _MOE | {
    "hidden_size": 256, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 512,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "norm_topk_prob": True, "initializer_range": 0.06,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip
_MLA.pop("head_dim")


def _llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**(_COMMON | changes)))


def _tied() -> Any:
    return _llama(tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON))


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_MOE, num_experts=4))


def _deepseek_v3() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(DeepseekV3Config(**_MLA))


def _gpt_oss() -> Any:
    from transformers import GptOssConfig, GptOssForCausalLM

    kinds = ["sliding_attention", "full_attention"] * 3
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return GptOssForCausalLM(
        GptOssConfig(
            **_COMMON, **experts, sliding_window=8, layer_types=kinds, rope_parameters=rope
        )
    )


def _gemma2() -> Any:
    """The family of RMSNorm by 1 + weight, of capped scores and logits, of windows, tied."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    changes = {"tie_word_embeddings": True, "sliding_window": 8, "query_pre_attn_scalar": 16}
    return Gemma2ForCausalLM(Gemma2Config(**(_COMMON | changes)))


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "tied": _tied,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "kimi_k25": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "gemma2": _gemma2,
    "int4": _llama,
    "kimi_k25_int4": _deepseek_v3,
}


def save_target(folder: Path, family: str, seed: int = 0) -> Path:
    """A target of ``family`` in ``folder``: config, weights, tokenizer, chat template."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # ones would hide a norm that is forgotten or doubled
                weight.uniform_(0.2, 2.0)
            elif name.endswith(("sinks", "e_score_correction_bias", "bias")):
                weight.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.2)
    model.save_pretrained(folder)
    if family.startswith(("deepseek", "kimi")):
        _as_served(folder)
    if family.endswith("int4"):
        experts = family.startswith("kimi")
        ignore = KIMI_IGNORES if experts else ("lm_head",)
        pack_int4(folder, folder, ".experts." if experts else "_proj.", ignore)
    if family == "kimi_k2":
        _edit(folder, lambda c: c | {"model_type": "kimi_k2"})
    if family.startswith("kimi_k25"):
        _wrap(folder)
    _save_tokenizer(folder)
    return folder


def _edit(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=1))


def _as_served(folder: Path) -> None:
    """What real DeepSeek configs say, vLLM reads, and transformers 5.19 leaves out."""
    added = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}
    _edit(folder, lambda c: c | added)


def _wrap(folder: Path) -> None:
    """Kimi-K2.5's wrapper around the text model, with a vision tower that nothing here reads."""

    def wrapped(config: dict[str, Any]) -> dict[str, Any]:
        text = config | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
        return {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
            "text_config": text, "vision_config": {"num_hidden_layers": 1},
            "media_placeholder_token_id": IMAGE_ID, "tie_word_embeddings": False,
        }  # fmt: skip

    _edit(folder, wrapped)
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    renamed["vision_tower.encoder.blocks.0.norm0.weight"] = torch.ones(8)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    words = {("<image>" if i == IMAGE_ID else word): i for word, i in words.items()}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.chat_template = (
        "<s> {% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    fast.save_pretrained(folder)
