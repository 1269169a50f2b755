"""Targets of real families: loaded whole, recorded at the right places, their heads their own."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, IMAGE_ID, save_target

from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import capture, teacher_agreement
from eagle3lib.target.folder import open_target
from eagle3lib.target.forward import common_beginning, forward_packed, forward_states
from eagle3lib.target.int4 import GROUP, quantised
from eagle3lib.target.layers import all_states
from eagle3lib.target.model import (
    TargetHead,
    best_device,
    decoder_of,
    load_target,
    record_states,
)
from eagle3lib.target.packing import can_pack
from eagle3lib.target.states import StateStore

SLOTS = (3, 1, 5)
each_family = pytest.mark.parametrize("family", FAMILIES)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """family -> (target, loaded model), each made once."""
    made = {}

    def get(family):
        if family not in made:
            folder = save_target(tmp_path_factory.mktemp("families") / family, family)
            target = open_target(str(folder))
            made[family] = target, load_target(target, "float32")
        return made[family]

    return get


def random_rows(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 290, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0]


@each_family
def test_slots_are_hf_hidden_states(families, family):
    """By transformers' own output_hidden_states; ``last`` goes through the head to the logits."""
    target, model = families(family)
    ids = random_rows([23])[0]
    states = forward_states(model, [ids], SLOTS)[0]
    expected = all_states(model, ids)
    for place, slot in enumerate(SLOTS):
        close(states[:, place], expected[slot])
    close(states[:, -1], expected[target.num_layers])
    close(TargetHead(target).normed(states[:, -1]), expected[target.num_layers + 1])
    close(TargetHead(target).logits(states[:, -1]), logits_of(model, ids))


@each_family
def test_batch_of_eight_is_eight_batches_of_one(families, family):
    """sglang#4997: right for batch 1, shuffled beyond it. Sliding windows hide part of the long."""
    _, model = families(family)
    assert can_pack(decoder_of(model))
    rows = random_rows((23, 1, 9, 40, 2, 9, 17, 31))
    for row, states in zip(rows, forward_states(model, rows, SLOTS), strict=True):
        with torch.no_grad(), record_states(model, SLOTS) as alone:
            model(torch.tensor([row]), use_cache=False)
        close(states, torch.stack(alone, dim=2)[0])


@each_family
def test_a_shared_beginning_is_computed_once_and_changes_nothing(families, family, monkeypatch):
    """Windows of 8 begin within it, at its end, and behind it."""
    _, model = families(family)
    first = random_rows([11], seed=5)[0]
    rows = [first + tail for tail in random_rows((3, 20, 1, 9))]
    assert common_beginning(rows) == 11
    laid = []

    def counted(model, ids, *rest, **more):
        laid.append(len(ids))
        return forward_packed(model, ids, *rest, **more)

    monkeypatch.setattr("eagle3lib.target.forward.forward_packed", counted)
    together = forward_states(model, rows, SLOTS)
    assert laid == [11 + 3 + 20 + 1 + 9]
    for row, states in zip(rows, together, strict=True):
        close(states, forward_states(model, [row], SLOTS)[0])


@pytest.mark.parametrize(
    ("rows", "tokens"),
    [
        ([[1, 2, 3]], 0),
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3, 9]], 2),
        ([[1, 2], [1, 2, 4]], 1),  # each row keeps one of its own
        ([[5, 6, 7], [5, 6, 7]], 2),
        ([[4, 1], [3, 1]], 0),
    ],
)
def test_common_beginnings(rows, tokens):
    assert common_beginning(rows) == tokens


@each_family
def test_head_agrees_with_own_greedy_answers(families, family, make_row, tmp_path):
    target, model = families(family)
    rows = []
    for i, prompt in enumerate(random_rows((5, 8, 11))):
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(logits_of(model, ids)[-1].argmax()))
        rows.append(make_row(i, prompt, ids[len(prompt) :], looping=False))
    capture(target, rows, tmp_path, slots=SLOTS, dtype="float32", batch_tokens=64, shard_rows=2)
    head, store = TargetHead(target), StateStore(tmp_path)
    counts = [
        teacher_agreement(head, r.token_ids, r.last, r.entry.prompt_tokens)
        for r in store.rows(store.entries)
    ]
    assert counts == [(10, 10)] * 3


@pytest.mark.parametrize("family", ["kimi_k2", "kimi_k25"])
def test_kimi_is_its_text_tower(families, family):
    """Made with one seed, the three hold the same weights under other names."""
    ids = random_rows([12])[0]
    plain, named = families("deepseek_v3")[1], families(family)[1]
    assert torch.equal(logits_of(plain, ids), logits_of(named, ids))


@pytest.mark.parametrize(
    ("family", "like", "of"),
    [("int4", "llama", "_proj."), ("kimi_k25_int4", "deepseek_v3", ".experts.")],
)
def test_int4_is_unpacked_as_written(families, tmp_path, family, like, of):
    """Scale times value, by own arithmetic on the weights that were packed."""
    folder = shutil.copytree(families(like)[0].folder, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if of in name:
            values, scale = quantised(weight)
            tensors[name] = values * scale.repeat_interleave(GROUP, 1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = load_target(open_target(str(folder)), "float32")
    ids = random_rows([12])[0]
    close(logits_of(families(family)[1], ids), logits_of(expected, ids))
    assert (logits_of(expected, ids) - logits_of(families(like)[1], ids)).abs().max() > 0.1


def test_missing_weight_is_refused(families, tmp_path):
    """transformers draws a missing weight at random and goes on: states of nobody."""
    folder = shutil.copytree(families("qwen3")[0].folder, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.self_attn.q_norm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"(?s)1 weights are not in .*3\.self_attn\.q_norm"):
        load_target(open_target(str(folder)), "float32")


def test_image_tokens_without_an_image_are_refused(families, make_row, tmp_path):
    target, _ = families("kimi_k25")
    rows = [make_row(0, [1, 2, 3], [4, 5]), make_row(1, [1, IMAGE_ID, IMAGE_ID, 3], [4, 5])]
    with pytest.raises(UserError, match=r"(?s)1 prompts hold image tokens.*row-01.*messages"):
        capture(target, rows, tmp_path, slots=SLOTS, dtype="float32", batch_tokens=64, shard_rows=2)
    assert open_target(str(families("llama")[0].folder)).media_ids == set()


def test_unknown_architecture_wants_trust(families, tmp_path):
    """Code of a model's folder is not run unless asked for, and then only by transformers."""
    folder = shutil.copytree(families("llama")[0].folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own_llama", "auto_map": {"AutoConfig": "code.OwnConfig",
               "AutoModelForCausalLM": "code.OwnLlama"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnLlama(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    target = open_target(str(folder))
    with pytest.raises(UserError, match=r"(?s)no model of type 'own_llama'.*trust_remote_code"):
        load_target(target, "float32")
    model = load_target(target, "float32", trust_remote_code=True)
    ids = random_rows([12])[0]
    assert torch.equal(logits_of(model, ids), logits_of(families("llama")[1], ids))


@pytest.fixture
def bin_folder(families, tmp_path):
    folder = shutil.copytree(families("llama")[0].folder, tmp_path / "target")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_bin_files_are_read(bin_folder, families):
    target, ids = open_target(str(bin_folder)), random_rows([12])[0]
    plain, model = families("llama")
    assert torch.equal(TargetHead(target).head, TargetHead(plain).head)
    loaded = load_target(target, "float32")
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


class Evil:
    def __reduce__(self):
        return print, ("run by the pickle",)


def test_bin_files_run_nothing(bin_folder, capsys):
    torch.save({"lm_head.weight": Evil()}, bin_folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="more than tensors"):
        TargetHead(open_target(str(bin_folder)))
    assert "run by the pickle" not in capsys.readouterr().out


def test_bin_file_cut_short(bin_folder):
    path = bin_folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(UserError, match=r"pytorch_model\.bin is cut short"):
        open_target(str(bin_folder))


def test_a_target_that_can_not_be_packed_is_padded(families, monkeypatch):
    _, model = families("llama")
    rows = random_rows((23, 1, 9))
    packed = forward_states(model, rows, SLOTS)
    monkeypatch.setattr("eagle3lib.target.capture.can_pack", lambda decoder: False)
    for one, other in zip(packed, forward_states(model, rows, SLOTS), strict=True):
        close(one, other)


def test_recurrent_layers_are_not_packed():
    from transformers import Qwen3NextConfig, Qwen3NextModel

    tiny = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 4, "num_experts": 2,
            "intermediate_size": 32, "moe_intermediate_size": 16, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16}  # fmt: skip
    assert not can_pack(Qwen3NextModel(Qwen3NextConfig(**tiny)))


def test_norm_other_than_rms_is_refused(families, tmp_path):
    folder = shutil.copytree(families("llama")[0].folder, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    config["layer_norm_eps"] = config.pop("rms_norm_eps")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no rms_norm_eps"):
        TargetHead(open_target(str(folder)))


def test_devices():
    assert best_device("cpu") == "cpu"
    assert best_device("auto") in {"cpu", "cuda", "mps", "xpu"}
    with pytest.raises(UserError, match="no device 'cuda:99'"):
        best_device("cuda:99")
