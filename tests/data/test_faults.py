"""Everything that servers and machines do to a long run: nothing is lost, and nothing is twice."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from stub_server import StubServer, own_words, prompt_of

import eagle3lib
from eagle3lib.data.generate import generate_answers
from eagle3lib.data.rows import read_answers, read_rejects
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.client import Client
from eagle3lib.engine.pool import Pool
from eagle3lib.lab.errors import UserError

SAMPLING = Sampling(max_new_tokens=9, temperature=0.7)
FAULTS = ["500", "503", "429", "reset", "half a body", "no JSON", "no choice", "no ids",
          "wrong ids", "lost ids", "empty"]  # fmt: skip


def pool_of(*urls, timeout_s=20.0, give_up_s=30.0):
    clients = [Client(url, retries=1, timeout_s=timeout_s) for url in urls]
    return Pool(clients, back_off_s=0.02, max_back_off_s=0.2, give_up_s=give_up_s, tries=8)


def generate(prompts, pool, folder, **options):
    options = {"concurrency": 8, "max_reject_share": 0.0} | options
    return generate_answers(prompts, pool, folder, SAMPLING, **options)


def content(rows):
    """Rows by id without the server's address: which one answers is left to chance."""
    assert len({row.id for row in rows}) == len(rows)
    return {row.id: asdict(replace(row, server="")) for row in rows}


@pytest.fixture
def servers():
    started = []

    def start(reply, count=1, **options):
        started.extend(StubServer(reply, **options) for _ in range(count))
        return started[-count:]

    yield start
    for server in started:
        if not server.dead:
            server.kill()


class Faulty:
    """A third of the questions meets one to three faults, whichever server is asked, before it is
    answered."""

    def __init__(self, texts):
        chance = random.Random(7)
        self.left = {t: chance.choices(FAULTS, k=chance.randint(1, 3)) for t in texts[::3]}
        self.left |= {t: ["slow"] for t in texts[1:1000:250]}
        self.met = Counter()

    def __call__(self, request):
        faults = self.left.get(request["messages"][-1]["content"])
        if not faults:
            return own_words(request)
        self.met[faults[-1]] += 1
        return faults.pop()


@pytest.mark.slow
def test_two_thousand_requests_through_every_fault_give_the_faultless_set(servers, tmp_path):
    texts = [f"question {i}" for i in range(2000)]
    prompts = [prompt_of(text) for text in texts]
    faulty = Faulty(texts)
    first, second = servers(faulty, count=2)

    def die_for_a_while():
        while second.replied < 400:
            time.sleep(0.01)
        second.kill()
        time.sleep(1.0)
        second.start()

    threading.Thread(target=die_for_a_while, daemon=True).start()
    pool = pool_of(first.url, second.url, timeout_s=2)
    rows = generate(prompts, pool, tmp_path / "faults", concurrency=16)

    assert set(faulty.met) == {*FAULTS, "slow"}
    assert read_rejects(tmp_path / "faults") == []
    assert sum(row.server == second.url for row in rows) > 500  # it was taken back
    assert read_answers(tmp_path / "faults") == rows
    (well,) = servers(own_words)
    sample = prompts[::20]
    faultless = content(generate(sample, pool_of(well.url), tmp_path / "well"))
    made = content(rows)
    assert set(made) == {p.id for p in prompts}
    assert {p.id: made[p.id] for p in sample} == faultless


PROMPTS = [
    prompt_of(f"question {i}", *((f"given answer {i}", f"and {i}?") if i % 5 == 0 else ()))
    for i in range(300)
]
WANT_TOKENS = 2400  # of some 3,900 with two answers each

CHILD = """
import random, sys
from pathlib import Path
import test_faults as t
prompts = random.Random(sys.argv[3]).sample(t.PROMPTS, len(t.PROMPTS))
prompts = sorted(prompts, key=lambda p: p.id)  # as the phase does
print("ready", flush=True)
t.generate(prompts, t.pool_of(sys.argv[1]), Path(sys.argv[2]), want_tokens=t.WANT_TOKENS,
           answers_per_prompt=2)
"""


def generate_in_child(url, folder, seed, **options):
    path = [str(Path(eagle3lib.__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys; sys.path[:0] = {path!r}\n{CHILD}"
    child = subprocess.Popen(
        [sys.executable, "-c", code, url, str(folder), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.slow
def test_ten_kills_at_random_moments_give_the_set_of_an_uninterrupted_run(servers, tmp_path):
    chance = random.Random(3)

    def answer(request):
        time.sleep(chance.uniform(0.03, 0.08))
        return own_words(request)

    (server,) = servers(answer)
    kills = 0
    for seed in range(10):
        child = generate_in_child(server.url, tmp_path / "killed", seed)
        time.sleep(chance.uniform(0.05, 0.25))
        child.kill()
        kills += child.wait() == -9
    child = generate_in_child(server.url, tmp_path / "killed", 10)
    assert child.wait(timeout=60) == 0
    assert kills == 10
    server.reply = own_words
    whole = sorted(PROMPTS, key=lambda p: p.id)
    pool = pool_of(server.url)
    rows = generate(whole, pool, tmp_path / "whole", want_tokens=WANT_TOKENS, answers_per_prompt=2)
    assert content(read_answers(tmp_path / "killed")) == content(rows)
    assert sum(row.usable_tokens for row in rows) >= WANT_TOKENS
    assert {row.repeat for row in rows} == {0, 1} and {row.turn for row in rows} == {0, 1}


def test_a_kill_between_two_renames_loses_nothing(servers, tmp_path, monkeypatch):
    """The wanted answers and those beyond them change files in three renames."""
    from eagle3lib.data import generate as module

    (server,) = servers(own_words)
    pool = pool_of(server.url)
    prompts = PROMPTS[:40]
    generate(prompts, pool, tmp_path / "a")  # all of them, so that some are beyond what is wanted
    whole = module.write_atomic
    for last in (0, 1, 2):
        left = iter(range(last))

        def write(path, how, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            whole(path, how)

        monkeypatch.setattr(module, "write_atomic", write)
        with pytest.raises(KeyboardInterrupt):
            generate(prompts, pool, tmp_path / "a", want_tokens=60)
    monkeypatch.setattr(module, "write_atomic", whole)
    asked = len(server.requests)
    few = generate(prompts, pool, tmp_path / "a", want_tokens=60)
    assert len(few) < 25 and read_answers(tmp_path / "a") == few
    again = generate(prompts, pool, tmp_path / "a", want_tokens=60)
    assert content(again) == content(few)
    more = generate(prompts, pool, tmp_path / "a")
    assert len({r.messages[0]["content"] for r in more}) == 40
    assert len(server.requests) == asked


def test_a_set_that_is_shuffled_or_has_grown_is_continued(servers, tmp_path):
    (server,) = servers(own_words)
    generate(PROMPTS[:30], pool_of(server.url), tmp_path / "a")
    shuffled = random.Random(1).sample(PROMPTS[:60], 60)
    rows = generate(shuffled, pool_of(server.url), tmp_path / "a")
    assert content(rows) == content(
        generate(PROMPTS[:60], pool_of(server.url), tmp_path / "b", concurrency=1)
    )
    assert max(Counter(str(r["messages"]) for r in server.requests).values()) == 2  # once a folder


def test_servers_that_all_die_are_named_with_their_errors_and_the_answers_kept(servers, tmp_path):
    def answer(request):
        return own_words(request) if len(server.requests) < 40 else "500"

    server, other = servers(answer, count=2)
    other.kill()
    with pytest.raises(UserError) as caught:
        generate(PROMPTS, pool_of(server.url, other.url, give_up_s=0.3), tmp_path / "a")
    assert all(word in str(caught.value) for word in (server.url, other.url, "fault 500", "kept"))
    assert len(read_answers(tmp_path / "a")) > 30


def test_one_poisonous_question_is_given_up_and_asked_again_by_the_next_run(servers, tmp_path):
    def answer(request):
        poison = request["messages"][-1]["content"] == "question 7"
        return "500" if poison and server.model == "target" else own_words(request)

    (server,) = servers(answer)
    rows = generate(PROMPTS[:50], pool_of(server.url), tmp_path / "a", max_reject_share=0.1)
    (reject,) = read_rejects(tmp_path / "a")
    assert reject["reason"] == "failed on every try" and "fault 500" in reject["detail"]
    assert PROMPTS[7].id not in content(rows)
    server.model = "mended"
    rows = generate(PROMPTS[:50], pool_of(server.url), tmp_path / "a", max_reject_share=0.0)
    assert PROMPTS[7].id in content(rows)


def test_ctrl_c_does_not_wait_for_the_answers_in_flight(servers, tmp_path):
    def answer(request):
        if len(server.requests) > 5:
            time.sleep(20)
        return own_words(request)

    (server,) = servers(answer)
    child = generate_in_child(server.url, tmp_path / "a", 0, stderr=subprocess.PIPE)
    while len(server.requests) <= 5:
        time.sleep(0.02)
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, errors = child.communicate(timeout=15)
    assert time.monotonic() - started < 5
    assert "KeyboardInterrupt" in errors and child.returncode != 0
    assert len(read_answers(tmp_path / "a")) >= 3
