"""The comparison with a peer: ratios within pairs, equal time, acceptance over the same prompts."""

from __future__ import annotations

import pytest
import torch

from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.drafter.simulate import simulate
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.peer import (
    Block,
    epochs_in_equal_time,
    export_untrained,
    length_ratio,
    quality_summary,
    quality_table,
    simulate_drafters,
    speed_summary,
    speed_table,
)
from eagle3lib.report.peer_figure import peer_figure
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import conversations, trainable
from eagle3lib.training.peer import OWN, PEER, Trained


def trained(name, *, tokens=1000, seconds=1.0, wall_s=3.0, epochs=1):
    return Trained(name, epochs, tokens, 10, seconds, wall_s, 2.0, 10**9, 2)


def block(own_s, peer_s, peak=1e11):
    return Block(
        {"bfloat16": peak, "float32": peak / 2},
        trained(OWN, seconds=own_s),
        trained(PEER, seconds=peer_s),
    )


def request(arm, prompt, accepted, name="workload"):
    return RequestRow(
        arm=arm, set=name, prompt=prompt, repeat=0, prompt_token_ids=[1], finish_reason="length",
        answer_token_ids=[0] * (1 + len(accepted) + sum(accepted)), duration_s=1.0,
        accepted=accepted, drafted=[5] * len(accepted),
    )  # fmt: skip


def test_a_slow_spell_of_the_machine_leaves_the_ratio_alone():
    """The second pair ran while the machine was half as fast: each pair still says 4."""
    blocks = [block(1.0, 4.0), block(2.0, 8.0, peak=5e10), block(1.0, 4.4)]
    speed = speed_summary(blocks, {"layer": 3 * 10**10, "head": 2 * 10**10})
    assert speed["ratio"] == {"median": 4.0, "low": 4.0, "high": 4.4}
    assert speed[OWN]["tokens_per_s"] == 1000.0
    assert speed[OWN]["share_of_peak"] == 0.5  # of the best peak of all blocks
    assert speed[PEER]["tokens_per_s"] == pytest.approx(1000 / 4.4, abs=0.1)
    assert speed_table(speed)["share of the matrix peak"][0] == "50.0%"


def test_equal_time_counts_updates_whatever_is_around_them():
    """2 s an epoch: in 31 s of the peer's updates 15 epochs end, the 16th would not."""
    own = trained(OWN, seconds=10.0, wall_s=12.0, epochs=5)
    assert epochs_in_equal_time(own, trained(PEER, seconds=31.0, wall_s=99.0)) == 15
    assert epochs_in_equal_time(own, trained(PEER, seconds=1.0)) == 1


def test_simulated_rounds_are_those_of_the_simulator(
    tiny_target, tiny_vocab, tiny_states, tmp_path
):
    """Read back from its folder, a drafter has the rounds of the drafter that was written."""
    folder = export_untrained(VocabMap.load(tiny_vocab), tiny_target, tmp_path / "untrained")
    store, embedding = StateStore(tiny_states), TargetHead(tiny_target).embedding
    rows = simulate_drafters(store, {"a": folder, "b": folder}, tiny_target, 3)
    entries = trainable(store.select(split="heldout")).entries
    drafter = read_drafter(folder, tiny_target.config, embedding, torch.float32)
    found = [r.accepted for r in simulate(drafter, conversations(store, entries), 3)]
    assert len(found) == len(entries) > 1
    for arm in "ab":
        assert [r.accepted for r in rows if r.arm == arm] == found
    assert {r.prompt for r in rows} == {e.id for e in entries}
    for row in rows:
        assert len(row.answer_token_ids) >= 1 + len(row.accepted)
    assert length_ratio(rows, "a", "b")["value"] == 1.0


def test_the_ratio_of_lengths_pools_rounds_over_the_prompts_of_both():
    rows = [request(OWN, "a", [2, 2]), request(PEER, "a", [1, 1, 0, 0]), request(OWN, "b", [5])]
    assert length_ratio(rows, OWN, PEER) == {"value": 2.0, "low": None, "high": None}


def test_a_drafter_against_itself_is_one_whatever_is_drawn():
    rows = [request(arm, f"p{i}", [i, 1]) for arm in (OWN, PEER) for i in range(6)]
    assert length_ratio(rows, OWN, PEER) == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_summary_table_and_figure_name_every_drafter():
    rows = [
        request(arm, f"{name}{i}", [i % 3, 1], name)
        for arm in ("untrained", PEER, OWN)
        for name in ("workload", "general")
        for i in range(3)
    ]
    quality = quality_summary(rows, {PEER: trained(PEER), OWN: trained(OWN)}, 5)
    assert list(quality["drafters"]) == ["untrained", PEER, OWN]
    assert set(quality["ratio_to_peer"]) == {"untrained", OWN}
    line = quality["drafters"][OWN]
    assert line["all"]["rounds"] == sum(s["rounds"] for s in line["sets"].values()) == 12
    assert list(quality_table(quality)["drafter"]) == ["untrained", PEER, OWN]
    figure = peer_figure(speed_summary([block(1.0, 4.0)], {"layer": 10**9}), quality)
    assert list(figure.data[-1].x) == ["untrained", PEER, OWN]


def test_the_untrained_drafter_reads_back_with_the_targets_own_head(
    tiny_target, tiny_vocab, tmp_path
):
    vocab, head = VocabMap.load(tiny_vocab), TargetHead(tiny_target)
    folder = export_untrained(vocab, tiny_target, tmp_path / "untrained")
    drafter = read_drafter(folder, tiny_target.config, head.embedding, torch.bfloat16)
    assert torch.equal(drafter.lm_head.weight, head.head[vocab.target_ids].to(torch.bfloat16))
    assert torch.equal(drafter.d2t, vocab.d2t)
