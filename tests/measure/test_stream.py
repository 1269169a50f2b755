"""Streamed requests: ids, arrivals and records of both engines as one answer."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine

from eagle3lib.engine.client import Asked, BadReply
from eagle3lib.engine.stream import stream_chat, stream_ids

ASKED = Asked([{"role": "user", "content": "Hello"}], [], "default")


class Renderer:
    def prompt(self, asked):
        return [1, 2], "Hello"


@pytest.fixture
def start():
    started = []

    def make(*args, **options):
        started.append(FakeEngine(*args, **options))
        return started[-1]

    yield make
    for fake in started:
        fake.close()


def ask(fake, max_tokens=9):
    options = {"max_tokens": max_tokens, "temperature": 0.0}
    if fake.kind == "vllm":
        return stream_chat(fake.url, ASKED, **options)
    return stream_ids(fake.url, Renderer(), ASKED, steps=3, **options)


KINDS = [
    {"kind": "vllm"},
    {"kind": "sglang"},
    {"kind": "sglang", "incremental": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_stream_is_the_answer_with_its_arrivals(start, kind):
    streamed = ask(start([0, 2, 3], **kind))
    answer = streamed.answer
    assert answer.prompt_token_ids == [1, 2]
    assert answer.answer_token_ids == list(range(100, 109))
    assert answer.finish_reason == "length"
    assert streamed.chunk_tokens == [1, 1, 3, 4]
    assert len(streamed.chunk_s) == 4 and streamed.chunk_s == sorted(streamed.chunk_s)
    assert 0 < streamed.first_token_s <= answer.duration_s == streamed.chunk_s[-1]
    assert (streamed.counts.rounds, streamed.counts.accepted, streamed.counts.drafted) == (3, 5, 9)


def test_vllm_tells_the_rounds_in_their_order(start):
    rounds = ask(start([0, 2, 3])).answer.rounds
    assert (rounds.accepted, rounds.drafted) == ([0, 2, 3], [3, 3, 3])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_engine_without_drafter_has_no_record(start, kind):
    streamed = ask(start(**kind))
    assert streamed.counts is None and streamed.answer.rounds is None
    assert streamed.chunk_tokens == [1] * 9


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no token ids"),
        ([{"choices": [{"delta": {"content": "x"}}]}], "no token ids"),
        ([{"prompt_token_ids": [1], "choices": [{"token_ids": [5]}]},
          {"usage": {"completion_tokens": 2}}], "streamed 1 ids, counted 2"),
    ],
)  # fmt: skip
def test_a_stream_that_can_not_be_right_is_refused(start, events, said):
    with pytest.raises(BadReply, match=said):
        ask(start(events=events))


def test_a_server_that_is_gone_is_a_clear_error(start):
    fake = start()
    fake.close()
    with pytest.raises(BadReply, match="broke"):
        ask(fake)
