"""The loop on a tiny target: it learns, resumes exactly, and is the same in two processes."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.simulate import Conversation, Replay
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.lab.params import Loss, TrainParams
from eagle3lib.target.states import StateEntry, StateStore
from eagle3lib.training.data import conversations, epoch_batches, load_batch, trainable
from eagle3lib.training.evaluate import NgramBaseline, acceptance_counts, evaluate
from eagle3lib.training.kinds import KINDS
from eagle3lib.training.loop import Folders, Trainer

TIMES = ("seconds", "tokens_per_s")


@pytest.fixture
def params(tiny_target):
    def make(**changes):
        values = {"target": str(tiny_target.folder), "epochs": 4, "batch_rows": 4, "steps": 3,
                  "precision": "float32", "learning_rate": 3e-3}  # fmt: skip
        return TrainParams(**(values | changes))

    return make


@pytest.fixture
def folders(tiny_states, tiny_vocab, tmp_path):
    def make(name="phase", states=tiny_states):
        (tmp_path / name).mkdir(exist_ok=True)
        return Folders(phase=tmp_path / name, states=states, vocab=tiny_vocab)

    return make


@pytest.fixture
def train(params, folders, tiny_target):
    """Run a training to its end and return its folders."""

    def run(name="phase", **changes):
        where = folders(name)
        Trainer(params(**changes), tiny_target, where).run()
        return where

    return run


def rows_of(where, kind=None):
    rows = read_jsonl(where.metrics)
    return [row for row in rows if kind in (None, row["kind"])]


def without_times(rows):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def weights(where, which="last"):
    return load_file(getattr(where, which) / "drafter.safetensors")


def test_overfits_a_few_rows(params, folders, tiny_target):
    """The loss falls, and what counts, the acceptance on the rows it has seen, rises with it."""
    cfg, where = params(epochs=40, checkpoint_every=40), folders()
    trainer = Trainer(cfg, tiny_target, where)
    seen = {"train": conversations(trainer.store, trainer.train_rows)}
    before = evaluate(trainer.drafter.eval(), seen, 3)["train"]["acceptance_length"]
    trainer.run()
    after = evaluate(trainer.drafter.eval(), seen, 3)["train"]["acceptance_length"]
    updates = rows_of(where, "train")
    assert len(updates) == 40 * 2, "eight rows, four an update"
    for step in range(cfg.steps):
        losses = [row["steps"][step]["loss"] for row in updates]
        assert sum(losses[-2:]) < 0.6 * sum(losses[:2])
    assert before < 1.2
    assert after > 1.7
    assert torch.equal(trainer.drafter.embed_tokens.weight, trainer.head.embedding), "frozen"


def test_first_loss_is_that_of_knowing_nothing(params, folders, tiny_target):
    """bfloat16 products give the loss of fp32 ones, nearly: autocast reaches the forward alone."""
    found = {}
    for precision in ("float32", "bfloat16"):
        where = folders(precision)
        cfg = params(epochs=1, batch_rows=8, precision=precision)
        Trainer(cfg, tiny_target, where).run()
        found[precision] = [step["loss"] for step in rows_of(where, "train")[0]["steps"]]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)
    assert found["bfloat16"] != found["float32"]


def test_step_weight_counts_each_step_less_than_the_one_before(train):
    """With a weight of nearly zero only the first step teaches; with 1 all steps do alike."""

    def first_norm(name, **changes):
        return rows_of(train(name, epochs=1, **changes), "train")[0]["grad_norm"]

    alone = first_norm("alone", steps=1)
    assert first_norm("nearly", steps=3, step_weight=1e-7) == pytest.approx(alone, rel=1e-4)
    assert first_norm("all", steps=3, step_weight=1.0) != pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("loss", get_args(Loss))
def test_every_loss_trains(train, loss):
    """At a temperature too; the logsumexp that goes with it is made by the loop."""
    rows = rows_of(train(loss=loss, loss_temperature=0.7, epochs=12, checkpoint_every=12), "train")
    for step in range(3):
        losses = [row["steps"][step]["loss"] for row in rows]
        assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
        assert rows[-1]["steps"][step]["overlap"] > rows[0]["steps"][step]["overlap"]


def test_params_know_every_kind_of_loss():
    assert get_args(Loss) == KINDS


class Killed(Exception):
    pass


class MortalTrainer(Trainer):
    """Dies before it makes update number ``dies_at`` (from 0)."""

    dies_at = 0

    def _update(self, entries, epoch):
        if self.step == self.dies_at:
            raise Killed
        return super()._update(entries, epoch)


@pytest.mark.parametrize(
    ("dies_at", "checkpoint_every"),
    [(4, 1), (5, 1), (7, 2), (1, 1)],
    ids=["between epochs", "within an epoch", "far from a checkpoint", "before any checkpoint"],
)
def test_killed_and_resumed_is_uninterrupted(
    train, params, folders, tiny_target, dies_at, checkpoint_every
):
    """Four epochs of two updates, killed and started again: the same rows, the same weights."""
    whole = train("whole", checkpoint_every=checkpoint_every)
    where, cfg = folders("killed"), params(checkpoint_every=checkpoint_every)
    mortal = MortalTrainer(cfg, tiny_target, where)
    mortal.dies_at = dies_at
    with pytest.raises(Killed):
        mortal.run()
    with where.metrics.open("a") as file:
        file.write('{"kind": "train", "upd')  # killed while writing
    again = Trainer(cfg, tiny_target, where)
    again.run()
    assert again.step == 8
    assert len(rows_of(where, "train")) == 8
    assert without_times(rows_of(where)) == without_times(rows_of(whole))
    for which in ("last", "best"):
        for name, tensor in weights(whole, which).items():
            assert torch.equal(weights(where, which)[name], tensor), name
        states = [read_json(getattr(f, which) / "state.json") for f in (where, whole)]
        assert without_times(states)[0] == without_times(states)[1]


def test_finished_training_is_not_trained_again(train, params, tiny_target):
    where = train()
    before = where.metrics.read_text()
    trainer = Trainer(params(), tiny_target, where)
    trainer.run()
    assert where.metrics.read_text() == before
    assert trainer.step == 8


def test_seed_decides(train):
    first, again, other = train("a", epochs=1), train("b", epochs=1), train("c", epochs=1, seed=1)
    assert without_times(rows_of(first)) == without_times(rows_of(again))
    assert without_times(rows_of(first)) != without_times(rows_of(other))


class JudgedTrainer(MortalTrainer):
    """Its acceptance length at the end of each epoch is written beforehand."""

    lengths = (1.9, 1.2, 1.6, 1.4, 1.5, 1.6, 1.1)  # the first: before training, no candidate

    def _evaluation(self):
        row = super()._evaluation()
        row["sets"]["workload"]["acceptance_length"] = self.lengths[self.epoch]
        return row


def test_best_checkpoint_has_the_best_acceptance(params, folders, tiny_target):
    """Also when the run died after it: the next one starts from ``last``, but knows the best."""
    where, cfg = folders(), params(epochs=6)
    trainer = JudgedTrainer(cfg, tiny_target, where)
    trainer.dies_at = 7  # within the fourth epoch
    with pytest.raises(Killed):
        trainer.run()
    assert read_json(where.best / "state.json")["epoch"] == 2
    assert read_json(where.last / "state.json")["epoch"] == 3
    trainer = JudgedTrainer(cfg, tiny_target, where)
    trainer.dies_at = 9  # after the fourth's evaluation, 1.5
    with pytest.raises(Killed):
        trainer.run()
    assert read_json(where.best / "state.json")["epoch"] == 2
    trainer = JudgedTrainer(cfg, tiny_target, where)
    trainer.dies_at = None
    trainer.run()
    assert read_json(where.best / "state.json")["epoch"] == 5, "of equals the longer trained"
    assert read_json(where.last / "state.json")["epoch"] == 6
    for name, tensor in weights(where, "last").items():
        assert torch.equal(trainer.drafter.state_dict()[name], tensor)
    assert not torch.equal(weights(where, "best")["fc.weight"], weights(where)["fc.weight"])


def test_metrics_tell_what_was_trained_on(train, tiny_rows):
    """Rows without a base position are skipped and counted; so are the answers' tokens."""
    evaluation, *updates = rows_of(train(epochs=1))[:3]
    used = [r for r in tiny_rows if r.split == "train" and len(r.answer_token_ids) > 1]
    answers = [len(r.answer_token_ids) for r in used]
    assert (len(used), evaluation["skipped_rows"]) == (8, 1)
    assert evaluation["tokens"]["train"] == sum(answers)
    assert set(evaluation["sets"]) == {"workload", "general"}
    assert set(evaluation["baselines"]) == {
        f"{order}_{name}" for order in ("unigram", "bigram") for name in ("workload", "general")
    }
    assert sum(r["tokens"] for r in updates) == sum(answers) + sum(
        len(r.prompt_token_ids) for r in used
    )
    for step in range(3):
        assert sum(r["steps"][step]["positions"] for r in updates) == sum(
            max(0, n - 1 - step) for n in answers
        )


def test_teacher_says_the_greedy_answers(params, folders, tiny_target):
    trainer = Trainer(params(), tiny_target, folders())
    for row in trainer.store.rows(trainer.train_rows):
        n = row.entry.prompt_tokens
        teacher = trainer.greedy[row.entry.id]
        assert torch.equal(teacher[n - 1 : -1], row.token_ids[n:])
        assert (teacher[: n - 1] == -1).all()


# One process and many


def fewer_rows(states, folder, train_rows):
    """The same shards under an index with so many training rows (of two tokens at least)."""
    shutil.copytree(states, folder)
    index = read_json(folder / "index.json")
    train = [e for e in index["conversations"] if e["split"] == "train"]
    rest = [e for e in index["conversations"] if e["split"] != "train"]
    usable = [e for e in train if e["tokens"] - e["prompt_tokens"] > 1]
    index["conversations"] = usable[:train_rows] + rest
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def test_two_processes_are_one(params, folders, tiny_target, tiny_states, tmp_path):
    """Two ranks of 3 rows are one of 6: gradients, counts and losses are sums over ranks. Seven
    rows, so that the second rank's last batch is empty."""
    states = fewer_rows(tiny_states, tmp_path / "seven", 7)
    one, two = folders("one", states), folders("two", states)
    Trainer(params(epochs=3, batch_rows=6), tiny_target, one).run()
    job = {"params": params(epochs=3, batch_rows=3, processes=2).model_dump(mode="json"),
           "threads": 1, "phase": str(two.phase), "states": str(two.states),
           "vocab": str(two.vocab)}  # fmt: skip
    (two.phase / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
               "2", "-m", "eagle3lib.training", str(two.phase / "job.json")]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    expected, found = rows_of(one, "train"), rows_of(two, "train")
    assert len(found) == len(expected) == 3 * 2
    for a, b in zip(expected, found, strict=True):
        assert [b[k] for k in ("update", "epoch", "tokens")] == [
            a[k] for k in ("update", "epoch", "tokens")
        ]
        assert b["learning_rate"] == a["learning_rate"]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], abs=1e-3)
        for mine, theirs in zip(a["steps"], b["steps"], strict=True):
            assert [theirs[k] for k in ("positions", "inside")] == [
                mine[k] for k in ("positions", "inside")
            ]
            assert theirs["loss"] == pytest.approx(mine["loss"], abs=2e-4)
    assert [r["epoch"] for r in rows_of(two, "evaluation")] == [0, 1, 2, 3]


def entry(index, tokens=9, prompt_tokens=4):
    return StateEntry(f"row-{index}", "workload", "train", "shard", 0, tokens, prompt_tokens, 1.0)


@pytest.mark.parametrize("rows", [1, 5, 8, 13])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_batches_of_one_process(rows, world):
    """Batch i of all ranks together is batch i of one process with as many rows an update."""
    entries = [entry(i) for i in range(rows)]
    one = epoch_batches(entries, 2 * world, seed=3, epoch=5)
    ranks = [
        epoch_batches(entries, 2, seed=3, epoch=5, rank=rank, world=world) for rank in range(world)
    ]
    assert {len(batches) for batches in ranks} == {len(one)}, "collectives must match"
    for index, batch in enumerate(one):
        shared = [e.id for batches in ranks for e in batches[index]]
        assert sorted(shared) == sorted(e.id for e in batch)
    assert Counter(e.id for batch in one for e in batch) == Counter(e.id for e in entries)


def test_order_depends_on_seed_and_epoch():
    entries = [entry(i) for i in range(20)]

    def order(**changes):
        batches = epoch_batches(entries, 4, **({"seed": 0, "epoch": 0} | changes))
        return [e.id for batch in batches for e in batch]

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)


def test_trainable_counts_what_it_skips():
    usable, skipped = trainable([entry(0, 4), entry(1, 5), entry(2, 6), entry(3, 9)])
    assert ([e.id for e in usable], skipped) == (["row-2", "row-3"], 2)


def test_batch_holds_its_rows_end_to_end(tiny_states):
    store = StateStore(tiny_states)
    entries = store.select(split="train")[:3]
    batch = load_batch(store, entries)
    rows = list(store.rows(entries))
    assert batch.ids == [e.id for e in entries]
    assert torch.equal(batch.rows.token_ids, torch.cat([r.token_ids for r in rows]))
    assert torch.equal(batch.states, torch.cat([r.slots for r in rows]))
    assert torch.equal(batch.last, torch.cat([r.last for r in rows]))


# Faults


def spoil_shard(states, folder, entry, value):
    """A copy of the states in which one number of one conversation is ``value``."""
    shutil.copytree(states, folder)
    tensors = load_file(folder / entry.shard)
    tensors["hidden_states"][entry.start + 2, 1, 5] = value
    save_file(tensors, folder / entry.shard)
    return folder


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_shard_is_named(params, folders, tiny_target, tiny_states, tmp_path, value, split):
    """Also one that is only evaluated on: NaN would quietly count as a rejected draft."""
    bad = trainable(StateStore(tiny_states).select(split=split))[0][-1]
    states = spoil_shard(tiny_states, tmp_path / "spoilt", bad, value)
    with pytest.raises(UserError, match=rf"(?s)conversation {bad.id}: .*{bad.shard}"):
        Trainer(params(), tiny_target, folders(states=states)).run()


def test_states_of_another_target_are_refused(params, folders, tiny_target):
    other = dataclasses.replace(tiny_target, fingerprint="0123456789abcdef")
    with pytest.raises(UserError, match=r"(?s)another target.*0123456789abcdef"):
        Trainer(params(), other, folders())


def change_index(states, folder, **changes):
    shutil.copytree(states, folder)
    index = read_json(folder / "index.json")
    (folder / "index.json").write_text(json.dumps(index | changes))
    return folder


def test_states_of_other_slots_are_refused(params, folders, tiny_target, tiny_states, tmp_path):
    states = change_index(tiny_states, tmp_path / "other", slots=[1, 5, 7])
    with pytest.raises(UserError, match=r"(?s)slots \[1, 5, 7\].*\[2, 5, 7\]"):
        Trainer(params(), tiny_target, folders(states=states))


def test_nothing_to_train_on_is_refused(params, folders, tiny_target, tiny_states, tmp_path):
    states = change_index(tiny_states, tmp_path / "none", conversations=[])
    with pytest.raises(UserError, match="no conversation"):
        Trainer(params(), tiny_target, folders(states=states))


def test_child_prints_a_users_mistake(params, folders, tiny_states, tmp_path, capsys, monkeypatch):
    """The notebook looks for this mark in the child's log."""
    from eagle3lib.training.__main__ import main

    states = change_index(tiny_states, tmp_path / "other", target_fingerprint="f00")
    where = folders(states=states)
    job = {"params": params().model_dump(mode="json"), "threads": 1, "phase": str(where.phase),
           "states": str(where.states), "vocab": str(where.vocab)}  # fmt: skip
    (where.phase / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(sys, "argv", ["eagle3lib.training", str(where.phase / "job.json")])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main() == 2
    assert "USER ERROR\nthe states are of another target (f00)" in capsys.readouterr().err


# Baselines, by hand


def toy(*answer):
    return Conversation(torch.tensor([1, 2, *answer]), 2, torch.zeros(2 + len(answer), 1))


@pytest.fixture
def ngrams():
    # 6 is the commonest token; 5 -> 6, 6 -> 7, 7 -> 5 the commonest followers.
    return NgramBaseline([[5, 6, 7, 5, 6], [6, 7], [7]])


def test_unigram_always_says_the_commonest(ngrams):
    assert ngrams.replay([toy(5, 6, 7, 5, 6)], steps=2, order=1) == [Replay([1, 0, 1], True)]
    assert ngrams.replay([toy(6, 6, 6, 6)], steps=2, order=1) == [Replay([2], False)]


def test_bigram_follows_the_chain(ngrams):
    assert ngrams.replay([toy(5, 6, 7, 5, 6)], steps=2, order=2) == [Replay([2, 1], True)]
    # 9 was never seen: its follower is the commonest token
    assert ngrams.replay([toy(9, 6, 7, 9)], steps=2, order=2) == [Replay([2], False)]
    assert ngrams.replay([toy(5), toy()], steps=2, order=2) == [Replay([], False)] * 2


def test_baselines_are_pooled(ngrams):
    sets = {"workload": [toy(5, 6, 7, 5, 6), toy(9, 9)]}
    found = ngrams.evaluate(sets, steps=2)
    assert found["bigram_workload"] == {
        "rounds": 3, "accepted": 3, "histogram": [1, 1, 1], "acceptance_length": 2.0,
    }  # fmt: skip
    assert found["unigram_workload"]["histogram"] == [2, 2, 0]


def test_no_rounds_have_no_length():
    counts = acceptance_counts([Replay([], False)], 3)
    assert counts == {
        "rounds": 0, "accepted": 0, "histogram": [0, 0, 0, 0], "acceptance_length": None,
    }  # fmt: skip


def test_baseline_of_nothing_is_never_right():
    assert NgramBaseline([]).replay([toy(5, 6)], steps=1, order=2) == [Replay([0], False)]
