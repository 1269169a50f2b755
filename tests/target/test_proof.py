"""Each fault that a capture can have, planted into a healthy store, is named."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.layers import check_layers, match_slots
from eagle3lib.target.model import TargetHead
from eagle3lib.target.proof import check_states, gather_facts
from eagle3lib.target.states import StateStore

FLOOR = 0.9


@pytest.fixture
def folder(tiny_states, tmp_path):
    """A copy of the healthy store, to be spoilt."""
    return shutil.copytree(tiny_states, tmp_path / "states")


def spoil(folder, change, shard="shard-00001"):
    """Change in place the slots [N, S, H], last states [A, H] and ids [N] of a shard."""
    path = folder / f"{shard}.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors["hidden_states"], tensors["last"], tensors["token_ids"])
    save_file(tensors, path)


SHARDS = ("shard-00000", "shard-00001", "shard-00002")


def findings(folder, rows, target, *, greedy=True):
    facts = gather_facts(StateStore(folder), rows, TargetHead(target), floor=FLOOR)
    return {f.code: f for f in check_states(facts, FLOOR, greedy=greedy)}


def test_a_healthy_store_has_no_findings(tiny_states, tiny_rows, tiny_target):
    assert findings(tiny_states, tiny_rows, tiny_target) == {}


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        (lambda h, *_: h[7, 1].fill_(torch.nan), {"states-not-finite", "states-damaged"}),
        (lambda h, *_: h[7].zero_(), {"states-zero", "states-damaged"}),
        (lambda h, *_: h[8].copy_(h[7]), {"states-damaged"}),
        (lambda _, last, __: last[3].zero_(), {"states-zero"}),
        (lambda *both: both[2][3].add_(1), {"states-damaged"}),  # not the ids of the index
    ],
)
def test_damage_is_named_with_its_shard(folder, tiny_rows, tiny_target, change, codes):
    spoil(folder, change)
    found = findings(folder, tiny_rows, tiny_target)
    assert codes <= set(found)
    assert set(found) <= codes | {"teacher-agreement"}
    for code in codes:
        assert "shard-00001" in found[code].where


def test_flat_states(folder, tiny_rows, tiny_target):
    """vllm#46301: zeros from the wrong slots of the cache; validation looked fine."""
    for name in SHARDS:
        spoil(folder, lambda *tensors: [t.fill_(1e-9) for t in tensors[:2]], name)
    found = findings(folder, tiny_rows, tiny_target)
    assert {"states-flat", "teacher-agreement"} <= set(found)


def test_missing_and_unknown_rows(folder, tiny_rows, tiny_target):
    """speculators#365: 32 samples captured of 7,000, and nobody was told."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    gone = index["conversations"].pop(4)["id"]
    index["conversations"].append(index["conversations"][0])
    path.write_text(json.dumps(index))
    found = findings(folder, tiny_rows, tiny_target)
    assert gone in found["states-missing"].evidence
    assert index["conversations"][0]["id"] in found["states-unknown"].evidence
    assert "states-unknown" in findings(folder, tiny_rows[1:], tiny_target)


@pytest.fixture
def twins(tiny_target, tiny_rows, tmp_path):
    """(store, rows): two conversations of equal length: a swap leaves all lengths right."""
    one = tiny_rows[4]
    other = next(r for r in tiny_rows if r.id != one.id and len(r.answer_token_ids) > 12)
    cut = min(len(one.answer_token_ids), len(other.answer_token_ids))
    pair = [replace(r, answer_token_ids=r.answer_token_ids[:cut]) for r in (one, other)]
    longest = max(len(r.prompt_token_ids) for r in pair)
    pair = [
        replace(r, answer_token_ids=r.answer_token_ids[: cut - longest + len(q.prompt_token_ids)])
        for r, q in (pair, pair[::-1])
    ]
    rows = [r for r in tiny_rows if r.id not in {p.id for p in pair}] + pair
    assert len({len(r.prompt_token_ids) + len(r.answer_token_ids) for r in pair}) == 1
    capture(tiny_target, rows, tmp_path, slots=(2, 5, 7), dtype="float32", batch_tokens=64,
            shard_rows=20)  # fmt: skip
    return tmp_path, rows, [p.id for p in pair]


def rows_of(a, b, *, last=False):
    """Where two conversations' slots, or last states, lie in a shard; both as long as another."""
    if not last:
        return [slice(e.start, e.start + e.tokens) for e in (a, b)]
    taught = min(e.tokens - e.first_taught for e in (a, b))
    ends = [e.last_start + e.tokens - e.first_taught for e in (a, b)]
    return [slice(end - taught, end) for end in ends]


def test_swapped_states_are_named_as_a_pair(twins, tiny_target):
    folder, rows, ids = twins
    a, b = (e for e in StateStore(folder).entries if e.id in ids)

    def swap(slots, last, _):
        for states, (one, other) in ((slots, rows_of(a, b)), (last, rows_of(a, b, last=True))):
            states[one], states[other] = states[other].clone(), states[one].clone()

    spoil(folder, swap, "shard-00000")
    found = findings(folder, rows, tiny_target)
    assert set(found) - {"teacher-agreement"} == {"states-swapped", "states-of-another"}
    assert all(name in found["states-swapped"].evidence for name in ids)


def test_the_same_states_twice(twins, tiny_target):
    folder, rows, ids = twins
    a, b = (e for e in StateStore(folder).entries if e.id in ids)

    def copy(slots, last, _):
        for states, (one, other) in ((slots, rows_of(a, b)), (last, rows_of(a, b, last=True))):
            states[other] = states[one].clone()

    spoil(folder, copy, "shard-00000")
    found = findings(folder, rows, tiny_target)
    assert set(found) == {"states-doubled", "states-of-another"}
    assert f"{a.id} = {b.id}" in found["states-doubled"].evidence


def test_two_answers_to_one_prompt_may_be_equal(tiny_target, tiny_rows, tmp_path):
    rows = [tiny_rows[0], replace(tiny_rows[0], id="row-00-1")]
    capture(tiny_target, rows, tmp_path, slots=(2,), dtype="float32", batch_tokens=1, shard_rows=5)
    assert findings(tmp_path, rows, tiny_target) == {}


def test_sampled_answers_are_not_held_to_the_greedy_floor(folder, tiny_rows, tiny_target):
    for name in SHARDS:
        spoil(folder, lambda _, last, __: last.copy_(last.roll(1, 0)), name)
    assert set(findings(folder, tiny_rows, tiny_target)) == {"teacher-agreement"}
    assert findings(folder, tiny_rows, tiny_target, greedy=False) == {}


def layer_findings(folder, model, **made):
    """The findings on a store captured with other slots, or spoilt, than it declares."""
    path = folder / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | made))
    store = StateStore(folder)
    return check_layers(match_slots(store, model, store.entries[:3]), 10)


@pytest.mark.parametrize(
    ("declared", "title"),
    [
        ([2, 5, 7], ""),
        ([1, 4, 6], "output-of-layer ids, shifted by one"),  # vllm#43671
        ([3, 6, 8], "shifted by one downwards"),
        ([7, 5, 2], "reversed order"),
        ([5, 2, 7], "another order"),
        ([2, 4, 7], r"HF [2, 5, 7] where [2, 4, 7]"),
    ],
)
def test_layers_that_are_others_than_declared(folder, tiny_model, declared, title):
    found = layer_findings(folder, tiny_model, slots=declared)
    assert len(found) == bool(title)
    assert all(title in f.title for f in found)
    assert all("HF hidden_states[5] (relative error 0.0" in f.evidence for f in found)


def test_last_is_post_norm(folder, tiny_model):
    """speculators#313: 25 % acceptance instead of 40 %."""
    norm = tiny_model.model.norm
    for name in SHARDS:
        spoil(folder, lambda _, last, __: last.copy_(norm(last).detach()), name)
    [found] = layer_findings(folder, tiny_model)
    assert found.title.startswith("last is post-norm")


def test_last_is_a_middle_layer(tiny_target, tiny_model, tiny_rows, tmp_path):
    class Wrong(InProcess):
        def states(self, rows):
            return [torch.cat((s[:, :3], s[:, 2:3]), dim=1) for s in super().states(rows)]

    source = Wrong(tiny_target, (2, 5, 7), "float32", 64)
    capture(tiny_target, tiny_rows, tmp_path, slots=(2, 5, 7), dtype="float32", batch_tokens=64,
            shard_rows=20, source=source)  # fmt: skip
    [found] = layer_findings(tmp_path, tiny_model)
    assert "last is HF hidden_states[7]" in found.title


def test_states_of_another_target(folder, tiny_model):
    for name in SHARDS:
        spoil(folder, lambda *tensors: [t.copy_(t.roll(3, 0)) for t in tensors[:2]], name)
    [found] = layer_findings(folder, tiny_model)
    assert "none of the target's" in found.title
