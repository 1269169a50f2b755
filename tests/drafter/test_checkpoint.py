"""Serving folders: written and read back they give equal logits; every fault is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.checkpoint import read_drafter, write_drafter
from eagle3lib.drafter.checks import check_drafter_config
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.model import PackedRows, unroll
from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.lab.errors import UserError
from eagle3lib.target.model import TargetHead

FLOAT = torch.float32


@pytest.fixture(scope="module")
def head(tiny_target):
    return TargetHead(tiny_target)


@pytest.fixture(scope="module")
def drafter(random_drafter, head):
    made = random_drafter(20, draft_vocab_size=90)
    with torch.no_grad():
        made.embed_tokens.weight.copy_(head.embedding)  # a folder without embeddings uses these
    return made


@pytest.fixture
def folder(drafter, tmp_path):
    write_drafter(tmp_path, drafter, FLOAT)
    return tmp_path


@pytest.fixture
def read(tiny_target, head):
    def run(folder, dtype=FLOAT, **target_changes):
        return read_drafter(folder, tiny_target.config | target_changes, head.embedding, dtype)

    return run


def change_tensors(folder, change, **given):
    """Load the weights, let ``change`` edit the dict, add ``given``, write them again."""
    tensors = load_file(folder / "model.safetensors")
    tensors = change(tensors) or tensors
    save_file(tensors | given, folder / "model.safetensors")


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def logits(drafter):
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(0, 300, (n,), generator=generator) for n in (12, 20)]
    states = torch.randn(32, 3 * 64, generator=generator).to(drafter.fc.weight.dtype)
    with torch.no_grad():
        made = unroll(drafter, PackedRows.pack(rows, [3, 9]), states, 3, feed="draft")
        return torch.stack([drafter.logits(step.hidden) for step in made])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_and_read_gives_equal_logits(random_drafter, head, read, tmp_path, dtype):
    """Bit for bit in the dtype of the file, the rotary table and the vocabulary included."""
    drafter = random_drafter(20, draft_vocab_size=90)
    drafter.embed_tokens.weight.data.copy_(head.embedding)
    write_drafter(tmp_path, drafter, dtype)
    again = read(tmp_path, dtype)
    assert again.fc.weight.dtype == dtype
    assert torch.equal(logits(again), logits(drafter.to(dtype)))
    assert torch.equal(again.d2t, drafter.d2t)
    assert torch.equal(again.t2d, drafter.t2d)


def test_the_file_holds_what_engines_look_for(folder):
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["fc.weight"].shape == (64, 3 * 64)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (2 * 16, 2 * 64)
    assert tensors["lm_head.weight"].shape == (90, 64)
    assert not [name for name in tensors if "rotary" in name or "embed" in name]


def test_layers_0_names_are_read_too(drafter, folder, read):
    def rename(tensors):
        return {k.replace("midlayer.", "layers.0."): v for k, v in tensors.items()}

    change_tensors(folder, rename)
    assert torch.equal(logits(read(folder)), logits(drafter))


def test_own_embeddings_are_kept(drafter, folder, read):
    other = torch.randn(300, 64)
    change_tensors(folder, lambda t: None, **{"embed_tokens.weight": other})
    assert torch.equal(read(folder).embed_tokens.weight, other)


def test_missing_t2d_is_made_from_d2t(drafter, folder, read):
    change_tensors(folder, lambda t: {k: v for k, v in t.items() if k != "t2d"})
    assert torch.equal(read(folder).t2d, drafter.t2d)


def test_whole_vocabulary_needs_no_d2t(random_drafter, head, read, tmp_path):
    whole = random_drafter(21)
    write_drafter(tmp_path, whole, FLOAT)
    change_tensors(tmp_path, lambda t: {k: v for k, v in t.items() if k not in ("d2t", "t2d")})
    again = read(tmp_path)
    ids = torch.arange(300)
    assert torch.equal(again.target_ids(ids), ids)


def without(name):
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


@pytest.mark.parametrize(
    ("change", "given", "named"),
    [
        (without("fc.weight"), {}, r"fc\.weight is missing"),
        (without("midlayer.hidden_norm.weight"), {}, r"midlayer\.hidden_norm\.weight is missing"),
        (without("x"), {"fc.weight": torch.zeros(64, 64)}, r"fc\.weight is \(64, 64\)"),
        (without("x"), {"fc_norm.0.weight": torch.ones(64)}, r"fc_norm\.0\.weight has no place"),
        (without("d2t"), {}, "no d2t"),
        (without("x"), {"d2t": torch.zeros(90, dtype=torch.int32)}, "d2t is torch.int32"),
        (without("t2d"), {"d2t": torch.zeros(80, dtype=torch.int64)}, r"d2t is \(80,\)"),
    ],
)  # fmt: skip
def test_faults_of_the_weights_are_named(folder, read, change, given, named):
    change_tensors(folder, change, **given)
    with pytest.raises(UserError, match=rf"(?s){named}.*model\.safetensors"):
        read(folder)


def test_every_fault_is_in_the_one_error(folder, read):
    change_tensors(folder, without("norm.weight"), **{"fc.weight": torch.zeros(64, 64)})
    with pytest.raises(UserError) as caught:
        read(folder)
    assert "norm.weight" in str(caught.value)
    assert "fc.weight" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5, 200, -100])
def test_truncated_weights_are_named(folder, read, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"(?s)can't be read.*model\.safetensors"):
        read(folder)


def test_missing_files_are_named(folder, read):
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        read(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json"):
        read(folder)


@pytest.mark.parametrize("key", ["hidden_size", "rms_norm_eps", "vocab_size"])
def test_missing_config_key_is_named(folder, read, key):
    change_config(folder, lambda c: c.pop(key))
    with pytest.raises(UserError, match=rf"(?s){key}.*config\.json"):
        read(folder)


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"vocab_size": 301}])
def test_drafter_of_another_target_is_refused(folder, read, change):
    (name, value), = change.items()  # fmt: skip
    with pytest.raises(UserError, match=f"(?s)target of {name} .*{name} {value}"):
        read(folder, **change)


def test_short_rotary_table_is_a_warning_alone(drafter, tiny_target):
    longer = tiny_target.config | {"max_position_embeddings": 4096}
    findings = check_drafter_config(drafter.config, longer)
    assert [(f.code, f.severity) for f in findings] == [("short-rotary-table", "warning")]
    assert check_drafter_config(drafter.config, tiny_target.config) == []


CONFIGS = {
    "gqa": {},
    "stop ids": {"bos_token_id": 1, "eos_token_id": [2, 7]},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        }
    },
    "narrower than the target": {"hidden_size": 48, "target_hidden_size": 64, "head_dim": 12},
    "other slots": {"slots": (1, 4, 9)},
}  # fmt: skip


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_config_round_trip(random_drafter, tmp_path, changes):
    config = random_drafter(draft_vocab_size=90, **changes).config
    (tmp_path / "config.json").write_text(json.dumps(config.as_hf_config("float32")))
    assert read_drafter_config(tmp_path, 10) == config


def test_layer_ids_where_each_engine_looks(random_drafter):
    """vLLM reads the top level, before-layer ids; SGLang the nested ones, of the layer's output."""
    written = random_drafter(slots=(2, 5, 7)).config.as_hf_config("bfloat16")
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]


def set_ids(folder, top, nested):
    def change(config):
        config.pop("eagle_aux_hidden_state_layer_ids", None)
        if top is not None:
            config["eagle_aux_hidden_state_layer_ids"] = list(top)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(nested)}

    change_config(folder, change)


@pytest.mark.parametrize("nested", [[2, 5, 8], [0, 4, 6], [2, 5], [3, 6, 8]])
def test_layer_ids_that_contradict_each_other_are_refused(folder, read, nested):
    set_ids(folder, [2, 5, 7], nested)
    with pytest.raises(UserError, match=r"layer ids \[2, 5, 7\] at the top level, \["):
        read(folder)


def test_layer_ids_are_read_by_their_place(folder):
    def slots():
        return read_drafter_config(folder, 10).slots

    set_ids(folder, [3, 4, 8], [2, 3, 7])
    assert slots() == (3, 4, 8)
    set_ids(folder, None, [2, 3, 7])
    assert slots() == (3, 4, 8), "nested ids alone are of a layer's output"
    set_ids(folder, None, [2, 5, 7])
    assert slots() == (2, 5, 7), "the default before-layer ids, as some tools nest them"
    change_config(folder, lambda c: c.pop("eagle_config"))
    assert slots() == default_slots(10) == (2, 5, 7)


@pytest.mark.parametrize(
    ("layers", "slots"), [(7, (2, 3, 4)), (10, (2, 5, 7)), (30, (2, 15, 27)), (61, (2, 30, 58))]
)
def test_default_slots(layers, slots):
    assert default_slots(layers) == slots


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_colliding_slots_are_refused(layers):
    with pytest.raises(UserError, match=f"{layers} layers"):
        default_slots(layers)


@pytest.mark.parametrize("slots", [(5, 2, 7), (2, 2, 7), (0, 5, 7), (2, 5, 11)])
def test_odd_slots_are_refused(folder, read, slots):
    set_ids(folder, slots, slots)
    with pytest.raises(UserError, match="the drafter's slots are"):
        read(folder)
