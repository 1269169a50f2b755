"""The loop on a tiny target: it learns, counts what it did, and keeps the best."""

import json
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from eagle3lib.drafter.simulate import simulate
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import Loss
from eagle3lib.training.data import conversations
from eagle3lib.training.evaluate import ENOUGH_TOKENS, acceptance_counts, verdict
from eagle3lib.training.kinds import KINDS
from eagle3lib.training.loop import Trainer
from eagle3lib.training.optim import make_optimizers, rate_share


def length(trainer, items):
    drafter = trainer.replica.drafter.eval()
    return acceptance_counts(simulate(drafter, items, 3), 3)["acceptance_length"]


def test_overfits_a_few_rows(params, folders, tiny_target, on):
    """The loss falls, and what counts, the acceptance on the rows it has seen, rises with it."""
    cfg, where = params(epochs=40, checkpoint_every=40), folders()
    trainer = Trainer(cfg, tiny_target, where)
    seen = conversations(trainer.store, trainer.selection.entries)
    before = length(trainer, seen)
    trainer.run()
    after = length(trainer, seen)
    updates = on.rows_of(where, "train")
    assert len(updates) == 40 * 2, "eight rows in two updates"
    for step in range(cfg.steps):
        losses = [row["steps"][step]["loss"] for row in updates]
        assert sum(losses[-2:]) < 0.6 * sum(losses[:2])
    assert before < 1.2
    assert after > 1.7
    assert torch.equal(trainer.replica.drafter.embed_tokens.weight, trainer.head.head.embedding), (
        "frozen"
    )


def test_first_loss_is_that_of_knowing_nothing(params, folders, tiny_target, on):
    """bfloat16 products give the loss of fp32 ones, nearly: autocast reaches the forward alone."""
    found = {}
    for precision in ("float32", "bfloat16"):
        where = folders(precision)
        cfg = params(epochs=1, batch_tokens=200, precision=precision)
        Trainer(cfg, tiny_target, where).run()
        found[precision] = [step["loss"] for step in on.rows_of(where, "train")[0]["steps"]]
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)
    assert found["bfloat16"] != found["float32"]


def test_step_weight_counts_each_step_less_than_the_one_before(train, on):
    """With a weight of nearly zero only the first step teaches; with 1 all steps do alike."""

    def first_norm(name, **changes):
        return on.rows_of(train(name, epochs=1, **changes), "train")[0]["grad_norm"]

    alone = first_norm("alone", steps=1)
    assert first_norm("nearly", steps=3, step_weight=1e-7) == pytest.approx(alone, rel=1e-4)
    assert first_norm("all", steps=3, step_weight=1.0) != pytest.approx(alone, rel=0.01)


def test_accumulating_and_recomputing_change_nothing(train, on):
    """Parts of an update and its activations are matters of memory, not of the result."""
    plain = on.rows_of(train("plain"), "train")
    for name, changes in {
        "parts": {"accumulate": 3}, "again": {"recompute": True}, "more": {"accumulate": 20},
    }.items():  # fmt: skip
        other = on.rows_of(train(name, **changes), "train")
        assert [r["tokens"] for r in other] == [r["tokens"] for r in plain]
        for a, b in zip(plain, other, strict=True):
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], abs=2e-4)
            assert [s["loss"] for s in b["steps"]] == pytest.approx(
                [s["loss"] for s in a["steps"]], abs=2e-4
            )


@pytest.mark.parametrize("states", ["disk", "live"])
def test_stretches_of_long_conversations_add_up_to_them(train, on, monkeypatch, states):
    """Cut into stretches of three base positions the update is the same, label by label."""
    plain = on.rows_of(train("plain", epochs=2, states=states), "train")
    monkeypatch.setattr("eagle3lib.training.data.STRETCH", 3)
    cut = on.rows_of(train("cut", epochs=2, states=states, accumulate=9), "train")
    for a, b in zip(plain, cut, strict=True):
        assert [(s["positions"], s["inside"]) for s in b["steps"]] == [
            (s["positions"], s["inside"]) for s in a["steps"]
        ]
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], abs=2e-4)
        losses = [[s["loss"] for s in row["steps"]] for row in (a, b)]
        assert losses[1] == pytest.approx(losses[0], abs=2e-4)


def test_weights_of_the_optimizer_stay_fp32(params, folders, tiny_target, on):
    """Updates too small for bfloat16 add up in the fp32 weights instead of being lost."""
    cfg = params(precision="bfloat16", learning_rate=1e-6, warmup_share=0.0, epochs=8)
    trainer = Trainer(cfg, tiny_target, folders())
    before = trainer.replica.drafter.norm.weight.detach().clone()
    trainer.run()
    after = trainer.replica.drafter.norm.weight.detach()
    moved = (after - before).abs().max()
    assert 0 < moved < 2e-5
    assert torch.equal(after.bfloat16(), before.bfloat16())


def test_muon_takes_the_hidden_matrices_alone(params, folders, tiny_target, on):
    cfg = params(optimizer="muon", epochs=12)
    trainer = Trainer(cfg, tiny_target, folders())
    adamw, muon = trainer.optimizers
    names = {id(p): n for n, p in trainer.replica.named.items()}
    taken = {names[id(p)] for g in muon.param_groups for p in g["params"]}
    rest = {names[id(p)] for g in adamw.param_groups for p in g["params"]}
    assert taken | rest == set(names.values()) and not taken & rest
    assert {"fc.weight", "midlayer.mlp.up_proj.weight"} <= taken
    assert "lm_head.weight" in rest and not [n for n in taken if "norm" in n]
    trainer.run()
    rows = on.rows_of(trainer.folders, "train")
    assert rows[-1]["steps"][0]["loss"] < 0.8 * rows[0]["steps"][0]["loss"]


def test_no_decay_on_norms(params, random_drafter):
    named = dict(random_drafter().named_parameters())
    (adamw,) = make_optimizers(named, params(weight_decay=0.3))
    for group in adamw.param_groups:
        assert {p.ndim for p in group["params"]} == ({2} if group["weight_decay"] else {1})


def test_rate_rises_to_its_peak_and_falls_to_nothing():
    shares = [rate_share(i, 100, 0.1) for i in range(100)]
    assert shares[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert all(a > b for a, b in pairwise(shares[10:]))
    assert shares[55] == pytest.approx(0.5) and 0 < shares[-1] < 0.001
    assert rate_share(0, 1, 0.0) == 1


def test_finished_training_is_not_trained_again(train, params, tiny_target):
    where = train()
    before = where.metrics.read_text()
    trainer = Trainer(params(), tiny_target, where)
    trainer.run()
    assert where.metrics.read_text() == before
    assert trainer.at.update == 8


def test_seed_decides(train, on):
    first, again, other = train("a", epochs=1), train("b", epochs=1), train("c", epochs=1, seed=1)
    assert on.without_times(on.rows_of(first)) == on.without_times(on.rows_of(again))
    assert on.without_times(on.rows_of(first)) != on.without_times(on.rows_of(other))


class Killed(Exception):
    pass


class MortalTrainer(Trainer):
    """Dies before it makes update number ``dies_at`` (from 0)."""

    dies_at = None

    def _update(self, update, parts):
        if self.at.update == self.dies_at:
            raise Killed
        return super()._update(update, parts)


class JudgedTrainer(MortalTrainer):
    """Its acceptance length at the end of each epoch is written beforehand."""

    lengths = (1.9, 1.2, 1.6, 1.4, 1.5, 1.6, 1.1)  # the first: before training, no candidate

    def _evaluation(self):
        row = super()._evaluation()
        row["sets"]["workload"]["acceptance_length"] = self.lengths[self.at.epoch]
        return row


def test_best_checkpoint_has_the_best_acceptance(params, folders, tiny_target, on):
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
    for name, tensor in on.weights(where, "last").items():
        assert torch.equal(trainer.replica.drafter.state_dict()[name], tensor)
    assert not torch.equal(on.weights(where, "best")["fc.weight"], on.weights(where)["fc.weight"])


def test_metrics_tell_what_was_trained_on(train, tiny_rows, on):
    """Rows without a base position are skipped and counted; so are the answers' tokens."""
    evaluation, *updates = on.rows_of(train(epochs=1))[:3]
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
    batch, labels = next(trainer._parts([trainer.selection.entries]))
    teacher, start = labels.greedy, 0
    for entry in batch.entries:
        own = teacher[start : start + entry.tokens]
        ids = batch.rows.token_ids[start : start + entry.tokens]
        n, start = entry.prompt_tokens, start + entry.tokens
        assert torch.equal(own[n - 1 : -1], ids[n:])
        assert (own[: n - 1] == -1).all()
    assert torch.equal(trainer.head.labels(batch).greedy, teacher), "also from memory"


def test_cut_rows_are_counted(train, tiny_rows, on):
    """Rows that are all prompt after the cut have no label: skipped, and no NaN (EAGLE PR#99)."""
    first, *rest = on.rows_of(train(epochs=1, max_tokens_per_row=7))
    used = [r for r in tiny_rows if r.split == "train"]
    lengths = [(len(r.prompt_token_ids), len(r.answer_token_ids)) for r in used]
    assert first["cut_rows"] == sum(n + m > 7 for n, m in lengths)
    assert first["cut_tokens"] == sum(max(0, n + m - 7) for n, m in lengths)
    assert first["skipped_rows"] == sum(n + min(m, 7 - n) < n + 2 for n, m in lengths) > 1
    assert first["tokens"]["train"] == sum(7 - n for n, m in lengths if 7 - n >= 2 and m > 1)
    assert rest[0]["tokens"] <= 7 * 8
    assert rest[0]["steps"][2]["positions"] < rest[0]["steps"][0]["positions"]


def test_verdict_is_a_smoke_test_below_a_million_tokens(train, on):
    assert on.rows_of(train(epochs=1))[0]["verdict"].startswith("smoke test: ")
    assert verdict(ENOUGH_TOKENS - 1).startswith("smoke test")
    assert not verdict(ENOUGH_TOKENS).startswith("smoke test")


# Trackers


def test_tracker_gets_every_row(train, monkeypatch, on):
    found = []
    run = SimpleNamespace(
        log=lambda values, step: found.append((step, values)), finish=lambda: found.append("end")
    )
    module = SimpleNamespace(init=lambda **facts: found.append(facts) or run)
    monkeypatch.setitem(sys.modules, "trackio", module)
    rows = on.rows_of(train(epochs=1, tracker="trackio"))
    facts, *logged, end = found
    assert (facts["project"], facts["config"]["epochs"], end) == ("eagle3", 1, "end")
    assert [step for step, _ in logged] == [row["update"] for row in rows] == [0, 1, 2, 2]
    assert logged[1][1]["train/loss/step2"] == rows[1]["steps"][1]["loss"]
    assert (
        logged[3][1]["heldout/workload/length"] == rows[3]["sets"]["workload"]["acceptance_length"]
    )
    assert json.dumps(logged)


def test_a_tracker_that_is_missing_says_how_to_get_it(train, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"(?s)tracker is wandb.*pip install wandb"):
        train(tracker="wandb")


@pytest.mark.parametrize("loss", get_args(Loss))
def test_every_loss_trains(train, on, loss):
    """At a temperature too; the logsumexp that goes with it is made by the loop."""
    where = train(loss=loss, loss_temperature=0.7, epochs=12, checkpoint_every=12)
    updates = on.rows_of(where, "train")
    for step in range(3):
        losses = [row["steps"][step]["loss"] for row in updates]
        overlaps = [row["steps"][step]["overlap"] for row in updates]
        assert sum(losses[-2:]) < 0.95 * sum(losses[:2])
        assert overlaps[-1] > overlaps[0]


def test_params_know_every_kind_of_loss():
    assert get_args(Loss) == KINDS
