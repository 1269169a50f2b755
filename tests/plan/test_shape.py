"""Parameters and bytes, counted from a config, against the real models and published figures."""

from __future__ import annotations

import copy

import pytest
import torch
from public_shapes import (
    DEEPSEEK_V3,
    GPT_OSS_120B,
    KIMI_K25,
    LLAMA_8B,
    PUBLIC,
    QWEN3_8B,
    QWEN3_30B,
    changed,
)

from eagle3lib.lab.errors import UserError
from eagle3lib.plan.quantisation import quantisation_of, weight_bytes
from eagle3lib.plan.shape import Shape

VARIANTS = PUBLIC | {
    "llama with biases": changed(LLAMA_8B, attention_bias=True, mlp_bias=True),
    "llama, tied, no kv heads named": {
        k: v for k, v in changed(LLAMA_8B, tie_word_embeddings=True).items()
        if k != "num_key_value_heads"
    },
    "qwen2": changed(QWEN3_8B, model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
    "qwen3-moe, some layers dense": changed(
        QWEN3_30B, decoder_sparse_step=2, mlp_only_layers=[5, 9]
    ),
    "deepseek, queries of full rank": changed(DEEPSEEK_V3, q_lora_rank=None),
}  # fmt: skip


def parameters_of_the_real_model(raw):
    """transformers' own model on the meta device: no memory, no weights."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text = copy.deepcopy(raw.get("text_config", raw))
    for key in ("quantization_config", "architectures"):
        text.pop(key, None)
    kind = text.pop("model_type")
    config = CONFIG_MAPPING["deepseek_v3" if kind == "kimi_k2" else kind](**text)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("raw", VARIANTS.values(), ids=VARIANTS)
def test_parameters_equal_those_of_the_real_model(raw):
    assert Shape(raw).total_parameters == parameters_of_the_real_model(raw)


@pytest.mark.parametrize(
    ("raw", "total_b", "active_b"),
    [
        (LLAMA_8B, 8.03, 8.03),
        (QWEN3_30B, 30.5, 3.3),
        (DEEPSEEK_V3, 671.0, 37.6),
        (KIMI_K25, 1026.0, 32.9),
        (GPT_OSS_120B, 116.8, 5.7),
    ],
    ids=["llama", "qwen3-30b", "deepseek", "kimi", "gpt-oss"],
)
def test_parameters_are_those_of_the_model_cards(raw, total_b, active_b):
    """gpt-oss's card leaves the embedding out of the active ones, the others count it."""
    shape = Shape(raw)
    assert shape.total_parameters / 1e9 == pytest.approx(total_b, rel=0.005)
    active = shape.active_parameters
    assert active / 1e9 == pytest.approx(active_b, rel=0.02)


def bytes_of(raw):
    shape = Shape(raw)
    return weight_bytes(shape, quantisation_of(shape))


def test_kimi_int4_is_about_547_gib_of_text_weights():
    """The 547 that eight engines of 96 GB reported are GiB, as engines log them; 594 GB in all."""
    found = bytes_of(KIMI_K25)
    assert found.total / 2**30 == pytest.approx(547, rel=0.02)
    assert found.expert == 3 * 7168 * 2048 * 0.5625
    assert found.total / 8 < 96e9


def test_deepseek_fp8_and_gpt_oss_mxfp4_sizes():
    """671 GB in one byte each, but embedding and head; 116.8B parameters in 61 GiB or 65 GB."""
    assert bytes_of(DEEPSEEK_V3).total / 1e9 == pytest.approx(673, rel=0.005)
    assert bytes_of(GPT_OSS_120B).total / 1e9 == pytest.approx(65.2, rel=0.01)


def test_what_a_scheme_ignores_stays_in_16_bits():
    plain = changed(KIMI_K25)
    groups = plain["text_config"]["quantization_config"]
    everything = changed(KIMI_K25)
    everything["text_config"]["quantization_config"] = groups | {"ignore": []}
    assert bytes_of(everything).total < 0.99 * bytes_of(plain).total
    assert bytes_of(everything).experts == bytes_of(plain).experts


@pytest.mark.parametrize(
    ("scheme", "bytes_per_weight"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
    ],
    ids=lambda v: v.get("quant_method") if isinstance(v, dict) else "",
)
def test_bytes_a_weight_of_each_scheme(scheme, bytes_per_weight):
    shape = Shape(changed(LLAMA_8B, quantization_config=scheme))
    matrix = next(m for m in shape.matrices if m.name.endswith("3.mlp.up_proj"))
    found = quantisation_of(shape).matrix_bytes(matrix) / matrix.weights
    assert found == pytest.approx(bytes_per_weight, rel=0.001)


def test_an_unknown_scheme_is_refused_and_the_known_ones_named():
    shape = Shape(changed(LLAMA_8B, quantization_config={"quant_method": "aqlm"}))
    with pytest.raises(UserError, match=r"aqlm.*\n.*compressed-tensors"):
        quantisation_of(shape)


def test_the_cache_of_latent_attention_is_its_latent():
    assert Shape(KIMI_K25).kv_bytes_per_token() == 61 * (512 + 64) * 2
    assert Shape(LLAMA_8B).kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2


def test_a_missing_size_is_named():
    with pytest.raises(UserError, match="hidden_size"):
        Shape({"num_hidden_layers": 2}).hidden  # noqa: B018
