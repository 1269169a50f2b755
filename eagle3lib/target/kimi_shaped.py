"""A small model in the form of Kimi-K2.5: what its engines read there, they read here.

``KimiK25ForConditionalGeneration`` around a DeepSeek-V3 text tower: latent attention with Kimi's
own head sizes (latent 512, rotary 64, queries 128 + 64, values 128: those that the engines' MLA
kernels are written for), YaRN, a dense first layer, routed and shared experts chosen by sigmoid
with a correction bias, a vision tower and a projector (random: no image is ever shown), and the
files of a processor. Vocabulary, tokenizer and chat template are another target's, whose answers it
learns.

Read in vLLM 0.26 and 0.32 (``models/kimi_k25.py``) and SGLang 0.5.15 (``models/kimi_k25.py``,
``multimodal/processors/kimi_k25.py``). What they ask for beyond the weights:

    both     all tensors of the vision tower, even when no image comes
    vLLM     preprocessor_config.json with ``media_proc_cfg`` (its own processor class reads it)
    SGLang   AutoProcessor of the folder with ``media_processor`` and the token <|media_pad|>:
             code in the folder, so --trust-remote-code; its warm-up shows an image to the chat
             template, so --skip-server-warmup
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib.lab.files import read_json, replace_folder, write_json, write_text
from eagle3lib.target.folder import Target

MEDIA_TOKEN = "<|media_pad|>"
# The last of SmolLM2's special tokens that no chat holds; a tokenizer's own where it is there.
_SPARE_TOKENS = ("<jupyter_script>", "<empty_output>")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                    "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json",
                    "generation_config.json")  # fmt: skip
_PROCESSOR = "processing_kimi_shaped"


@dataclass(frozen=True)
class Size:
    """What may be small. Experts: a power of two, at least 4 active out of at least 8 (the fused
    routing kernels); widths a multiple of 128 (Marlin's INT4 kernels on a GPU)."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    q_lora_rank: int = 256
    dense_width: int = 1536
    expert_width: int = 256
    experts: int = 32
    active: int = 4
    positions: int = 2048


def text_config(size: Size, of: Target) -> dict[str, Any]:
    """The text tower's config.json: vocabulary and special ids of ``of``, all else as Kimi-K2's.

    ``topk_method``, ``scoring_func`` and ``moe_layer_freq`` are what vLLM reads and transformers
    does not write.
    """
    ids = {key: of.config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    factor = 4.0
    return ids | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "vocab_size": of.vocab_size, "hidden_size": size.hidden,
        "intermediate_size": size.dense_width, "moe_intermediate_size": size.expert_width,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads, "q_lora_rank": size.q_lora_rank, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": size.experts, "num_experts_per_tok": size.active,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "hidden_act": "silu",
        "attention_bias": False, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
        "max_position_embeddings": size.positions, "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0, "use_cache": True, "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 50000.0, "factor": factor, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": int(size.positions / factor),
        },
    }  # fmt: skip


def new_text_tower(size: Size, of: Target, seed: int = 0) -> Any:
    """The text tower with fresh weights, fp32, as transformers' ``DeepseekV3ForCausalLM``."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    config = text_config(size, of) | {"model_type": "deepseek_v3"}
    return DeepseekV3ForCausalLM(DeepseekV3Config.from_dict(config))


def save_kimi_shaped(model: Any, size: Size, of: Target, folder: Path, dtype: torch.dtype) -> Path:
    """Write the wrapper's folder: config, weights, tokenizer and processor of ``of``'s kind."""

    def build(temporary: Path) -> None:
        from safetensors.torch import load_file, save_file

        biases = {n: b for n, b in model.named_buffers() if n.endswith("correction_bias")}
        model.save_pretrained(temporary, max_shard_size="100GB")
        text = load_file(temporary / "model.safetensors")
        tensors = {f"language_model.{name}": t.to(dtype) for name, t in text.items()}
        # Engines choose experts in fp32 with this bias; bf16 numbers, so that none rounds it anew.
        tensors |= {f"language_model.{n}": b.bfloat16().float().cpu() for n, b in biases.items()}
        vision = vision_config(size.hidden)
        tensors |= {name: t.to(dtype) for name, t in vision_tensors(vision).items()}
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        (temporary / "generation_config.json").unlink(missing_ok=True)
        media_id = _copy_tokenizer(of.folder, temporary)
        text_part = text_config(size, of) | {"dtype": str(dtype).removeprefix("torch.")}
        config = {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
            "text_config": text_part, "vision_config": vision,
            "media_placeholder_token_id": media_id, "pad_token_id": text_part["pad_token_id"] or 0,
            "tie_word_embeddings": False, "dtype": text_part["dtype"],
            # transformers' names; the real folder has their defaults.
            "projection_hidden_size": vision["hidden_size"], "image_token_id": media_id,
        }  # fmt: skip
        write_json(temporary / "config.json", config)
        _write_processor(temporary, vision)

    return replace_folder(folder, build)


def vision_config(hidden: int) -> dict[str, Any]:
    """Kimi-K2.5's keys: vLLM and transformers read the sizes without ``vt_``, SGLang's projector
    those with it; transformers the position grid without ``init_``."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
             "num_hidden_layers": 1}  # fmt: skip
    grid = {"pos_emb_height": 8, "pos_emb_width": 8, "pos_emb_time": 4}
    both = {f"vt_{name}": size for name, size in sizes.items()}
    both |= {f"init_{name}": size for name, size in grid.items()}
    return sizes | grid | both | {
        "patch_size": 14, "pos_emb_type": "divided_fixed", "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "video_attn_type": "spatial_temporal",
        "mm_projector_type": "patchmerger", "mm_hidden_size": hidden,
        "text_hidden_size": hidden, "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
    }  # fmt: skip


def vision_tensors(c: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights of the vision tower (MoonViT) and the projector, by their published names."""
    h, m, p = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    merged = h * c["merge_kernel_size"][0] * c["merge_kernel_size"][1]
    tower, block = "vision_tower.patch_embed", "vision_tower.encoder.blocks"
    shapes: dict[str, tuple[int, ...]] = {
        f"{tower}.proj.weight": (h, 3, p, p), f"{tower}.proj.bias": (h,),
        f"{tower}.pos_emb.weight": (c["init_pos_emb_height"], c["init_pos_emb_width"], h),
        "vision_tower.encoder.final_layernorm.weight": (h,),
        "vision_tower.encoder.final_layernorm.bias": (h,),
        "mm_projector.pre_norm.weight": (h,), "mm_projector.pre_norm.bias": (h,),
        "mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.0.bias": (merged,),
        "mm_projector.proj.2.weight": (c["text_hidden_size"], merged),
        "mm_projector.proj.2.bias": (c["text_hidden_size"],),
    }  # fmt: skip
    linear = {"mlp.fc0": (m, h), "mlp.fc1": (h, m), "wqkv": (3 * h, h), "wo": (h, h)}
    for layer in range(c["num_hidden_layers"]):
        for name in ("norm0", "norm1"):
            shapes[f"{block}.{layer}.{name}.weight"] = shapes[f"{block}.{layer}.{name}.bias"] = (h,)
        for name, shape in linear.items():
            shapes[f"{block}.{layer}.{name}.weight"] = shape
            shapes[f"{block}.{layer}.{name}.bias"] = shape[:1]
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw) * 0.02 for name, shape in shapes.items()}


def _copy_tokenizer(source: Path, folder: Path) -> int:
    """Tokenizer and chat template, with one spare special token renamed to Kimi's for images;
    returns its id."""
    from transformers import AutoTokenizer

    for name in _TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)
    known = AutoTokenizer.from_pretrained(folder).get_vocab()
    spare = next((t for t in (MEDIA_TOKEN, *_SPARE_TOKENS) if t in known), None)
    if spare is None:  # the id is never used: the last one of the vocabulary
        return max(known.values())
    for path in folder.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        if spare in text:
            write_text(path, text.replace(f'"{spare}"', f'"{MEDIA_TOKEN}"'))
    return known[spare]


def _write_processor(folder: Path, vision: dict[str, Any]) -> None:
    media = {
        "in_patch_limit": 256, "patch_size": vision["patch_size"], "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3, "merge_kernel_size": 2, "fixed_output_tokens": None,
        "patch_limit_on_one_side": 16, "in_patch_limit_each_frame": 64,
        "in_patch_limit_video": 256, "sample_fps": 2.0, "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    }  # fmt: skip
    auto = {"AutoProcessor": f"{_PROCESSOR}.KimiShapedProcessor",
            "AutoImageProcessor": f"{_PROCESSOR}.KimiShapedVisionProcessor"}  # fmt: skip
    told = {"media_proc_cfg": media, "image_processor_type": "KimiShapedVisionProcessor",
            "processor_class": "KimiShapedProcessor", "auto_map": auto}  # fmt: skip
    write_json(folder / "preprocessor_config.json", told)
    shutil.copy(Path(__file__).with_name("kimi_processor.py"), folder / f"{_PROCESSOR}.py")
    tokenizer = read_json(folder / "tokenizer_config.json")
    if tokenizer.pop("auto_map", None):
        write_json(folder / "tokenizer_config.json", tokenizer)
