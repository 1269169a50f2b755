"""Live states are the stored ones, however they are asked for."""

import threading
import weakref
from dataclasses import replace

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import capture
from eagle3lib.target.forward import forward_packed, forward_states
from eagle3lib.target.states import StateStore
from eagle3lib.target.stream import LiveStates, token_groups

SLOTS = (2, 5, 7)


@pytest.fixture(scope="module")
def live(tiny_target, tiny_rows):
    return LiveStates(tiny_target, tiny_rows, slots=SLOTS, dtype="float32", batch_tokens=64)


@pytest.fixture(scope="module")
def store(tiny_states):
    return StateStore(tiny_states)


def by_id(states, entries=None):
    return {row.entry.id: row for row in states.rows(entries or states.entries)}


def test_live_states_are_the_stored_ones(live, store, tiny_target):
    assert (live.slots, live.dtype) == (store.slots, store.dtype)
    assert live.target_fingerprint == store.target_fingerprint
    made, read = by_id(live), by_id(store)
    assert made.keys() == read.keys()
    for name, row in made.items():
        other = read[name]
        assert torch.equal(row.token_ids, other.token_ids)
        torch.testing.assert_close(row.slots, other.slots, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(row.last, other.last, atol=1e-4, rtol=1e-5)
        for field in ("set", "split", "tokens", "prompt_tokens", "first_taught", "ids_hash"):
            assert getattr(row.entry, field) == getattr(other.entry, field)


def test_in_bf16_the_same_batch_gives_the_same_bits(tiny_target, tiny_rows, tmp_path):
    """Stored bf16 loses nothing of what the target made: one conversation a forward, equal bits."""
    rows = tiny_rows[:4]
    capture(tiny_target, rows, tmp_path, slots=SLOTS, dtype="bfloat16", batch_tokens=1,
            shard_rows=9)  # fmt: skip
    live = LiveStates(tiny_target, rows, slots=SLOTS, dtype="bfloat16", batch_tokens=1)
    read = by_id(StateStore(tmp_path))
    for name, row in by_id(live).items():
        assert row.slots.dtype == torch.bfloat16
        assert torch.equal(row.slots, read[name].slots)
        assert torch.equal(row.last, read[name].last)


def test_live_rows_keep_the_order_asked_for(live):
    asked = [live.entries[i] for i in (7, 0, 11, 3, 3, 9)]
    assert [row.entry for row in live.rows(asked)] == asked
    assert list(live.rows([])) == []


def test_live_answers_what_a_store_answers(live, store):
    for chosen in ({"split": "train"}, {"split": "heldout", "set": "general"}, {}):
        ids = [sorted(e.id for e in states.select(**chosen)) for states in (live, store)]
        assert ids[0] == ids[1]
    entry = replace(live.entries[0], tokens=live.entries[0].prompt_tokens + 1)
    row = live.row(entry)
    assert len(row.token_ids) == len(row.slots) == len(row.last) == entry.tokens
    assert torch.equal(live.token_ids(entry), row.token_ids)


def test_bad_live_states_are_named(live, monkeypatch):
    def broken(model, rows, slots):
        made = forward_states(model, rows, slots)
        made[0][1, 0] = torch.inf
        return made

    monkeypatch.setattr("eagle3lib.target.stream.forward_states", broken)
    with pytest.raises(UserError, match=rf"conversation {live.entries[2].id}: not finite"):
        live.row(live.entries[2])


def test_threads_take_turns(live):
    """Hooks record for whoever runs the model: two forwards at once would mix their states."""
    expected = by_id(live)
    found = [{}, {}]

    def work(out, entries):
        for entry in entries:
            out[entry.id] = live.row(entry)

    halves = live.entries[:6], live.entries[6:]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(found, halves, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, row in (found[0] | found[1]).items():
        torch.testing.assert_close(row.slots, expected[name].slots, atol=1e-4, rtol=1e-5)


@pytest.fixture
def forwards(monkeypatch):
    """The lengths of the rows of each forward."""
    asked = []

    def watched(forward, lengths_of):
        def made(*args, **more):
            asked.append(lengths_of(*args))
            return forward(*args, **more)

        return made

    for forward, lengths_of in (
        (forward_states, lambda m, rows, *_: [len(r) for r in rows]),
        (forward_packed, lambda m, ids, lengths, *_: list(lengths)),
    ):
        name = f"eagle3lib.target.stream.{forward.__name__}"
        monkeypatch.setattr(name, watched(forward, lengths_of))
    return asked


def test_memory_is_bounded_and_nothing_is_made_before_it_is_asked_for(
    tiny_target, tiny_rows, forwards
):
    """Back-pressure: of however many rows are asked for, eight batches are there at most, made or
    handed over, while whoever takes them takes his time; a forward is never of more than a
    batch."""
    live = LiveStates(tiny_target, tiny_rows, slots=SLOTS, dtype="float32", batch_tokens=32)
    window, asked = 8 * 32, live.entries * 5
    assert sum(e.tokens for e in asked) > 3 * window
    given, alive, rows = 0, [], live.rows(asked)
    assert forwards == []
    while (row := next(rows, None)) is not None:
        made = sum(map(sum, forwards))
        assert made - given <= window
        given += row.entry.tokens
        alive = [(ref, n) for ref, n in alive if ref() is not None]
        alive.append((weakref.ref(row.slots), row.entry.tokens))
        assert len(alive) <= 2  # this one, and the one before it until its name is bound anew
    assert given == sum(map(sum, forwards)) == sum(e.tokens for e in asked)
    assert all(len(lengths) == 1 or sum(lengths) <= 32 for lengths in forwards)


def test_a_pack_is_made_by_forwards_of_a_batch_each(live, forwards):
    slots, last = live.packed(live.entries)
    assert len(slots) == len(last) == sum(e.tokens for e in live.entries) > 3 * 64
    assert len(forwards) > 1
    assert all(len(lengths) == 1 or sum(lengths) <= 64 for lengths in forwards)


def test_token_groups(store):
    entries = store.entries
    for most in (1, 30, 50, 10**6):
        groups = list(token_groups(entries, most))
        assert [e for group in groups for e in group] == entries
        for group in groups:
            assert len(group) == 1 or sum(e.tokens for e in group) <= most
