"""Captured states are the target's own, whatever they were batched with; faults have names."""

import random
from itertools import pairwise

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.target import packing
from eagle3lib.target.capture import capture, teacher_agreement
from eagle3lib.target.forward import forward_states, length_batches
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore, state_problem

SLOTS = (2, 5, 7)
CAPTURE = {"slots": SLOTS, "dtype": "float32", "batch_tokens": 64, "shard_rows": 5}


def close(found, expected):
    """Equal but for fp32 rounding: the states are of size ten, and products of other shapes add
    up in another order."""
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


def test_states_are_hf_hidden_states(tiny_model):
    """Slots by HF index; ``last`` is the input of the final norm, which HF's last one is not."""
    ids = [1, 17, 230, 4, 99, 4, 4, 61]
    states = forward_states(tiny_model, [ids], SLOTS)[0]
    with torch.no_grad():
        whole = tiny_model(torch.tensor([ids]), output_hidden_states=True)
    assert states.shape == (len(ids), len(SLOTS) + 1, 64)
    for index, slot in enumerate(SLOTS):
        close(states[:, index], whole.hidden_states[slot][0])
    with torch.no_grad():
        close(tiny_model.model.norm(states[:, -1]), whole.hidden_states[-1][0])
    assert (states[:, -1] - whole.hidden_states[-1][0]).abs().max() > 0.1


@pytest.mark.parametrize("slots", [(1,), (0, 9), (3, 4, 5)])
def test_any_slots(tiny_model, slots):
    ids = [1, 17, 230, 4]
    states = forward_states(tiny_model, [ids], slots)[0]
    with torch.no_grad():
        hidden = tiny_model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    close(states[:, :-1], torch.stack([hidden[slot][0] for slot in slots], dim=1))


def test_the_slot_after_the_last_layer_is_the_pre_norm_state(tiny_model):
    """Engines allow "before layer n"; HF's hidden_states[n] is after the norm and would be
    wrong."""
    states = forward_states(tiny_model, [[1, 17, 230, 4]], (2, 10))[0]
    assert states.shape[1] == 3
    assert torch.equal(states[:, 1], states[:, 2])


def test_padding_changes_nothing(tiny_model):
    rng = random.Random(1)
    rows = [[rng.randrange(300) for _ in range(length)] for length in (3, 11, 7, 1)]
    for row, states in zip(rows, forward_states(tiny_model, rows, SLOTS), strict=True):
        assert len(states) == len(row)
        close(states, forward_states(tiny_model, [row], SLOTS)[0])


def test_hooks_are_gone_after_a_failure(tiny_model):
    with pytest.raises(IndexError):
        forward_states(tiny_model, [[1, 300]], SLOTS)  # 300 is no token: the embedding raises
    hooks = [m for m in tiny_model.modules() if m._forward_pre_hooks]
    assert hooks == []


@pytest.mark.parametrize("seed", range(10))
def test_length_batches(seed):
    """Every index once; padded size within the budget, but for rows that alone exceed it."""
    rng = random.Random(seed)
    lengths = [rng.randrange(1, 60) for _ in range(rng.randrange(1, 40))]
    budget = rng.randrange(1, 200)
    batches = length_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= budget
    # Neighbours in length, and no batch that the next row would still have fitted into.
    assert [lengths[i] for batch in batches for i in batch] == sorted(lengths)
    for batch, following in pairwise(batches):
        assert (len(batch) + 1) * lengths[following[0]] > budget


def test_length_batches_of_nothing():
    assert length_batches([], 10) == []


def test_store_gives_back_what_was_captured(tiny_model, tiny_rows, tiny_states, tiny_target):
    store = StateStore(tiny_states)
    assert (store.slots, store.dtype) == (SLOTS, "float32")
    assert store.target_fingerprint == tiny_target.fingerprint
    by_id = {row.id: row for row in tiny_rows}
    assert sorted(e.id for e in store.entries) == sorted(by_id)
    for found in store.rows(store.entries):
        row = by_id[found.entry.id]
        ids = row.prompt_token_ids + row.answer_token_ids
        assert found.token_ids.tolist() == ids
        assert found.entry.prompt_tokens == len(row.prompt_token_ids)
        assert (found.entry.set, found.entry.split) == (row.set, row.split)
        alone = forward_states(tiny_model, [ids], SLOTS)[0]
        close(found.slots, alone[:, :-1].flatten(1))
        first = found.entry.first_taught
        close(found.last[first:], alone[first:, -1])
        assert not found.last[:first].any()
        kept = torch.cat((alone[:, :-1].flatten(), alone[first:, -1].flatten()))
        assert found.entry.mean_square == pytest.approx(float(kept.square().mean()), rel=1e-4)


def test_result_counts_tokens_and_padding(tiny_target, tiny_rows, tmp_path):
    seen = []
    result = capture(tiny_target, tiny_rows, tmp_path, on_tokens=seen.append, **CAPTURE)
    tokens = sum(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in tiny_rows)
    assert (result.conversations, result.tokens, sum(seen)) == (len(tiny_rows), tokens, tokens)
    assert result.padding_share == 0, "packed rows have none"


def test_the_way_of_a_gpu_is_the_same(monkeypatch):
    """All rows as one attention, with and without a window, against row by row."""
    monkeypatch.setattr(packing, "_compiled_flex", lambda: packing._flex)
    draw = torch.Generator().manual_seed(0)
    lengths = [130, 7, 1, 140]
    q, k, v = (torch.randn(1, n, sum(lengths), 16, generator=draw) for n in (6, 2, 2))
    token = packing._pack.set(packing._Pack(lengths))
    try:
        for window in (None, 20):
            by_row, _ = packing.packed_attention(None, q, k, v, scaling=0.3, sliding_window=window)
            at_once = packing._all_rows(q, k, v, 0.3, window)
            torch.testing.assert_close(at_once, by_row, atol=1e-5, rtol=1e-4)
    finally:
        packing._pack.reset(token)


def test_padding_is_counted_where_rows_can_not_be_packed(
    tiny_target, tiny_rows, tmp_path, monkeypatch
):
    monkeypatch.setattr("eagle3lib.target.capture.can_pack", lambda decoder: False)
    assert 0 < capture(tiny_target, tiny_rows, tmp_path, **CAPTURE).padding_share < 0.5
    single = CAPTURE | {"batch_tokens": 1}
    alone = capture(tiny_target, tiny_rows, tmp_path / "alone", **single)
    assert alone.padding_share == 0


def test_packed_batches_are_as_full_as_their_tokens():
    lengths = [5, 1, 7, 3, 30, 2]
    batches = length_batches(lengths, 11, pads=False)
    assert [[lengths[i] for i in batch] for batch in batches] == [[1, 2, 3, 5], [7], [30]]


def test_slots_come_in_the_order_asked(tiny_model):
    """They used to come in the order of the layers, whatever had been asked."""
    ids = [1, 17, 230, 4]
    sorted_ones, asked = (forward_states(tiny_model, [ids], s)[0] for s in ((2, 5, 7), (7, 2, 5)))
    assert torch.equal(asked, sorted_ones[:, [2, 0, 1, 3]])


def test_select(tiny_states):
    store = StateStore(tiny_states)
    assert len(store.select(split="train")) == 9
    assert len(store.select(split="heldout", set="workload")) == 2
    assert len(store.select(split="heldout", set="general")) == 1
    assert len(store.select()) == 12


def agreement(store, head, states_of):
    counts = [
        teacher_agreement(head, r.token_ids, states_of(r), r.entry.prompt_tokens)
        for r in store.rows(store.entries)
    ]
    return sum(right for right, _ in counts), sum(total for _, total in counts)


def test_teacher_agrees_with_the_greedy_answers(tiny_target, tiny_rows, tiny_states):
    """lm_head(norm(last)) gives every token of a greedy answer; a wrong state gives far fewer."""
    store, head = StateStore(tiny_states), TargetHead(tiny_target)
    right, total = agreement(store, head, lambda r: r.last)
    assert total == sum(len(row.answer_token_ids) for row in tiny_rows)
    assert right == total
    normed_twice, _ = agreement(store, head, lambda r: head.normed(r.last))
    middle, _ = agreement(store, head, lambda r: r.slots[:, 64:128])
    late, _ = agreement(store, head, lambda r: r.last.roll(1, 0))
    assert normed_twice < 0.9 * total
    assert middle < 0.3 * total
    assert late < 0.3 * total


def test_head_gives_the_models_own_logits(tiny_target, tiny_model):
    ids = [1, 17, 230, 4, 99]
    with torch.no_grad():
        expected = tiny_model(torch.tensor([ids])).logits[0]
    last = forward_states(tiny_model, [ids], SLOTS)[0][:, -1]
    head = TargetHead(tiny_target)
    torch.testing.assert_close(head.logits(last), expected, atol=1e-4, rtol=1e-4)
    assert head.greedy(last, chunk=2).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda s: s[3, 1].fill_(torch.nan), "not finite"),
        (lambda s: s[0, 0, 0].fill_(-torch.inf), "not finite"),
        (lambda s: s[4, 2].zero_(), "all-zero"),
        (lambda s: s[5].copy_(s[4]), "identical"),
        (lambda s: s.copy_(s[:1].clone()), "identical"),
        (lambda s: s[5, 1].copy_(s[4, 1]), ""),  # one slot alone may repeat
        (lambda s: s[6].copy_(s[4]), ""),
        (lambda s: s, ""),
    ],
)
def test_state_problem(spoil, named):
    states = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(0))
    spoil(states)
    problem = state_problem(states, torch.tensor([1, 2, 5, 6, 6, 6, 7, 8]))
    assert bool(problem) == bool(named)
    assert named in problem


def test_opening_repetition_is_no_stuck_buffer(tiny_model):
    """A doubled BOS attends to copies of itself: its states are the same, in bfloat16 bit for bit,
    and rightly so. It used to stop the whole capture."""
    ids = [1, 1, 1, 17, 230]
    states = forward_states(tiny_model, [ids], SLOTS)[0]
    close(states[1:3], states[:2])
    states[1:3] = states[0]
    assert state_problem(states, torch.tensor(ids)) == ""
    assert "identical" in state_problem(states, torch.tensor([1, 5, 1, 17, 230]))
    states[4] = states[3]
    assert "identical" in state_problem(states, torch.tensor(ids))


def test_one_token_has_no_neighbour():
    assert state_problem(torch.ones(1, 4, 16), torch.tensor([1])) == ""


def test_bad_states_stop_the_capture(tiny_target, tiny_rows, tmp_path, monkeypatch):
    def broken(*arguments):
        made = forward_states(*arguments)
        made[0][2, 0] = torch.nan
        return made

    monkeypatch.setattr("eagle3lib.target.capture.forward_states", broken)
    with pytest.raises(UserError, match=r"conversation row-\d+: not finite"):
        capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "empty"])
def test_damaged_shard_is_named(tiny_target, tiny_rows, tmp_path, damage):
    capture(tiny_target, tiny_rows, tmp_path, **CAPTURE)
    store = StateStore(tmp_path)
    entry = store.entries[-1]
    path = tmp_path / entry.shard
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes()[:-64])
    with pytest.raises(UserError, match=rf"(?s)can't be read.*{entry.shard}"):
        store.row(entry)
    store.row(store.entries[0])  # the others still read


def test_no_states(tmp_path):
    with pytest.raises(UserError, match="no captured states"):
        StateStore(tmp_path)


def test_looping_answers_are_left_out_of_training(tiny_target, make_row, tmp_path):
    loop = [5, 6, 7, 8] * 15
    rows = [
        make_row(0, [1, 2, 3], loop),
        make_row(1, [1, 2, 4], loop, split="heldout"),  # ... but judged: they were served
        make_row(2, [1, 2, 5], [9, 8, 7, 6]),
    ]
    assert [row.looping for row in rows] == [True, True, False]
    capture(tiny_target, rows, tmp_path, **CAPTURE)
    splits = {e.id: e.split for e in StateStore(tmp_path).entries}
    assert splits == {"row-00": "left", "row-01": "heldout", "row-02": "train"}
