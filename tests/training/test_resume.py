"""Killed anywhere and started again is the training that was never killed, to the last bit."""

import os
import random
import shutil
import signal
import time

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.training.checkpoints import has_checkpoint
from eagle3lib.training.loop import Trainer


class Killed(Exception):
    pass


class MortalTrainer(Trainer):
    """Dies before it makes update number ``dies_at`` (from 0)."""

    dies_at = 0

    def _update(self, update, parts):
        if self.at.update == self.dies_at:
            raise Killed
        return super()._update(update, parts)


@pytest.fixture
def kill(params, folders, tiny_target):
    """A training killed before update ``dies_at``: its folders."""

    def run(dies_at, name="killed", **changes):
        where = folders(name)
        mortal = MortalTrainer(params(**changes), tiny_target, where)
        mortal.dies_at = dies_at
        with pytest.raises(Killed):
            mortal.run()
        return where

    return run


@pytest.mark.parametrize(
    ("dies_at", "changes"),
    [
        (4, {}),
        (5, {}),
        (7, {"checkpoint_every": 2}),
        (1, {}),
        (5, {"checkpoint_every": 4, "checkpoint_every_s": 0.0}),
        (6, {"checkpoint_every": 4, "checkpoint_every_s": 0.0, "optimizer": "muon"}),
        (5, {"checkpoint_every": 4, "checkpoint_every_s": 0.0, "states": "live"}),
    ],
    ids=["between epochs", "within an epoch", "far from a checkpoint", "before any checkpoint",
         "with a checkpoint within the epoch", "with one at the epoch's end, muon",
         "with states that the target makes"],
)  # fmt: skip
def test_killed_and_resumed_is_uninterrupted(
    train, kill, params, tiny_target, dies_at, changes, on
):
    """Four epochs of two updates, in bfloat16: the same rows, weights and moments."""
    changes = changes | {"precision": "bfloat16", "epochs": 4}
    whole = train("whole", **changes)
    where = kill(dies_at, **changes)
    with where.metrics.open("a") as file:
        file.write('{"kind": "train", "upd')  # killed while writing
    again = Trainer(params(**changes), tiny_target, where)
    again.run()
    assert again.at.update == len(on.rows_of(where, "train")) == 8
    on.same_outcome(whole, where)


def test_a_checkpoint_within_an_epoch_is_used(kill, params, tiny_target, on):
    """The epoch's end is one too, whether it is judged or not."""
    where = kill(5, checkpoint_every=4, checkpoint_every_s=0.0)
    state = read_json(where.last / "state.json")
    assert (state["update"], state["epoch"]) == (5, 2)
    assert not has_checkpoint(where.best), "nothing was judged yet"
    where = kill(5, "rare", checkpoint_every=4)
    assert not has_checkpoint(where.last), "300 seconds have not gone by"


def test_the_rate_after_a_resume_is_that_of_the_update(train, kill, params, tiny_target, on):
    """speculators#900: its schedule was restored by epoch number, warmed up a second time, and
    began near zero."""
    changes = {"warmup_share": 0.3, "epochs": 5}
    whole = train("whole", **changes)
    where = kill(7, **changes)
    seen = []

    class Watched(Trainer):
        def _log(self, row):
            seen.append(row)
            super()._log(row)

    Watched(params(**changes), tiny_target, where).run()
    rates = [r["learning_rate"] for r in on.rows_of(whole, "train")]
    resumed = {r["update"]: r["learning_rate"] for r in seen if r["kind"] == "train"}
    assert min(resumed) == 7 and max(rates) == rates[2]
    assert resumed == {u: rates[u - 1] for u in range(7, 11)}


def test_a_checkpoint_without_its_optimizer_is_refused(kill, params, tiny_target):
    """Also speculators#900: there it was a KeyError, or a silent fresh start."""
    where = kill(5)
    (where.last / "optimizer.safetensors").unlink()
    with pytest.raises(UserError, match=r"(?s)can't be read.*optimizer.safetensors"):
        Trainer(params(), tiny_target, where).run()


def test_a_checkpoint_of_another_optimizer_is_refused(kill, params, tiny_target):
    where = kill(5)
    with pytest.raises(UserError, match=r"(?s)momentum_buffer missing.*of Muon"):
        Trainer(params(optimizer="muon"), tiny_target, where).run()


def test_a_checkpoint_of_another_plan_is_refused(kill, params, tiny_target):
    where = kill(5)
    with pytest.raises(UserError, match=r"(?s)training of 8 updates.*expected: 12 updates"):
        Trainer(params(epochs=6), tiny_target, where).run()


def test_a_broken_checkpoint_is_named(kill, params, tiny_target):
    where = kill(5)
    path = where.last / "drafter.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"(?s)can't be read.*drafter.safetensors"):
        Trainer(params(), tiny_target, where).run()


def test_nan_stops_before_the_weights_are_spoilt(train, kill, params, tiny_target, on):
    """The message names the conversations, and the checkpoint from before goes on from there."""
    whole = train("whole", checkpoint_every_s=0.0)

    class Poisoned(Trainer):
        def _backward(self, part, scales, *, last):
            if self.at.update == 5:
                part[1].normed[9] = torch.nan
            return super()._backward(part, scales, last=last)

    where = kill(0)
    shutil.rmtree(where.phase / "checkpoints", ignore_errors=True)
    trainer = Poisoned(params(checkpoint_every_s=0.0, accumulate=2), tiny_target, where)
    with pytest.raises(UserError, match=r"(?s)not finite at update 6, in conversations (row-\d+)"):
        trainer.run()
    assert all(p.isfinite().all() for p in trainer.replica.named.values())
    assert read_json(where.last / "state.json")["update"] == 5
    Trainer(params(checkpoint_every_s=0.0, accumulate=2), tiny_target, where).run()
    assert len(on.rows_of(where, "train")) == len(on.rows_of(whole, "train"))


def test_a_conversation_in_stretches_is_named_once(params, folders, tiny_target, monkeypatch):
    monkeypatch.setattr("eagle3lib.training.data.STRETCH", 3)
    trainer = Trainer(params(accumulate=4), tiny_target, folders())
    longest = max(trainer.selection.entries, key=lambda e: e.tokens)
    with pytest.raises(UserError, match=rf"in conversations {longest.id}\n"):
        trainer._check_finite([longest], [True] * 4, 1.0)


# Real processes, really killed


def kill_at_random(ranks, where, updates):
    """kill -9 all ranks once some update is logged."""
    wanted = random.SystemRandom().randint(2, updates - 10)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and any(rank.is_alive() for rank in ranks):
        text = where.metrics.read_text() if where.metrics.exists() else ""
        if text.count('"kind": "train"') >= wanted:
            break
        time.sleep(0.002)
    for rank in ranks:
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
    assert where.metrics.read_text().count('"kind": "train"') < updates, "killed too late"


@pytest.mark.parametrize("world", [1, 2])
def test_kill_9_at_a_random_update(folders, params, tiny_target, world, on):
    cfg = params(epochs=15, checkpoint_every=15, checkpoint_every_s=0.02)
    whole, killed = folders("whole"), folders("killed")
    on.run_ranks(cfg, tiny_target, whole, world)
    kill_at_random(on.start_ranks(cfg, tiny_target, killed, world), killed, updates=30)
    on.run_ranks(cfg, tiny_target, killed, world)
    on.same_outcome(whole, killed)
