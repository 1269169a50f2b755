"""What is refused before a training starts, or stops it: each one message that names both sides."""

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, replace_folder
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import trainable
from eagle3lib.training.loop import Trainer
from eagle3lib.training.memory import Need, check_memory, estimate, part_bytes
from eagle3lib.training.start import new_drafter, trained_drafter


def spoil_shard(states, folder, entry, value):
    """A copy of the states in which one number of one conversation is ``value``."""
    shutil.copytree(states, folder)
    tensors = load_file(folder / entry.shard)
    tensors["hidden_states"][entry.start + 2, 1, 5] = value
    save_file(tensors, folder / entry.shard)
    return folder


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_shard_is_named(
    params, folders, tiny_target, tiny_states, tmp_path, value, split, on
):
    """Also one that is only evaluated on: NaN would quietly count as a rejected draft."""
    bad = trainable(StateStore(tiny_states).select(split=split)).entries[-1]
    states = spoil_shard(tiny_states, tmp_path / "spoilt", bad, value)
    with pytest.raises(UserError, match=rf"(?s)conversation {bad.id}: .*{bad.shard}"):
        Trainer(params(), tiny_target, folders(states=states)).run()


def test_states_of_another_target_are_refused(params, folders, tiny_target, on):
    other = replace(tiny_target, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=r"(?s)another target.*0123456789abcdef"):
        Trainer(params(), other, folders())


def test_a_fresh_drafter_reads_the_slots_that_were_captured(
    params, folders, tiny_target, tiny_states, tmp_path, on
):
    states = on.change_index(tiny_states, tmp_path / "other", slots=[1, 5, 7])
    trainer = Trainer(params(), tiny_target, folders(states=states))
    assert trainer.replica.drafter.config.slots == (1, 5, 7)


def test_nothing_to_train_on_is_refused(params, folders, tiny_target, tiny_states, tmp_path, on):
    states = on.change_index(tiny_states, tmp_path / "none", conversations=[])
    with pytest.raises(UserError, match="no conversation"):
        Trainer(params(), tiny_target, folders(states=states))


def test_child_prints_a_users_mistake(
    params, folders, tiny_states, tmp_path, capsys, monkeypatch, on
):
    """The notebook looks for this mark in the child's log."""
    from eagle3lib.training.__main__ import main

    states = on.change_index(tiny_states, tmp_path / "other", target_fingerprint="f00")
    where = folders(states=states)
    job = {"params": params().model_dump(mode="json"), "threads": 1, "phase": str(where.phase),
           "states": str(where.states), "vocab": str(where.vocab)}  # fmt: skip
    (where.phase / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(sys, "argv", ["eagle3lib.training", str(where.phase / "job.json")])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main() == 2
    assert "USER ERROR\nthe states are of another target (f00)" in capsys.readouterr().err


# Memory


def test_too_little_memory_is_refused_with_what_fits(params, folders, tiny_target, monkeypatch):
    """And what it names really fits."""
    cfg = params(batch_tokens=5000)
    monkeypatch.setattr("eagle3lib.training.loop.available_bytes", lambda *_: 2**18)
    with pytest.raises(UserError, match=r"no batch: weights and optimizer alone do not"):
        Trainer(cfg, tiny_target, folders())
    monkeypatch.setattr("eagle3lib.training.loop.available_bytes", lambda *_: 5 * 2**20)
    with pytest.raises(UserError, match=r"(?s)needs about .* free on cpu.*batch_tokens") as caught:
        Trainer(cfg, tiny_target, folders())
    parts, _ = re.search(r"accumulate: (\d+) .*batch_tokens: ([\d,]+)", str(caught.value)).groups()
    assert 1 < int(parts) < 50
    Trainer(params(batch_tokens=5000, accumulate=int(parts) + 1), tiny_target, folders())


def test_a_conversation_that_fits_in_no_part_is_refused_with_the_longest_that_does(
    params, folders, tiny_target, monkeypatch
):
    """With stretches of one base position a part's memory is that of the tokens before it."""
    monkeypatch.setattr("eagle3lib.training.memory.STRETCH", 1)
    monkeypatch.setattr("eagle3lib.training.data.STRETCH", 1)
    cfg = params(accumulate=200)

    def tried(free, **changes):
        monkeypatch.setattr("eagle3lib.training.loop.available_bytes", lambda *_: free)
        return Trainer(cfg.model_copy(update=changes), tiny_target, folders())

    low, high = 2**18, 2**28  # the least that all of it fits in
    while high - low > 1000:
        middle = (low + high) // 2
        try:
            tried(middle)
            high = middle
        except UserError:
            low = middle
    with pytest.raises(
        UserError, match=r"max_tokens_per_row: \d+, the longest here has 28"
    ) as error:
        tried(low)
    longest = int(re.search(r"max_tokens_per_row: (\d+)", str(error.value))[1])
    assert 6 < longest < 28
    tried(low, max_tokens_per_row=longest)


def test_a_long_prompt_is_no_long_stretch(on, tiny_target):
    """Of 30,000 tokens before 20 answered ones only these 20 are unrolled; and where no length
    fits the message names none: 0 would be all."""
    cfg = TrainParams(precision="float32")
    drafter = Drafter(DrafterConfig.for_target(tiny_target.config, 48))
    rows = [on.entry(0, 30_020, 30_000), on.entry(1, 400, 300)]
    need = estimate(drafter, cfg, [[row] for row in rows], 1, 0, torch.device("cpu"))
    assert need.stretch_bytes(30_020) == need.batch_bytes
    few = [part_bytes(drafter.config, cfg, [replace(row, tokens=n)]) for row, n in
           ((rows[0], 30_005), (rows[1], 400))]  # fmt: skip
    assert need.stretch_bytes(30_005) == max(few) and need.stretch_bytes(350) < few[1]
    assert need.stretch_bytes(301) == 0
    with pytest.raises(UserError, match=r"no batch: .*not one position"):
        check_memory(need, int(1.16 * need.fixed_bytes), cfg, torch.device("cpu"))


def test_enough_memory_is_not_refused(params):
    check_memory(Need(1000, 1000, 64), 2300, params(), torch.device("cpu"))
    with pytest.raises(UserError):
        check_memory(Need(1000, 1000, 64), 2290, params(), torch.device("cpu"))


# Warm start


@pytest.fixture
def public(random_drafter, tiny_vocab, tmp_path):
    """A drafter's folder as somebody published it, with phase 03's vocabulary or another one."""

    def make(name="public", vocab=None, **changes):
        vocab = vocab or VocabMap.load(tiny_vocab)
        drafter = random_drafter(5, draft_vocab_size=len(vocab.d2t), **changes)
        drafter.d2t.copy_(vocab.d2t)
        drafter.t2d.copy_(vocab.t2d)
        folder = tmp_path / name
        replace_folder(folder, lambda where: write_drafter(where, drafter, torch.float32))
        return folder, drafter

    return make


def test_a_warm_start_begins_with_its_weights(public, params, folders, tiny_target):
    """In its own shape, which need not be that of a fresh drafter; so does what was trained."""
    folder, drafter = public()
    fresh = new_drafter(params(), tiny_target,
                        Trainer(params(), tiny_target, folders("x")).head.head,
                        VocabMap.load(folders().vocab), (2, 5, 7))  # fmt: skip
    assert fresh.config.intermediate_size != drafter.config.intermediate_size
    cfg = params(warm_start=str(folder), learning_rate=1e-9, epochs=1)
    trainer = Trainer(cfg, tiny_target, folders())
    for name, parameter in trainer.replica.named.items():
        assert torch.equal(parameter, drafter.state_dict()[name]), name
    assert "embed_tokens.weight" not in trainer.replica.named, "frozen"
    trainer.run()
    best = trained_drafter(folders().best, tiny_target)
    assert best.config == trainer.replica.drafter.config
    assert torch.allclose(best.fc.weight, drafter.fc.weight, atol=1e-6)
    assert torch.equal(best.embed_tokens.weight, trainer.head.head.embedding)


def test_a_warm_start_keeps_its_own_map(public, params, folders, tiny_target):
    """Another one is refused; with the switch rows of common tokens move to their new places."""
    other = build_vocab_map(Counter(range(20, 60)), 300, 40)
    folder, drafter = public(vocab=other)
    with pytest.raises(
        UserError, match=r"(?s)own vocabulary map \(40 tokens; the given one has 48"
    ):
        Trainer(params(warm_start=str(folder)), tiny_target, folders())
    cfg = params(warm_start=str(folder), replace_vocab_map=True, epochs=1)
    trainer = Trainer(cfg, tiny_target, folders())
    found, vocab = trainer.replica.drafter, VocabMap.load(folders().vocab)
    assert torch.equal(found.d2t, vocab.d2t) and torch.equal(found.t2d, vocab.t2d)
    for row, token in zip(found.lm_head.weight, vocab.target_ids.tolist(), strict=True):
        inside = other.t2d[token]
        source = drafter.lm_head.weight[token - 20] if inside else trainer.head.head.head[token]
        assert torch.equal(row, source)
    trainer.run()


def test_a_warm_start_of_another_shape_names_its_tensors(public, params, folders, tiny_target):
    folder, _ = public()
    config = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    with pytest.raises(UserError, match=r"(?s)midlayer.mlp.down_proj.weight is \(64, 96\)"):
        Trainer(params(warm_start=str(folder)), tiny_target, folders())


def test_a_warm_start_at_other_slots_is_refused(public, params, folders, tiny_target):
    folder, _ = public(slots=(1, 5, 7))
    with pytest.raises(UserError, match=r"(?s)\[1, 5, 7\].*captured\s+ones are \[2, 5, 7\]"):
        Trainer(params(warm_start=str(folder)), tiny_target, folders())
