"""Which slots count: accepted drafts at every position, and slots by name."""

from __future__ import annotations

import pytest
import torch

from eagle3lib.drafter.simulate import Conversation, simulate
from eagle3lib.lab.errors import UserError
from eagle3lib.target.states import StateStore
from eagle3lib.training import data
from eagle3lib.training import slots as reading


@pytest.fixture(scope="module")
def items(tiny_states):
    store = StateStore(tiny_states)
    return data.conversations(store, store.entries[:4])


def test_rounds_that_begin_anywhere_hold_those_of_the_simulator(items, random_drafter):
    drafter = random_drafter()
    for item, replay in zip(items, simulate(drafter, items, 3), strict=True):
        from_each = reading.accepted_from(drafter, item, 3)
        at = item.prompt_tokens - 1
        for accepted in replay.accepted[:-1]:  # the last one may be cut by the end
            assert from_each[at] == accepted
            at += accepted + 1


def test_a_slot_that_the_drafter_does_not_read_can_go(items, random_drafter):
    drafter = random_drafter()
    with torch.no_grad():
        drafter.fc.weight[:, :64] = 0
    counts = {line.pop("slots"): line for line in reading.knock_out(drafter, items, (2, 5, 7), 3)}
    assert len(counts) == 8  # as trained, without each, with each alone, with none
    assert counts["without 2"] == counts["as trained"]
    for line in counts.values():
        assert [sum(x) for x in zip(*line["conversations"], strict=True)] == [
            line["rounds"], line["accepted"]
        ]  # fmt: skip


def test_without_any_slot_the_states_do_not_matter(items, random_drafter):
    """The floor that the other variants are read against: equal means for all positions."""
    drafter, (found, *_) = random_drafter(), items
    shuffled = Conversation(
        found.token_ids, found.prompt_tokens, found.states[torch.randperm(len(found.states))]
    )
    lines = [reading.knock_out(drafter, [item], (2, 5, 7), 3)[-1] for item in (found, shuffled)]
    assert lines[0] == lines[1] and lines[0]["slots"] == "none of them"


def test_slots_by_name():
    assert reading.named_slots("1-4-8, first,last", 10)[0] == (1, 4, 8)
    chosen = reading.named_slots("first,default,last", 30)
    assert [len(s) for s in chosen] == [3, 3, 3] and len(set(chosen)) == 3
    with pytest.raises(UserError):
        reading.named_slots("1-4-99", 10)
