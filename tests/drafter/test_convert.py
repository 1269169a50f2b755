"""Conversion is lossless or refused: tensors bit for bit, logits, and the meaning of the config."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.drafter.config import MLA, OPTIONS
from eagle3lib.drafter.convert import GOALS, convert_drafter
from eagle3lib.drafter.formats import (
    READERS,
    RULES,
    read_layer_ids,
    rules_table,
    sglang_ids,
    sglang_slots,
)
from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.drafter.weights import read_weights
from eagle3lib.lab.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
MLA_TYPE = {
    "mla": MLA(24, 20, 12, 8, 10), "head_dim": 20, "num_key_value_heads": 4,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 1.0,
        "original_max_position_embeddings": 32, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
KINDS = {
    "plain": {},
    "EAGLE 3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "other slots": {"slots": (1, 2, 5, 9), "fc_norm": True},
    "whole vocabulary": {"draft_vocab_size": 300},
    "mla": MLA_TYPE,
}


def logits(drafter):
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in (9, 14)]
    states = torch.randn(23, drafter.fc.weight.shape[1], generator=generator)
    with torch.no_grad():
        made = unroll(drafter, PackedRows.pack(rows, [3, 6]), states, 2, feed="draft")
        return torch.stack([drafter.logits(step.hidden) for step in made])


@pytest.fixture
def read(tiny_target, target_head):
    return lambda p: read_drafter(p, tiny_target.config, target_head.embedding, torch.float32)


def same_tensors(one, other):
    a, b = read_weights(one)[0], read_weights(other)[0]
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a
    )


@pytest.mark.parametrize(
    ("goal", "changes"),
    [
        pytest.param(goal, changes, id=f"{kind} as {goal}")
        for kind, changes in KINDS.items()
        for goal in GOALS
        if not (goal == "speculators" and kind == "mla")  # refused, see below
    ],
)
def test_a_round_trip_changes_nothing(make_folder, read, tiny_target, tmp_path, changes, goal):
    source = make_folder(**changes)
    there = convert_drafter(source.path, tmp_path / "there", goal, tiny_target)
    back = convert_drafter(there, tmp_path / "back", "both", tiny_target)
    for folder in (there, back):
        assert same_tensors(folder, source.path)
        assert read(folder).config == source.drafter.config
        assert torch.equal(logits(read(folder)), logits(source.drafter))
    assert json.loads((back / "config.json").read_text()).items() >= source.config.items()


def test_all_options_survive_speculators_style(make_folder, read, tiny_target, tmp_path):
    source = make_folder(**dict.fromkeys(OPTIONS, True))
    there = convert_drafter(source.path, tmp_path / "s", "speculators", tiny_target)
    config = json.loads((there / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == tiny_target.name
    assert all(config[o] is True for o in OPTIONS) and "eagle_config" not in config
    assert not {k for k in load_file(there / "model.safetensors") if k.startswith("midlayer")}
    assert read(there).config == source.drafter.config


def test_dtypes_are_kept(make_folder, tiny_target, tmp_path):
    """A conversion through a model in fp32 would say equal and write twice the bytes."""
    source = make_folder()
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in source.tensors.items()}
    save_file(half, source.path / "model.safetensors")
    there = convert_drafter(source.path, tmp_path / "there", "both", tiny_target)
    assert same_tensors(there, source.path)
    assert json.loads((there / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_shards_of_a_limited_size(make_folder, read, tiny_target, tmp_path, monkeypatch):
    source = make_folder(intermediate_size=2048)
    there = convert_drafter(source.path, tmp_path / "s", "both", tiny_target, max_shard_mib=1)
    files = sorted(there.glob("*.safetensors"))
    assert len(files) > 1 and (there / "model.safetensors.index.json").exists()
    assert all(f.stat().st_size < 1.1 * 2**20 for f in files)
    assert same_tensors(there, source.path)
    assert torch.equal(logits(read(there)), logits(source.drafter))
    one = convert_drafter(there, tmp_path / "one", "both", tiny_target)
    assert [f.name for f in one.glob("*.safetensors")] == ["model.safetensors"]


def test_pickled_weights_and_old_names_become_new_ones(make_folder, read, tiny_target, tmp_path):
    source = make_folder(fc_norm=True)
    tensors = source.tensors
    for i, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{i}.weight")
    (source.path / "model.safetensors").unlink()
    torch.save(tensors, source.path / "pytorch_model.bin")
    source.change(fc_norm=None, use_aux_norm=True)
    there = convert_drafter(source.path, tmp_path / "there", "both", tiny_target)
    assert "fc_norm.0.weight" in load_file(there / "model.safetensors")
    assert read(there).config == source.drafter.config
    assert torch.equal(logits(read(there)), logits(source.drafter))


def test_keys_that_no_style_knows_are_carried_over(make_folder, tiny_target, tmp_path):
    source = make_folder().change(initializer_range=0.5, pad_token_id=7)
    for goal in ("both", "speculators"):
        there = convert_drafter(source.path, tmp_path / goal, goal, tiny_target)
        config = json.loads((there / "config.json").read_text())
        layer = config.get("transformer_layer_config", config)
        assert (layer["initializer_range"], layer["pad_token_id"]) == (0.5, 7)


REFUSED = {
    "norm_before_residual": ({"norm_before_residual": True}, {}, "norm_before_residual is on"),
    "own embeddings": ({"own_embeddings": True}, {}, "embeddings of its own"),
    "sliding window": (
        {}, {"sliding_window": 64, "layer_types": ["sliding_attention"]}, "looks back 64 tokens",
    ),
    "logit_scale": ({}, {"logit_scale": 0.5}, "logit_scale 0.5"),
}  # fmt: skip


@pytest.mark.parametrize(("made", "keys", "told"), REFUSED.values(), ids=REFUSED)
def test_what_sglang_cant_express_stops_and_vllm_takes(
    make_folder, read, tiny_target, tmp_path, made, keys, told
):
    """Never dropped in silence: a drafter that lost its window or norm is never accepted."""
    source = make_folder(**made).change(**keys)
    for goal in ("both", "sglang"):
        with pytest.raises(UserError, match=told):
            convert_drafter(source.path, tmp_path / "no", goal, tiny_target)
        assert not (tmp_path / "no").exists()
    there = convert_drafter(source.path, tmp_path / "yes", "vllm", tiny_target)
    assert read(there).config == source.drafter.config
    written = json.loads((there / "config.json").read_text())
    assert {k: written.get(k) for k in keys} == keys


def test_a_window_survives_speculators_style_and_back(make_folder, tiny_target, tmp_path):
    keys = {"sliding_window": 64, "layer_types": ["sliding_attention"], "use_sliding_window": True}
    source = make_folder().change(**keys)
    there = convert_drafter(source.path, tmp_path / "s", "speculators", tiny_target)
    back = convert_drafter(there, tmp_path / "v", "vllm", tiny_target)
    assert json.loads((back / "config.json").read_text()).items() >= keys.items()


def test_speculators_style_has_no_mla(make_folder, tiny_target, tmp_path):
    with pytest.raises(UserError, match="MLA-type drafter in speculators style"):
        convert_drafter(make_folder(**MLA_TYPE).path, tmp_path / "s", "speculators", tiny_target)


def test_without_the_target_only_what_needs_none(make_folder, tmp_path):
    source = make_folder()
    convert_drafter(source.path, tmp_path / "a", "both")
    with pytest.raises(UserError, match="names its target"):
        convert_drafter(source.path, tmp_path / "b", "speculators")
    nested = make_folder("n").change(**{IDS: None})
    with pytest.raises(UserError, match="no layer ids at the top level"):
        convert_drafter(nested.path, tmp_path / "c", "both")
    other = make_folder("o", slots=(3, 5, 8))
    convert_drafter(other.path, tmp_path / "d", "vllm")
    with pytest.raises(UserError, match="numbered differently"):
        convert_drafter(other.path, tmp_path / "e", "both")
    own = make_folder("p", own_embeddings=True)
    with pytest.raises(UserError, match="copies of the target's, or"):
        convert_drafter(own.path, tmp_path / "f", "both")


def test_a_folder_that_is_there_is_never_overwritten(make_folder, tiny_target, tmp_path):
    source = make_folder()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("x")
    with pytest.raises(UserError, match="there already"):
        convert_drafter(source.path, tmp_path / "there", "both", tiny_target)
    with pytest.raises(UserError, match="there already"):
        convert_drafter(source.path, source.path, "both", tiny_target)


# One folder, both engines: the ids that each takes are the same states

TARGETS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 61},
    "qwen3": {"model_type": "qwen3", "num_hidden_layers": 36},
    "kimi": {"model_type": "kimi_k2", "num_hidden_layers": 61},
    "deepseek": {"model_type": "deepseek_v3", "num_hidden_layers": 61},
    "gpt_oss": {"model_type": "gpt_oss", "num_hidden_layers": 24},
}
SLOTS = [(2, 12, 21), (3, 12, 20), (2, 5), (4, 8, 16, 24), (1, 12, 21)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("slots", SLOTS, ids=str)
def test_every_reader_takes_the_same_states(random_drafter, target, slots):
    from eagle3lib.drafter.formats import serving_config

    config = random_drafter(slots=slots).config
    if sglang_ids(slots, target) is None:
        assert target["model_type"] in ("kimi_k2", "deepseek_v3") and slots[0] == 1
        with pytest.raises(UserError, match="can't be told slots"):
            serving_config(config, "bfloat16", target, for_sglang=True)
        return
    written = serving_config(config, "bfloat16", target, for_sglang=True)
    for readers in READERS.values():
        assert {read_layer_ids(written, r, target).slots for r in readers} == {slots}


def test_the_three_lines_of_the_classic_trap():
    """n = 61: before-layer ids 2, 30, 58 and output ids 1, 29, 57 are the same tensors."""
    for name in ("llama", "kimi"):
        assert sglang_slots([1, 29, 57], TARGETS[name]) == (2, 30, 58)
    assert sglang_slots([2, 30, 58], TARGETS["kimi"]) == (2, 30, 58)
    assert sglang_slots([2, 30, 58], TARGETS["llama"]) == (3, 31, 59)
    assert sglang_slots([4, 12, 24], TARGETS["gpt_oss"]) == (4, 12, 24)
    assert sglang_slots([4, 12, 23], TARGETS["gpt_oss"]) == (5, 13, 24)


def test_the_rules_name_their_source_and_the_document_is_in_step():
    from eagle3lib.lab.machine import ROOT

    assert all(r.source and r.vllm and r.sglang for r in RULES)
    assert rules_table() in (ROOT / "docs/engines.md").read_text()


def test_the_export_writes_ids_for_the_targets_class(random_drafter, tiny_target, tmp_path):
    """A Kimi target with slots 3, 5, 8: output ids would be read as they are, one layer off."""
    from eagle3lib.drafter.checkpoint import write_drafter

    kimi = dataclasses.replace(tiny_target, config=tiny_target.config | {"model_type": "kimi_k2"})
    drafter = random_drafter(slots=(3, 5, 8))
    write_drafter(tmp_path, drafter, torch.float32, kimi.config)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"][IDS] == config[IDS] == [3, 5, 8]


# The command


def test_the_command_exits_1_when_the_goal_cant_express_it(
    eagle3, make_folder, tiny_target, tmp_path
):
    source, options = make_folder().path, ("--target", tiny_target.folder)
    code, out, _ = eagle3("convert", source, tmp_path / "a", *options, "--max-shard-mib", 1)
    assert code == 0 and str(tmp_path / "a") in out
    source = make_folder("r", norm_before_residual=True).path
    code, _, err = eagle3("convert", source, tmp_path / "b", *options)
    assert code == 1 and "norm_before_residual" in err and "Traceback" not in err
    code, _, err = eagle3("convert", source, tmp_path / "b", "--to", "trt")
    assert code == 2 and "no goal 'trt'" in err
