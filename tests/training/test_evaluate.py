"""Baselines and estimates against plain loops."""

import pytest
import torch

from eagle3lib.drafter.model import unroll
from eagle3lib.drafter.simulate import Conversation, Replay
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import load_batch, trainable
from eagle3lib.training.evaluate import (
    NgramBaseline,
    acceptance_counts,
    chain_estimates,
    chain_length,
    chain_sums,
)
from eagle3lib.training.objective import FullHead, Labels

STEPS = 3


def test_estimates_are_those_of_a_plain_loop(random_drafter, tiny_states, tiny_target, monkeypatch):
    """One position at a time, probabilities over the whole vocabulary, fp64."""
    monkeypatch.setattr("eagle3lib.training.evaluate._CHUNK_POSITIONS", 7)
    drafter, store, target = (
        random_drafter(3, 110),
        StateStore(tiny_states),
        TargetHead(tiny_target),
    )
    head = FullHead(target, torch.device("cpu"))
    entries = trainable(store.select(split="heldout")).entries[:2]
    batch, allowed = load_batch(store, entries), torch.arange(300)[drafter.t2d]
    teacher = head.labels(batch)
    found = chain_estimates(chain_sums(drafter, batch, teacher, target.head[allowed], STEPS).sum(0))
    with torch.no_grad():
        made = unroll(drafter, batch.rows, batch.states, STEPS, feed="truth")
    start = index = 0
    labels, right, overlap = [0] * STEPS, [0] * STEPS, [0.0] * STEPS
    for entry in entries:
        for p in range(entry.prompt_tokens - 1, entry.tokens - 2):
            for k in range(STEPS):
                if p + 2 + k > entry.tokens - 1:
                    continue
                logits = target.logits(batch.last[start + p + 1 + k][None])[0].double()
                q = torch.zeros(300, dtype=torch.float64)
                with torch.no_grad():
                    q[allowed] = drafter.logits(made[k].hidden[index][None])[0].double().softmax(-1)
                labels[k] += 1
                right[k] += int(q.argmax() == logits.argmax())
                overlap[k] += float(torch.minimum(q, logits.softmax(-1)).sum())
            index += 1
        start += entry.tokens
    assert (found["labels"], found["right"]) == (labels, right)
    assert found["overlap"] == pytest.approx(overlap, abs=2e-3)
    assert 1 < found["sampled_length"] < 1 + STEPS


def test_a_drafter_that_is_the_target_is_always_accepted(random_drafter, tiny_states):
    """With the target's own distribution and the whole vocabulary every chain is K + 1 long."""
    drafter, store = random_drafter(), StateStore(tiny_states)
    batch = load_batch(store, trainable(store.select(split="heldout")).entries[:1])
    with torch.no_grad():
        made = unroll(drafter, batch.rows, batch.states, 1, feed="truth")
        normed = torch.zeros(len(batch.last), 64)
        where = batch.rows.row_start + batch.rows.base + 1
        normed[where] = drafter.norm(made[0].hidden)
        logits = normed @ drafter.lm_head.weight.T
    teacher = Labels(normed, logits.argmax(-1), logits.logsumexp(-1))
    found = chain_estimates(chain_sums(drafter, batch, teacher, drafter.lm_head.weight, 1).sum(0))
    assert found["top1_length"] == 2
    assert found["sampled_length"] == pytest.approx(2, abs=1e-4)


def test_chain_length_by_hand():
    assert chain_length([8.0, 2.0, 1.0], [10.0, 5.0, 2.0]) == pytest.approx(
        1 + 0.8 + 0.8 * 0.4 + 0.8 * 0.4 * 0.5
    )
    assert chain_length([0.0, 2.0], [10.0, 5.0]) == 1
    assert chain_length([1.0, 0.0], [1.0, 0.0]) is None


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
