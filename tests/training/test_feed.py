"""Parts of a training come in order, and never more than two of them are there."""

import threading

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.target.stream import LiveStates
from eagle3lib.training import feed as feeds
from eagle3lib.training.feed import Feed
from eagle3lib.training.objective import FullHead


@pytest.fixture(scope="module")
def live(tiny_target, tiny_rows):
    return LiveStates(tiny_target, tiny_rows, slots=(2, 5, 7), dtype="float32", batch_tokens=40)


@pytest.fixture
def feed(tiny_target, tiny_states, live, monkeypatch):
    """``feed(source, fails_at)``: a feed of jobs of two conversations and one of none, and the list
    of (ids, whether on the main thread) of the parts that were begun."""
    begun, assemble = [], feeds.assemble

    def make(source, fails_at=""):
        def watched(states, entries, device):
            on_main = threading.current_thread() is threading.main_thread()
            begun.append(([e.id for e in entries], on_main))
            if fails_at in begun[-1][0]:
                raise UserError("cut short")
            return assemble(states, entries, device)

        monkeypatch.setattr(feeds, "assemble", watched)
        states = live if source == "live" else StateStore(tiny_states)
        entries = sorted(states.select(split="train"), key=lambda e: e.id)[:8]
        jobs = [entries[0:2], [], entries[2:4], entries[4:6], entries[6:8]]
        head = FullHead(TargetHead(tiny_target), torch.device("cpu"), keep=source == "disk")
        return Feed(states, head, jobs), begun

    return make


@pytest.mark.parametrize("source", ["disk", "live"])
def test_parts_are_made_ahead_by_one(feed, source):
    """Back-pressure: however long the trainer thinks, two parts are there at most. A part without
    conversations keeps its place."""
    parts, begun = feed(source)
    ids = []
    for index, part in enumerate(parts):
        parts.ahead()
        parts.ahead()
        assert len(begun) <= index + 2
        ids.append([e.id for e in part[0].entries] if part else None)
    assert ids == [["row-00", "row-01"], None, ["row-02", "row-03"], ["row-04", "row-05"],
                   ["row-06", "row-07"]]  # fmt: skip
    assert [made for made, _ in begun] == [names for names in ids if names]
    assert {on_main for _, on_main in begun} == {source == "live"}
    parts.close()


@pytest.mark.parametrize("source", ["disk", "live"])
def test_a_fault_of_the_reader_reaches_the_trainer(feed, source):
    parts, _ = feed(source, fails_at="row-04")
    with pytest.raises(UserError, match="cut short"):
        for part in parts:
            assert part is None or part[0].entries[0].id < "row-04"


def test_one_label_a_taught_state_whichever_way(live, tiny_target):
    """Labels of a whole pack at once are those of its conversations one by one."""
    entries = live.select(split="train")[:4]
    batch = feeds.assemble(live, entries, "cpu")
    at_once, kept = (
        FullHead(TargetHead(tiny_target), torch.device("cpu"), 0.7, keep=keep).labels(batch)
        for keep in (False, True)
    )
    assert torch.equal(at_once.greedy, kept.greedy)
    torch.testing.assert_close(at_once.logsumexp, kept.logsumexp)


def test_a_bad_state_is_named(live, tiny_target, monkeypatch):
    entries = live.select(split="train")[:3]
    packed = live.packed

    def broken(chosen):
        slots, last = packed(chosen)
        slots[chosen[0].tokens + 1, 5] = torch.nan
        return slots, last

    monkeypatch.setattr(live, "packed", broken)
    head = FullHead(TargetHead(tiny_target), torch.device("cpu"), keep=False)
    with pytest.raises(UserError, match=rf"conversation {entries[1].id}: .*not finite"):
        next(Feed(live, head, [entries]))
