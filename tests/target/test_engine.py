"""Capture through the real vLLM: the states are transformers' own."""

import pytest
import torch
from safetensors.torch import save_file
from tiny import save_target
from transformers import AutoTokenizer

from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.engine import FromVllm, check_cpu_mla, read_states
from eagle3lib.target.folder import open_target
from eagle3lib.target.layers import check_layers, match_slots
from eagle3lib.target.model import load_target
from eagle3lib.target.states import StateStore

ROW = [1, 17, 230, 4, 99]
TEXT = (
    "Water that falls on the hills finds its way to the sea. First it runs in small streams over "
    "stones and roots; these meet in the valley and make a river, which carries sand, leaves and "
    "sometimes whole trees. Where the land is flat the river slows and turns from side to side. "
    "People build their towns on its banks, because they need water to drink, to cook and to grow "
    "their food. They also build bridges, mills and dams. A dam holds the water back and makes a "
    "lake; the falling water drives a turbine, and the turbine makes electricity for the houses. "
    "In winter the lake may freeze, and then children skate on it until the ice gets thin again in "
    "the first warm days of March. In summer they swim."
)


def written(folder, states, ids):
    path = folder / "cmpl-1.safetensors"
    path.with_name(f"{path.name}.lock").touch()
    save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
    return path


def test_read_states_takes_the_files_away(tmp_path):
    states = torch.randn(5, 3, 8)
    path = written(tmp_path, states, ROW)
    assert torch.equal(read_states(path, ROW, 3), states)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "ids", "named"),
    [
        ((5, 3, 8), [1, 17, 230, 99, 4], "other tokens"),  # speculators#365: paired by order
        ((3, 3, 8), ROW, "prefix cache off"),  # vllm#44485: only what was computed is written
        ((5, 2, 8), ROW, "shape"),
    ],
)
def test_read_states_refuses(tmp_path, shape, ids, named):
    with pytest.raises(UserError, match=rf"(?s){named}"):
        read_states(written(tmp_path, torch.randn(shape), ids), ROW, 3)


def test_read_states_of_a_file_cut_short(tmp_path):
    path = written(tmp_path, torch.randn(5, 3, 8), ROW)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="can't be read"):
        read_states(path, ROW, 3)


def cosines(found, expected):
    """Cosine of each state [T, L]."""
    return torch.cosine_similarity(found.float(), expected.float(), dim=-1)


def per_slot(row):
    """[T, S + 1, H] of a stored row."""
    return torch.cat((row.slots.unflatten(1, (-1, row.last.shape[1])), row.last[:, None]), dim=1)


def both(target, rows, slots, dtype, work, **engine):
    with InProcess(target, slots, dtype, 512) as here:
        expected = here.states(rows)
    with FromVllm(target, slots, dtype, work, 256, **engine) as source:
        found = source.states(rows)
    assert [f.shape for f in found] == [e.shape for e in expected]
    assert not list(work.glob(".from-engine-*")), "nothing is left on the way"
    return found, expected


def rows_of(vocab, lengths, seed=0):
    """Rows with a common beginning, of which a prefix cache would give back a part."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randint(3, vocab, (24,), generator=generator).tolist()
    tails = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    return [[1, *common, *tail] for tail in tails]


@pytest.mark.engine
def test_vllm_states_of_smollm2_are_transformers(tmp_path, make_row):
    """The same store from either source: bf16, many at once, a slot order of our own; chunked
    prefill cuts the longest row."""
    target = open_target("smollm2-135m-instruct")
    encode = AutoTokenizer.from_pretrained(target.folder).encode
    ids = [encode(TEXT[:n]) for n in (30, 700, 90, 10, 400, 250, 60, 5, 150, 300)]
    rows = [make_row(i, row[:1], row[1:]) for i, row in enumerate(ids)]
    slots, flags = (15, 2, 27), ("--max-num-batched-tokens", "64")
    here = InProcess(target, slots, "bfloat16", 512)
    engine = FromVllm(target, slots, "bfloat16", tmp_path / "work", 256, extra_flags=flags)
    stores = []
    for name, source in (("here", here), ("engine", engine)):
        capture(target, rows, tmp_path / name, slots=slots, dtype="bfloat16", batch_tokens=512,
                shard_rows=6, source=source)  # fmt: skip
        stores.append(StateStore(tmp_path / name))
    assert not list((tmp_path / "work").glob(".from-engine-*")), "nothing is left on the way"
    expected, found = ({r.entry.id: r for r in store.rows(store.entries)} for store in stores)
    assert [found[row.id].token_ids.tolist() for row in rows] == ids
    near = [cosines(per_slot(found[i]), per_slot(expected[i])) for i in found]
    assert torch.cat(near).mean(0).min() > 0.9998
    assert torch.cat(near).min() > 0.995  # one position in bf16, by other kernels
    model = load_target(target, "bfloat16")
    assert check_layers(match_slots(stores[1], model, stores[1].entries[4:8]), 30) == []


def test_float32_mla_on_a_cpu_is_refused_before_loading(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    target = open_target(str(save_target(tmp_path / "target", "deepseek_v3")))
    with pytest.raises(UserError, match="VLLM_MLA_DISABLE=1"):
        check_cpu_mla(target, "float32", on_gpu=False)
    check_cpu_mla(target, "bfloat16", on_gpu=False)
    check_cpu_mla(target, "float32", on_gpu=True)


@pytest.mark.engine
def test_vllm_states_of_a_tiny_mla_target_are_transformers(tmp_path, monkeypatch):
    """In fp32: a random router, in bf16, sends tokens to other experts than transformers does."""
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    target = open_target(str(save_target(tmp_path / "target", "deepseek_v3")))
    rows = rows_of(290, (7, 40, 3, 90))
    found, expected = both(target, rows, (1, 3, 5), "float32", tmp_path / "work")
    for f, e in zip(found, expected, strict=True):
        assert cosines(f, e).min() > 0.99999
