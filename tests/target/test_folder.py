"""A target's folder is checked before anything is started with it; each fault is named."""

import json
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import check_target_folder, open_target
from eagle3lib.target.model import TargetHead

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tiny_target, tmp_path):
    """A copy of the tiny target, to be spoilt."""
    return shutil.copytree(tiny_target.folder, tmp_path / "target")


@pytest.fixture
def sharded(folder):
    """The same with its weights in two shards and an index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    where = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        part = {k: v for i, (k, v) in enumerate(sorted(tensors.items())) if i % 2 == number - 1}
        save_file(part, folder / name)
        where |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def change_config(folder, change):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(change(config) or config))


def refused(folder, pattern):
    with pytest.raises(UserError, match=pattern):
        open_target(str(folder))


def test_whole_folder_opens(folder, tiny_target):
    target = open_target(str(folder))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (10, 64, 300)
    assert check_target_folder(folder) == []
    assert target.fingerprint == tiny_target.fingerprint, "a copy is the same target"


def test_sharded_folder_opens_and_reads(sharded, tiny_target):
    head, whole = TargetHead(open_target(str(sharded))), TargetHead(tiny_target)
    assert torch.equal(head.head, whole.head)
    assert torch.equal(head.norm, whole.norm)
    assert torch.equal(head.embedding, whole.embedding)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "no config.json")


def test_config_without_sizes(folder):
    change_config(folder, lambda c: {k: v for k, v in c.items() if k != "num_hidden_layers"})
    refused(folder, r"(?s)lacks num_hidden_layers.*config\.json")


def test_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{ half a")
    refused(folder, r"(?s)JSON.*config\.json")


def test_no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    refused(folder, "no tokenizer")


def test_no_weights(folder):
    (folder / WEIGHTS).unlink()
    refused(folder, "no weights")


def test_every_fault_is_in_the_one_error(folder):
    (folder / "tokenizer.json").unlink()
    (folder / WEIGHTS).unlink()
    refused(folder, "(?s)no tokenizer.*no weights")


@pytest.mark.parametrize(
    ("keep", "pattern"),
    [
        (0, "cut short: 0 bytes"),
        (7, "cut short: 7 bytes"),
        (100, "cut short: 100 bytes, its header alone needs"),
        (-1, r"cut short: \d+ of \d+ bytes"),
        (-5000, r"cut short: \d+ of \d+ bytes"),
    ],
)
def test_weights_cut_short(folder, keep, pattern):
    """An aborted download: within the length, within the header, within the data."""
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, rf"{WEIGHTS} is {pattern}")


def test_broken_header(folder):
    path = folder / WEIGHTS
    path.write_bytes(struct.pack("<Q", 8) + b"no json!" + bytes(100))
    refused(folder, "broken header")


def test_only_the_bad_shard_is_named(sharded):
    bad, good = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"
    data = (sharded / bad).read_bytes()
    (sharded / bad).write_bytes(data[:-1])
    findings = check_target_folder(sharded)
    assert [f.where for f in findings] == [str(sharded / bad)]
    (sharded / bad).unlink()
    refused(sharded, f"{bad} is named by the index but missing")
    (sharded / bad).write_bytes(data)
    (sharded / good).unlink()
    refused(sharded, f"{good} is named by the index but missing")


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_unknown_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no target"):
        open_target(name)


def test_nested_text_config(folder, tiny_target):
    """Multimodal wrappers keep the language model's config, and tensors, under a prefix."""
    change_config(folder, lambda c: {"architectures": ["Wrapper"], "text_config": c})
    tensors = load_file(folder / WEIGHTS)
    save_file({f"language_model.{k}": v for k, v in tensors.items()}, folder / WEIGHTS)
    target = open_target(str(folder))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (10, 64, 300)
    assert target.config["architectures"] == tiny_target.config["architectures"]
    assert torch.equal(TargetHead(target).head, TargetHead(tiny_target).head)


def test_nested_text_config_without_sizes(folder):
    change_config(folder, lambda c: {"vocab_size": 300, "text_config": {"hidden_size": 64}})
    refused(folder, "lacks num_hidden_layers, vocab_size")


def test_fingerprint_changes_with_what_answers_depend_on(folder, tiny_target):
    seen = {tiny_target.fingerprint}

    def changed():
        fingerprint = open_target(str(folder)).fingerprint
        assert fingerprint not in seen
        seen.add(fingerprint)

    tensors = load_file(folder / WEIGHTS)
    tensors["model.norm.weight"][3] += 0.01
    save_file(tensors, folder / WEIGHTS)
    changed()
    change_config(folder, lambda c: c | {"rms_norm_eps": 1e-6})
    changed()
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    changed()
    (folder / "README.md").write_text("not a part of the model")
    assert open_target(str(folder)).fingerprint in seen


def test_stop_ids_come_from_both_files(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 250]}))
    assert open_target(str(folder)).stop_ids() == [2, 250]
    (folder / "generation_config.json").unlink()
    assert open_target(str(folder)).stop_ids() == [2]


def test_tied_head_is_the_embedding(folder):
    change_config(folder, lambda c: c | {"tie_word_embeddings": True})
    head = TargetHead(open_target(str(folder)))
    assert torch.equal(head.head, head.embedding)


def test_missing_tensor_is_named(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=r"lm_head\.weight"):
        TargetHead(open_target(str(folder)))
