"""Other people's drafter folders: every style and file layout is read alike, every odd one named.

The configs are written in the shape of real exports (SpecForge 0.2.0, speculators 0.9.0, public
drafters for Kimi), shrunk to the tests' target.
"""

import json
import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.checkpoint import (
    check_drafter_folder,
    expected_shapes,
    read_drafter,
    set_vocab,
    write_drafter,
)
from eagle3lib.drafter.checks import check_drafter_config, check_servable
from eagle3lib.drafter.config import MLA, OPTIONS
from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.drafter.read_config import check_config_file, read_drafter_config
from eagle3lib.drafter.vocab import build_vocab_map
from eagle3lib.lab.errors import UserError
from eagle3lib.target.model import TargetHead

FLOAT = torch.float32
MLA_TYPE = {
    "mla": MLA(24, 20, 12, 8, 10), "head_dim": 20, "num_key_value_heads": 4,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "mscale": 1.0,
        "original_max_position_embeddings": 32, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
KINDS = {
    "llama": {},
    "all options": dict.fromkeys(OPTIONS, True),
    "five slots": {"slots": (1, 2, 5, 7, 9), "fc_norm": True},
    "mla": MLA_TYPE,
    "mla without rank": MLA_TYPE | {"mla": MLA(None, 20, 12, 8, 10)},
    "mla EAGLE 3.1": MLA_TYPE | {"fc_norm": True, "norm_output": True},
}


@pytest.fixture(scope="module")
def head(tiny_target):
    return TargetHead(tiny_target)


@pytest.fixture
def read(tiny_target, head):
    return lambda folder: read_drafter(folder, tiny_target.config, head.embedding, FLOAT)


@pytest.fixture
def written(random_drafter, head, tmp_path):
    """``written(**config)``: (drafter with the target's embeddings, its folder)."""

    def make(**changes):
        drafter = random_drafter(20, **({"draft_vocab_size": 90} | changes))
        if not changes.get("own_embeddings"):
            drafter.embed_tokens.weight.data.copy_(head.embedding)
        write_drafter(tmp_path, drafter, FLOAT)
        return drafter, tmp_path

    return make


def logits(drafter):
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in (12, 20)]
    states = torch.randn(32, drafter.fc.weight.shape[1], generator=generator)
    with torch.no_grad():
        made = unroll(drafter, PackedRows.pack(rows, [3, 9]), states, 3, feed="draft")
        return torch.stack([drafter.logits(step.hidden) for step in made])


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))


def as_speculators(config):
    """A folder's config in the manner of speculators 0.9.0."""
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", *OPTIONS)
    dropped = ("architectures", "eagle_config", "num_aux_hidden_states", "target_hidden_size",
               "torch_dtype", "rope_theta", "rope_scaling")  # fmt: skip
    layer = {k: v for k, v in config.items() if k not in (*own, *dropped)}
    return {k: config[k] for k in own} | {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "embed_requires_grad": False, "speculators_model_type": "eagle3",
        "target_hidden_size": None, "tie_word_embeddings": False,
        "speculators_config": {"algorithm": "eagle3", "proposal_methods": []},
        "transformer_layer_config": layer,
    }  # fmt: skip


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_every_kind_written_and_read_is_the_same(written, read, changes):
    drafter, folder = written(**changes)
    again = read(folder)
    assert again.config == drafter.config
    assert torch.equal(logits(again), logits(drafter))


def test_the_mla_folder_holds_what_engines_look_for(written):
    _, folder = written(**MLA_TYPE)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config["model_type"] == "kimi_k2"
    assert config["rope_scaling"]["type"] == "yarn"
    assert config["num_aux_hidden_states"] == 3
    tensors = load_file(folder / "model.safetensors")
    layer = "midlayer.self_attn"
    assert tensors[f"{layer}.q_a_proj.weight"].shape == (24, 128)
    assert tensors[f"{layer}.kv_a_proj_with_mqa.weight"].shape == (28, 128)
    assert tensors[f"{layer}.q_b_proj.weight"].shape == (4 * 20, 24)
    assert tensors[f"{layer}.kv_b_proj.weight"].shape == (4 * 22, 20)
    assert tensors[f"{layer}.o_proj.weight"].shape == (64, 4 * 10)


@pytest.mark.parametrize("changes", [{}, MLA_TYPE], ids=["llama", "mla"])
def test_transformers_reads_the_same_rotary_settings(written, changes):
    """vLLM loads a kimi_k2 config as DeepSeek-V3's, through the classes used here."""
    from transformers import DeepseekV3Config, LlamaConfig

    drafter, folder = written(**changes)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("model_type")
    config = (DeepseekV3Config if drafter.config.mla else LlamaConfig)(**raw)
    expected = drafter.config.rope_parameters
    assert {k: config.rope_parameters[k] for k in expected} == expected


def test_whole_vocabulary_is_written_without_a_map(written, read):
    """vLLM has no draft_id_to_target_id where D = V: a d2t tensor would have nowhere to go."""
    drafter, folder = written(draft_vocab_size=300)
    names = load_file(folder / "model.safetensors").keys()
    assert not {"d2t", "t2d"} & names
    assert torch.equal(logits(read(folder)), logits(drafter))


def test_own_embeddings_are_written_and_read(written, read):
    drafter, folder = written(own_embeddings=True)
    assert "embed_tokens.weight" in load_file(folder / "model.safetensors")
    again = read(folder)
    assert again.config.own_embeddings
    assert torch.equal(logits(again), logits(drafter))


def test_a_rounded_copy_of_the_targets_embeddings_is_not_its_own(written, read, head):
    _, folder = written()
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = head.embedding.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    assert not read(folder).config.own_embeddings


def test_speculators_style(written, read, head):
    """Its layer nested, its names layers.0, its target_hidden_size null, its embeddings with it."""
    drafter, folder = written(**dict.fromkeys(OPTIONS[1:], True))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(as_speculators(config)))
    tensors = load_file(folder / "model.safetensors")
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}
    save_file(tensors | {"embed_tokens.weight": head.embedding}, folder / "model.safetensors")
    again = read(folder)
    assert again.config == drafter.config
    assert torch.equal(logits(again), logits(drafter))


def test_speculators_norm_before_residual_is_on_unless_the_file_says_no(random_drafter, tmp_path):
    """As vLLM reads it; SGLang/SpecForge style has it off."""
    config = random_drafter().config.as_hf_config("float32")
    theirs = as_speculators(config)
    for written, expected in ((theirs, False), (without(theirs, OPTIONS), True),
                              (without(config, OPTIONS), False)):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert read_drafter_config(tmp_path, 10).norm_before_residual is expected


def without(config, keys):
    return {k: v for k, v in config.items() if k not in keys}


def test_a_sliding_window_is_a_warning(random_drafter):
    theirs = as_speculators(random_drafter().config.as_hf_config("float32"))
    theirs["transformer_layer_config"] |= {"layer_types": ["sliding_attention"],
                                           "sliding_window": 2048}  # fmt: skip
    findings = check_config_file(theirs, 10, "x")
    assert [(f.code, f.severity) for f in findings] == [("sliding-window", "warning")]


def split(folder, suffix, save):
    """The folder's weights in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    base = "model" if suffix == "safetensors" else "pytorch_model"
    files = [f"{base}-0000{i}-of-00002.{suffix}" for i in (1, 2)]
    weight_map = {}
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save({k: tensors[k] for k in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{base}.{suffix}.index.json").write_text(json.dumps(index))
    return files


@pytest.mark.parametrize(("suffix", "save"), [("safetensors", save_file), ("bin", torch.save)])
def test_shards_are_read(written, read, suffix, save):
    drafter, folder = written()
    files = split(folder, suffix, save)
    assert torch.equal(logits(read(folder)), logits(drafter))
    (folder / files[1]).unlink()
    with pytest.raises(UserError, match=rf"(?s){files[1]}, which is not there.*index\.json"):
        read(folder)


def test_a_pytorch_file_is_read_as_tensors_alone(written, read):
    drafter, folder = written()
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits(read(folder)), logits(drafter))
    bad = folder / "pytorch_model.bin"
    bad.write_bytes(pickle.dumps({"fc.weight": print}))
    with pytest.raises(UserError, match=r"(?s)can't be read.*pytorch_model\.bin"):
        read(folder)
    bad.write_bytes(b"")
    with pytest.raises(UserError, match=r"(?s)can't be read.*pytorch_model\.bin"):
        read(folder)


def test_old_names_of_the_slot_norms_are_read(written, read):
    """SGLang reads them from before they were called fc_norm."""
    drafter, folder = written(fc_norm=True)
    tensors = load_file(folder / "model.safetensors")
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, fc_norm=None, use_aux_norm=True)
    assert torch.equal(logits(read(folder)), logits(drafter))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"model_type": "kimi_k2"}, "model_type kimi_k2 without kv_lora_rank"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings with draft_vocab_size 90 of 300"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide over 3 key heads"),
        ({"head_dim": None, "num_attention_heads": 6}, "64 does not divide into 6 heads"),
        ({"rope_theta": None, "rope_parameters": None}, "no rope_theta"),
        ({"rope_theta": 5.0}, r"rope_parameters\.rope_theta is 100\.0, rope_theta is 5\.0"),
        ({"draft_vocab_size": 400}, "draft_vocab_size is 400"),
        ({"speculators_model_type": "eagle3"}, "without transformer_layer_config"),
        ({"speculators_model_type": "dflash"}, "type 'dflash'"),
    ],
)  # fmt: skip
def test_odd_configs_are_named(written, read, changes, named):
    _, folder = written()
    change_config(folder, **changes)
    with pytest.raises(UserError, match=rf"(?s){named}.*config\.json"):
        read(folder)


def test_a_shape_mismatch_names_tensor_found_and_expected(written, read):
    """A checkpoint of one option read under the config of another, and of another slot count."""
    _, folder = written()
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 5]}
    change_config(folder, **ids, eagle_config=ids)
    with pytest.raises(UserError, match=r"fc\.weight is \(64, 192\), expected \(64, 128\)"):
        read(folder)
    change_config(folder, fc_norm=True)
    with pytest.raises(UserError, match=r"(?s)fc_norm\.0\.weight is missing.*\(64,\)"):
        read(folder)


def test_expected_shapes_make_no_weights(random_drafter):
    """A drafter of a 1T model is described in no memory."""
    config = replace(random_drafter().config, hidden_size=8192, intermediate_size=2**20)
    assert expected_shapes(config)["midlayer.mlp.up_proj.weight"] == (2**20, 8192)


@pytest.mark.parametrize(
    ("rope", "code"),
    [
        ({"rope_type": "linear", "rope_theta": 1.0, "factor": 2.0}, "mla-rope"),
        (MLA_TYPE["rope_parameters"] | {"attention_factor": 1.0}, "mla-rope"),
        (without(MLA_TYPE["rope_parameters"], ["mscale"]), "lone-mscale"),
    ],
)
def test_rotary_settings_that_engines_read_otherwise(random_drafter, tiny_target, rope, code):
    config = random_drafter(**MLA_TYPE).config
    assert check_drafter_config(config, tiny_target.config) == []
    object.__setattr__(config, "rope_parameters", rope)
    assert [f.code for f in check_drafter_config(config, tiny_target.config)] == [code]


def test_absolute_ids_are_refused_without_t2d_too(written, read):
    """They used to be read as offsets: a drafter that names other tokens."""
    drafter, folder = written()
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = drafter.d2t + torch.arange(90)
    tensors.pop("t2d")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"(?s)d2t holds absolute target ids.*model\.safetensors"):
        read(folder)


def test_a_map_of_another_size_is_refused(written, read):
    _, folder = written()
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"t2d": torch.zeros(299, dtype=torch.bool)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"t2d is \(299,\)"):
        read(folder)


@pytest.mark.parametrize("key", ["qk_nope_head_dim", "v_head_dim"])
def test_missing_sizes_of_latent_attention_are_named(written, read, key):
    _, folder = written(**MLA_TYPE)
    change_config(folder, **{key: None})
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        read(folder)


def test_a_map_of_another_size_is_not_given_to_a_drafter(random_drafter):
    vocab = build_vocab_map(Counter({5: 1}), 300, 80)
    with pytest.raises(UserError, match=r"80 of 300 tokens\n  expected: 90 of 300"):
        set_vocab(random_drafter(draft_vocab_size=90), vocab)


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({}, []),
        ({"fc_norm": True, "norm_output": True}, []),
        ({"norm_before_residual": True}, ["sglang-norm-before-residual"]),
        ({"norm_before_fc": True}, []),
        (MLA_TYPE | {"norm_before_fc": True}, ["mla-norm-before-fc"]),
        ({"norm_before_fc": True, "fc_norm": True}, ["two-input-norms"]),
        ({"own_embeddings": True}, ["sglang-embeddings"]),
        ({"slots": (5,)}, ["sglang-skips-fc"]),
    ],
)
def test_what_no_engine_or_one_engine_alone_serves(random_drafter, changes, codes):
    findings = check_servable(random_drafter(**changes).config)
    assert [f.code for f in findings] == codes


def test_a_folder_tells_its_warnings_too(written, tiny_target, head):
    _, folder = written(norm_before_residual=True)
    found = check_drafter_folder(folder, tiny_target.config, head.embedding)
    assert [(f.code, f.severity) for f in found] == [("sglang-norm-before-residual", "warning")]
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("norm.weight")
    save_file(tensors, folder / "model.safetensors")
    codes = [f.code for f in check_drafter_folder(folder, tiny_target.config, head.embedding)]
    assert codes == ["sglang-norm-before-residual", "tensor-missing"]
    change_config(folder, hidden_act="gelu")
    codes = [f.code for f in check_drafter_folder(folder, tiny_target.config, head.embedding)]
    assert codes == ["drafter-layer"]
