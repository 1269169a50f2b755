"""Who trains on what: each token once an epoch, however many processes share the work."""

from collections import Counter

import pytest
import torch

from eagle3lib.drafter.align import base_positions, base_span, label_exists
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import (
    bases_of,
    epoch_updates,
    label_counts,
    load_batch,
    share_out,
    stretches,
    trainable,
)


@pytest.fixture
def entries(on):
    """Forty conversations of 6 to 95 tokens."""
    lengths = torch.randint(6, 96, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    return [on.entry(i, tokens=n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_token_is_seen_once_an_epoch(entries, world, accumulate):
    """Whatever the world: ranks share the very updates that one process makes."""
    one = epoch_updates(entries, 300, seed=3, epoch=5)
    seen = Counter()
    for update in one:
        shares = share_out(update, world * accumulate, 3)
        assert len(shares) == world * accumulate, "collectives must match"
        assert Counter(e.id for s in shares for e in s) == Counter(e.id for e in update)
        seen.update(e.id for share in shares for e in share)
    assert seen == Counter(e.id for e in entries)


def test_updates_hold_as_many_tokens_as_fit(entries):
    updates = epoch_updates(entries, 300, seed=0, epoch=0)
    sums = [sum(e.tokens for e in update) for update in updates]
    assert max(sums) <= 300
    for tokens, following in zip(sums, updates[1:], strict=False):
        assert tokens + following[0].tokens > 300
    assert all(len(u) == 1 for u in epoch_updates(entries, 1, seed=0, epoch=0)), "none is dropped"


def test_ranks_are_balanced_by_tokens(entries):
    """Of many conversations no rank has more than the longest one over another."""
    shares = share_out(entries, 3, 3)
    loads = [sum(e.tokens for e in share) for share in shares]
    assert max(loads) - min(loads) <= 95
    assert max(loads) < 1.05 * sum(loads) / 3
    assert share_out(entries[:1], 3, 3)[1:] == [[], []]


@pytest.mark.parametrize("prompt, tokens", [(4, 30), (1, 9), (20, 31)])
@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("steps", [1, 3])
def test_stretches_hold_each_label_once_and_no_token_more_than_they_need(
    on, prompt, tokens, most, steps
):
    """Every (base position, step) with a label of the whole conversation, in one of them."""

    def labels(entry):
        span = bases_of(entry)
        base = base_positions(span)
        total = torch.full_like(base, entry.tokens)
        exists = [label_exists(base, k, total) for k in range(steps)]
        return [(p, k) for k in range(steps) for p in base[exists[k]].tolist()]

    whole = on.entry(0, tokens, prompt)
    parts = stretches(whole, most, steps)
    assert max(bases_of(part).count for part in parts) <= most
    assert sorted(x for part in parts for x in labels(part)) == sorted(labels(whole))
    for part in parts:
        assert part.tokens == max(p + 3 + k for p, k in labels(part))
        assert part.last_start - whole.last_start == part.first_taught - whole.first_taught
    assert stretches(whole, 99, steps) == [whole]


def test_a_stretch_is_read_like_a_conversation(tiny_states):
    """Its states are the beginning of the whole one's, its last states those that teach it."""
    store = StateStore(tiny_states)
    entry = max(store.select(split="train"), key=lambda e: e.tokens)
    whole = load_batch(store, [entry])
    for part in stretches(entry, 3, 2):
        batch = load_batch(store, [part])
        assert torch.equal(batch.states, whole.states[: part.tokens])
        taught = slice(part.first_taught, part.tokens)
        assert torch.equal(batch.last[taught], whole.last[taught])
        assert batch.rows.base.tolist() == base_positions(bases_of(part)).tolist()


def test_order_depends_on_seed_and_epoch(entries):
    def order(**changes):
        updates = epoch_updates(entries, 300, **({"seed": 0, "epoch": 0} | changes))
        return [e.id for update in updates for e in update]

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)


def test_trainable_counts_what_it_skips_and_cuts(on):
    rows = [on.entry(0, 4), on.entry(1, 5), on.entry(2, 6), on.entry(3, 9)]
    whole = trainable(rows)
    assert [e.id for e in whole.entries] == ["row-2", "row-3"]
    assert (whole.skipped_rows, whole.cut_rows, whole.cut_tokens) == (2, 0, 0)
    cut = trainable(rows, 7)
    assert [e.tokens for e in cut.entries] == [6, 7]
    assert (cut.skipped_rows, cut.cut_rows, cut.cut_tokens) == (2, 1, 2)
    assert trainable(rows, 5).entries == [] and trainable([], 5).skipped_rows == 0


def test_labels_are_counted_from_lengths(entries):
    """The same as asking every position, so factors of the loss need no forward."""
    for steps in (1, 4):
        expected = []
        for step in range(steps):
            found = [
                label_exists(
                    base := base_positions(base_span(e.prompt_tokens, e.tokens)),
                    step,
                    torch.full_like(base, e.tokens),
                ).sum()
                for e in entries
            ]
            expected.append(int(sum(found)))
        assert label_counts(entries, steps) == expected


def test_batch_holds_its_rows_end_to_end(tiny_states):
    store = StateStore(tiny_states)
    entries = store.select(split="train")[:3]
    batch = load_batch(store, entries)
    rows = list(store.rows(entries))
    assert batch.entries == entries
    assert torch.equal(batch.rows.token_ids, torch.cat([r.token_ids for r in rows]))
    assert torch.equal(batch.states, torch.cat([r.slots for r in rows]))
    assert torch.equal(batch.last, torch.cat([r.last for r in rows]))
    assert torch.equal(store.token_ids(entries[1]), rows[1].token_ids)


def test_a_cut_row_is_the_beginning_of_the_whole_one(tiny_states):
    store = StateStore(tiny_states)
    whole = trainable(store.select(split="train")).entries[:2]
    cut = trainable(whole, 12).entries
    batch, first = load_batch(store, cut), store.row(whole[0])
    assert torch.equal(batch.rows.token_ids[:12], first.token_ids[:12])
    assert torch.equal(batch.last[:12], first.last[:12])
