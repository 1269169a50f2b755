"""Answers over real HTTP, from a server whose every word is decided by the prompt."""

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from eagle3lib.data import rows as rows_module
from eagle3lib.data.generate import generate_answers
from eagle3lib.data.phase import describe_answers
from eagle3lib.data.prompts import Prompt, Reject, prompt_id, write_read_rejects
from eagle3lib.data.rows import AnswerRow, is_looping, read_answers, read_rejects
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.client import Client
from eagle3lib.lab.errors import UserError

ANSWER_TOKENS = 5


class FakeServer(ThreadingHTTPServer):
    """Answers a prompt with tokens that are a function of it; the first word may ask for trouble.

    ``flaky`` fails twice before it answers, ``bad`` is refused, ``mute`` is answered by no token,
    ``textonly`` lacks the token ids. After ``dies_after`` answers every connection is dropped.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.asked = Counter()
        self.requests = []
        self.answered = 0
        self.dies_after = None
        self.in_flight = self.most_in_flight = 0
        self.together = None  # a threading.Barrier: answers wait for each other
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """A client that went away is part of the tests; http.server would print a traceback."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, status, body):
        content = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("retry-after-ms", "5")  # the client's own wait is half a second
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        self.reply(200, {"object": "list", "data": [{"id": "target", "object": "model"}]})

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][-1]["content"]
        with server.lock:
            server.asked[text] += 1
            server.requests.append(request)
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
            dead = server.dies_after is not None and server.answered >= server.dies_after
            server.answered += not dead
        try:
            if server.together:
                server.together.wait()
            if not dead:  # else the connection is closed without a word
                self.answer(text, request)
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, text, request):
        kind = text.split()[0]
        if kind == "flaky" and self.server.asked[text] <= 2:
            return self.reply(500, {"error": {"message": "engine busy"}})
        if kind == "bad":
            return self.reply(400, {"error": {"message": "too long for the context"}})
        body = answer_body(text, [] if kind == "mute" else None)
        if kind == "textonly":
            del body["choices"][0]["token_ids"]
        return self.reply(200, body)


def expected_ids(text):
    return [len(text), *text.encode()[-(ANSWER_TOKENS - 1) :]]


def answer_body(text, token_ids=None):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": f"{text}\u2028 🙂"},
        "finish_reason": "length",
        "token_ids": expected_ids(text) if token_ids is None else token_ids,
    }
    return {
        "id": "1", "object": "chat.completion", "created": 0, "model": "target",
        "choices": [choice], "prompt_token_ids": list(text.encode()),
    }  # fmt: skip


@pytest.fixture
def server():
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def ask(server, tmp_path):
    """Ask for answers into one folder; a second call resumes the first."""

    def ask(texts, *, retries=3, concurrency=4, max_reject_share=1.0, **options):
        return generate_answers(
            prompts_of(texts),
            Client(server.url, retries=retries, timeout_s=20),
            tmp_path / "run",
            Sampling(max_new_tokens=9, temperature=0.5, train_on_cut=True),
            concurrency=concurrency,
            max_reject_share=max_reject_share,
            **options,
        )

    return ask


def prompts_of(texts):
    rows = [({"role": "user", "content": text},) for text in texts]
    return [Prompt(prompt_id(list(messages)), messages, "workload") for messages in rows]


def texts_of(rows):
    return [row.messages[-1]["content"] for row in rows]


def test_an_answer_holds_the_ids_that_the_server_saw_and_made(ask, server, tmp_path):
    prompt = prompts_of(["question 1"])[0]
    (row,) = ask(["question 1"])
    assert row.answer_token_ids == expected_ids("question 1")
    assert row.prompt_token_ids == list(b"question 1")
    assert row.text == "question 1\u2028 🙂" and row.finish_reason == "length"
    assert (row.id, row.set, row.split) == (prompt.id, prompt.set, prompt.split)
    assert read_answers(tmp_path / "run") == [row]
    (request,) = server.requests
    assert request["return_token_ids"] is True
    assert (request["max_completion_tokens"], request["temperature"]) == (9, 0.5)


def test_the_seed_is_the_prompts_own(ask, server, tmp_path):
    """So that a resumed run at temperature > 0 asks the same question as the first one did."""
    ask(["question 1", "question 2"])
    first = {r["messages"][0]["content"]: r["seed"] for r in server.requests}
    server.requests.clear()
    (tmp_path / "run" / "answers.jsonl").unlink()
    ask(["question 2", "question 1"], concurrency=1)
    assert {r["messages"][0]["content"]: r["seed"] for r in server.requests} == first
    assert len(set(first.values())) == 2


def test_a_failing_request_is_tried_again_by_the_client(ask, server):
    rows = ask(["flaky 1", "question 1"])
    assert sorted(texts_of(rows)) == ["flaky 1", "question 1"]
    assert server.asked == {"flaky 1": 3, "question 1": 1}


def test_a_request_that_keeps_failing_is_a_user_error_with_the_servers_words(ask, server):
    with pytest.raises(UserError, match=r"engine busy(?s:.)*next: .*again"):
        ask(["flaky 1"], retries=1)
    assert server.asked["flaky 1"] == 2


def test_a_refused_prompt_is_counted_with_its_reason_and_not_asked_again(ask, server, tmp_path):
    texts = ["bad 1", "question 1", "mute 1"]
    assert texts_of(ask(texts)) == ["question 1"]
    rejects = {row["id"]: row["reason"] + row["detail"] for row in read_rejects(tmp_path / "run")}
    bad, _, mute = prompts_of(texts)
    assert set(rejects) == {bad.id, mute.id}
    assert "too long for the context" in rejects[bad.id] and rejects[mute.id] == "empty answer"

    # No token at all, not even a stop token, is the server's fault: that is tried again.
    assert server.asked["bad 1"] == 1 and server.asked["mute 1"] > 1
    server.asked.clear()
    assert texts_of(ask(texts)) == ["question 1"]
    assert server.asked == {}
    assert len(read_rejects(tmp_path / "run")) == 2


def test_too_large_a_share_of_refusals_stops_the_run_early_with_the_reasons(ask, server):
    texts = [f"{'bad' if i % 2 else 'question'} {i}" for i in range(100)]
    with pytest.raises(UserError, match=r"too long for the context(?s:.)*max_reject_share"):
        ask(texts, max_reject_share=0.2)
    assert sum(server.asked.values()) < 40


@pytest.mark.parametrize(("bad", "stops"), [(1, False), (2, False), (3, True), (10, True)])
def test_a_set_too_small_to_stop_early_is_judged_at_its_end(ask, bad, stops):
    """Ten prompts, all refused, were once a success with no answers."""
    texts = [f"{'bad' if i < bad else 'question'} {i}" for i in range(10)]
    if stops:
        with pytest.raises(UserError, match=f"{bad} of 10 prompts were refused"):
            ask(texts, max_reject_share=0.2)
    else:
        assert len(ask(texts, max_reject_share=0.2)) == 10 - bad


def test_a_server_without_token_ids_is_a_user_error_that_says_what_to_serve(ask, tmp_path):
    with pytest.raises(UserError, match=r"no token ids(?s:.)*next: .*vLLM"):
        ask(["textonly 1"])
    assert read_answers(tmp_path / "run") == []


def test_a_server_that_is_not_there_is_a_user_error_that_names_the_next_step(ask, server):
    server.stop()
    with pytest.raises(UserError) as caught:
        ask(["question 1"], retries=0)
    assert server.url in str(caught.value) and "next:" in str(caught.value)


TEXTS = [f"question {i}" for i in range(24)]


@pytest.mark.parametrize("dies_after", [0, 1, 10, 23])
def test_a_run_resumed_after_the_server_died_ends_like_an_uninterrupted_one(
    ask, server, tmp_path, dies_after
):
    server.dies_after = dies_after
    with pytest.raises(UserError, match=r"next: .*finished answers are kept"):
        ask(TEXTS, retries=0, concurrency=4)
    kept = texts_of(read_answers(tmp_path / "run"))
    assert dies_after - 3 <= len(kept) <= dies_after  # what was in flight is lost

    server.dies_after = None
    server.asked.clear()
    rows = ask(TEXTS)
    lines = (tmp_path / "run" / "answers.jsonl").read_text(encoding="utf-8").split("\n")
    ids = [json.loads(line)["id"] for line in lines if line]
    assert Counter(ids) == Counter(p.id for p in prompts_of(TEXTS))  # all, and nothing twice
    assert {r.id: r.answer_token_ids for r in rows} == {
        p.id: expected_ids(t) for p, t in zip(prompts_of(TEXTS), TEXTS, strict=True)
    }
    assert set(server.asked) == set(TEXTS) - set(kept)
    assert all(n == 1 for n in server.asked.values())


def test_a_run_killed_while_it_wrote_a_line_asks_for_that_answer_again(ask, server, tmp_path):
    ask(TEXTS[:3], concurrency=1)
    path = tmp_path / "run" / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    server.asked.clear()
    assert sorted(texts_of(ask(TEXTS[:3]))) == sorted(TEXTS[:3])
    assert server.asked == {TEXTS[2]: 1}
    assert texts_of(read_answers(tmp_path / "run")) == TEXTS[:3]


def test_a_finished_run_asks_for_nothing(ask, server):
    before = ask(TEXTS)
    server.asked.clear()
    assert ask(TEXTS) == before
    assert server.asked == {}


def test_at_most_so_many_are_asked_at_once_in_their_order(ask, server):
    server.together = threading.Barrier(3, timeout=20)
    ask(TEXTS, concurrency=3)
    assert server.most_in_flight == 3
    server.together = None
    server.requests.clear()
    ask([f"other {i}" for i in range(6)], concurrency=1)
    assert [r["messages"][0]["content"] for r in server.requests] == [
        f"other {i}" for i in range(6)
    ]


@pytest.mark.parametrize("want", [1, ANSWER_TOKENS, 3 * ANSWER_TOKENS + 1])
def test_it_stops_asking_once_enough_tokens_are_there(ask, server, want):
    concurrency = 2
    rows = ask(TEXTS, want_tokens=want, concurrency=concurrency)
    needed = -(-want // ANSWER_TOKENS)
    # What is in flight when the last needed answer comes in is finished, and kept for later.
    assert set(texts_of(rows)) == set(TEXTS[:needed])
    assert set(server.asked) <= set(TEXTS[: needed + concurrency - 1])


def test_tokens_of_the_run_before_count_and_those_of_other_prompts_do_not(ask, server):
    ask(["other 1", "other 2"])
    ask(TEXTS[:2])
    server.asked.clear()
    ask(TEXTS, want_tokens=2 * ANSWER_TOKENS)
    assert server.asked == {}
    ask(TEXTS, want_tokens=3 * ANSWER_TOKENS, concurrency=1)
    assert set(server.asked) == {TEXTS[2]}


def test_every_new_answer_is_told_and_on_disk_by_then(ask, tmp_path):
    told = []

    def on_answer(row):
        told.append(row)
        assert row in read_answers(tmp_path / "run")

    ask(TEXTS[:3])
    rows = ask(TEXTS[:6], on_answer=on_answer)
    assert sorted(texts_of(told)) == sorted(TEXTS[3:6]) and len(rows) == 6


def test_looping_is_a_stretch_repeated_and_nothing_less():
    stretch = list(range(rows_module._LOOP_TOKENS))
    repeats = rows_module._LOOP_REPEATS
    assert is_looping([9, 9, 9, *stretch * repeats])
    # One stretch less; the stretch that starts one token later stands there once less still.
    assert not is_looping(stretch * (repeats - 1))
    apart = [token for i in range(repeats) for token in (*stretch, 100 + i)]
    assert is_looping(apart)
    assert not is_looping(list(range(1000)))
    assert not is_looping([]) and not is_looping(stretch)


def test_looping_answers_are_kept_and_counted_but_not_trained_on():
    common = {"id": "1", "set": "workload", "messages": [], "prompt_token_ids": [1, 2],
              "answer_token_ids": [3, 4, 5], "text": "x", "finish_reason": "stop"}  # fmt: skip
    rows = [
        AnswerRow(**common, split=split, looping=looping)
        for split in ("train", "heldout")
        for looping in (False, True)
    ]
    assert [row.trained for row in rows] == [True, False, False, False]
    counts = describe_answers(
        rows, [Reject("p:1", "not UTF-8")], [{"reason": "empty answer"}, {"reason": "not UTF-8"}]
    )
    assert (counts["answers"], counts["trained_answers"], counts["looping_answers"]) == (4, 1, 2)
    assert counts["answer_tokens"] == {"workload_heldout": 6, "workload_train": 6}
    assert (counts["trained_tokens"], counts["prompt_tokens"]) == (3, 8)
    assert counts["left_out"] == {"not UTF-8": 2, "empty answer": 1}


def test_rejects_of_reading_do_not_count_as_refused_and_hide_no_prompt(ask, tmp_path):
    """They stand in the same file; a duplicate's prompt must still be asked."""
    rejects = [Reject(f"p:{i}", "duplicate prompt", p.id) for i, p in enumerate(prompts_of(TEXTS))]
    write_read_rejects(tmp_path / "run", rejects)
    assert len(ask(TEXTS, max_reject_share=0.0)) == len(TEXTS)
    with pytest.raises(UserError, match=r"1 of 25 prompts were refused: 1 x refused by the"):
        ask([*TEXTS, "bad 1"], max_reject_share=0.0)
