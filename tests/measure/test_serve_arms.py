"""The runner with a fake engine in place of servers: gates, turns, blocks, resuming, stalls."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import threading
from typing import ClassVar

import pytest
from fake_engine import FakeEngine
from fake_phase import FakePhase

from eagle3lib.data.rows import AnswerRow
from eagle3lib.engine.bench_serve import BenchServe
from eagle3lib.engine.client import BadReply, NotExact
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.failures import DIED, MUTE, Failure
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure import ask, serve_arms
from eagle3lib.measure.arms import (
    OWN,
    PLAIN,
    REFERENCE,
    own_drafter,
    read_requests,
    read_sweeps,
)
from eagle3lib.measure.ask import Asker, is_streamed
from eagle3lib.measure.check import check_benchmark
from eagle3lib.measure.points import Point
from eagle3lib.measure.serve_arms import run_arms
from eagle3lib.measure.summary import summarise

PROMPTS = [
    AnswerRow(id=f"p{i}", set="workload", split="heldout",
              messages=[{"role": "user", "content": f"q{i}"}], prompt_token_ids=[1, 2],
              answer_token_ids=[3], text="", finish_reason="stop")
    for i in range(5)
]  # fmt: skip
CFG = BenchmarkParams(repeats=2, max_new_tokens=9, workload_prompts=5, general_prompts=0)


class FakeServer:
    """Poses as ``EngineServer``; what a drafter's folder is named decides how it behaves."""

    started: ClassVar[list[str]] = []
    threads, ready_after_s, version = 1, 0.0, "9.9"

    def __init__(self, config, log, say):
        self.config, self.log = config, log

    def __enter__(self):
        name = self.config.drafter.name if self.config.drafter else "plain"
        FakeServer.started.append(name)
        if name == "dies":
            raise Failure(DIED, "vllm died (exit code 3)", "loading weights", []).error(
                expected="a server", where="log"
            )
        rounds = {"plain": [], "rejects": [0] * 8}.get(name, [0, 2, 3])
        self.engine = FakeEngine(rounds, metrics=metrics_of(self.config))
        if name == "stalls":
            self.engine.events = waiting()
        self.url = self.engine.url
        return self

    def __exit__(self, *_):
        with contextlib.suppress(AttributeError):
            self.engine.close()

    def mute(self, told):
        return Failure(MUTE, f"makes no tokens: {told}", "ready", [])


def waiting():
    import time

    time.sleep(1.5)
    yield {"choices": []}


def metrics_of(config):
    return "# TYPE vllm:generation_tokens counter\nvllm:generation_tokens_total 1\n"\
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(serve_arms, "EngineServer", FakeServer)
    monkeypatch.setattr(serve_arms, "free_cores", lambda: 1)
    FakeServer.started = []

    def run(cfg=CFG, own="good", reference=None):
        arms = {PLAIN: None} | ({REFERENCE: tmp_path / reference} if reference else {})
        arms[OWN] = tmp_path / own
        return run_arms(FakePhase(tmp_path), cfg, arms, PROMPTS, tmp_path / "target")

    return run


def change(**values):
    return CFG.model_copy(update=values)


def test_all_arms_are_asked_and_recorded(run, tmp_path):
    rows = run(reference="known")
    assert FakeServer.started == ["plain", "known", "good"]  # the order of the gates
    assert len(rows) == 3 * len(PROMPTS) * 2 == len(read_requests(tmp_path))
    own = [r for r in rows if r.arm == OWN]
    assert all(r.accepted == [0, 2, 3] and r.counts["rounds"] == 3 for r in own)
    assert all(r.chunk_tokens == [1, 1, 3, 4] and r.finish_reason == "length" for r in own)
    gates = read_json(tmp_path / "gates.json")
    assert [(g["arm"], g["passed"]) for g in gates] == [(PLAIN, 1), (REFERENCE, 1), (OWN, 1)]
    metrics = json.loads(json.dumps(summarise(rows, CFG, read_json(tmp_path / "counters.json"))))
    assert [f for f in check_benchmark(rows, metrics) if f.severity == "error"] == []


@pytest.mark.parametrize(
    ("arms", "proves", "started"),
    [
        ({"own": "dies"}, "or vllm's integration", ["plain", "dies"]),
        ({"own": "dies", "reference": "known"}, "or its export", ["plain", "known", "dies"]),
        ({"reference": "dies"}, "vllm's integration of EAGLE-3", ["plain", "dies"]),
        ({"reference": "rejects"}, "vllm's integration of EAGLE-3", ["plain", "rejects"]),
    ],
    ids=str,
)
def test_a_failed_gate_stops_there_and_says_what_it_proves(run, tmp_path, arms, proves, started):
    with pytest.raises(UserError, match=proves):
        run(**arms)
    assert FakeServer.started == started
    assert read_requests(tmp_path) == []
    assert not read_json(tmp_path / "gates.json")[-1]["passed"]


def test_a_demanded_acceptance_length_is_a_gate(run):
    with pytest.raises(UserError, match=r"below 1\.50"):
        run(change(own_acceptance_length=1.5), own="rejects")
    run(own="rejects")  # by default a drafter that is never right is measured: what it costs


def test_what_is_done_is_not_asked_again(run, tmp_path):
    run()
    FakeServer.started = []
    assert len(run()) == 20 and FakeServer.started == []
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(line for line in path.read_text().splitlines(True)[:-3]))
    rows = run()
    assert len(rows) == 20 == len(read_requests(tmp_path))
    assert FakeServer.started == ["plain", "good"]


def test_sweeps_lie_beside_the_headline_and_each_k_starts_anew(run, tmp_path):
    cfg = change(concurrency="1,2", more_speculative_tokens="5")
    rows = run(cfg)
    assert FakeServer.started == ["plain", "good"] * 2
    assert {r.point for r in read_requests(tmp_path)} == {rows[0].point}
    assert len(rows) == 4 * 20 and len(read_sweeps(tmp_path)) == 3 * 20
    metrics = summarise(rows, cfg, {})
    assert len(metrics["points"]) == 4 * 2 and len(metrics["arms"]) == 2
    assert [b["concurrency"] for b in metrics["best"]] == [1, 2]


def test_of_many_at_once_about_eight_are_read_as_streams(run, tmp_path):
    """A client that wakes for every token of every request would be what is measured."""
    rows = run(change(concurrency="32"))
    assert {bool(r.chunk_s) for r in rows} == {True, False}
    for row in rows:
        assert bool(row.chunk_s) == is_streamed(row.prompt, 32)
        assert len(row.answer_token_ids) == 9 and row.prompt_token_ids == [1, 2]
    assert {(r.counts or {}).get("rounds") for r in rows if r.arm == OWN} == {3}
    assert all(is_streamed(row.prompt, 8) for row in rows)
    streamed = {n: sum(is_streamed(f"p{i}", n) for i in range(10_000)) for n in (15, 23, 256)}
    assert streamed[256] == pytest.approx(10_000 * 8 / 256, rel=0.25)
    assert all(n * streamed[n] / 10_000 < 8.5 for n in (15, 23))
    metrics = summarise(rows, change(concurrency="32"), read_json(tmp_path / "counters.json"))
    assert metrics["arms"][0]["first_token_s"] and metrics["arms"][1]["throughput_tokens_per_s"]


def test_whole_answers_come_through_one_client_a_server(run, monkeypatch):
    """To make a client takes some 40 ms of CPU: one a request would be what is measured."""
    made = []

    class Counted(ask.Client):
        def __init__(self, url, **options):
            if "retries" in options:
                made.append(url)
                # 8,192 tokens at 10 a second take longer than a client's usual ten minutes.
                assert options["timeout_s"] > 8192 / 10
            super().__init__(url, **options)

    monkeypatch.setattr(ask, "Client", Counted)
    rows = run(change(concurrency="32"))
    assert sum(not r.chunk_s for r in rows) > 2
    assert len(made) == len(set(made)) == 2


def test_half_a_block_is_asked_again_as_a_whole(run, tmp_path):
    """Two at once: what is left of a block alone would have another load."""
    cfg = change(concurrency="2")
    run(cfg)
    path = tmp_path / "requests.jsonl"
    lines = path.read_text().splitlines(True)
    path.write_text("".join(lines[:-2]))
    run(cfg)
    assert len(path.read_text().splitlines()) == len(lines) - 2 + len(PROMPTS)
    assert len(read_requests(tmp_path)) == 20


def test_blocks_start_one_server_at_a_time_and_the_baseline_twice(run, tmp_path):
    rows = run(change(side_by_side=False))
    assert FakeServer.started == ["plain", "good", "plain"]
    assert {r.visit for r in rows if r.arm == PLAIN} == {0, 2}
    assert len(rows) == 20


def test_a_temperature_is_sampled_with_seeds_apart(run, tmp_path, monkeypatch):
    asked, plainly = [], ask.Asker.ask

    def noted(self, server, prompt, point, limit, seed=None):
        asked.append((server.url, point.temperature > 0, limit))
        return plainly(self, server, prompt, point, limit, seed)

    monkeypatch.setattr(ask.Asker, "ask", noted)
    run(cfg := change(temperatures="0,0.8", lossless_samples=20))
    told = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    seeds = {arm: {t["seed"] for t in told if t["arm"] == arm} for arm in (PLAIN, OWN)}
    assert [len(s) for s in seeds.values()] == [20, 20] and not seeds[PLAIN] & seeds[OWN]
    assert {t["temperature"] for t in told} == {0.8}
    rows = list(read_requests(tmp_path))
    assert [t["rejected"] for t in summarise(rows, cfg, {}, told)["lossless"]] == [False]
    # Samples of a temperature that is no longer asked for judge nothing.
    assert summarise(rows, change(), {}, told)["lossless"] == []
    # SGLang compiles its sampling at first use, two minutes: that request is not a measured one.
    for server in {url for url, _, _ in asked}:
        sampled = [limit for url, warm, limit in asked if url == server and warm]
        assert sampled[0] == serve_arms._GATE_TOKENS and cfg.max_new_tokens in sampled


def test_a_server_that_stops_making_tokens_ends_the_benchmark(run, monkeypatch):
    """It answers and its counters stand still while a request runs: a rank hangs."""
    monkeypatch.setattr(serve_arms, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(serve_arms, "STALL_S", 0.2)
    real = FakeServer.__enter__

    def stall_after_the_gate(self):
        server = real(self)
        asked = []

        def stream(request):
            asked.append(request)
            if len(asked) > serve_arms._GATE_PROMPTS:
                return waiting()
            return type(server.engine).stream(server.engine, request)

        server.engine.stream = stream
        return server

    monkeypatch.setattr(FakeServer, "__enter__", stall_after_the_gate)
    with pytest.raises(UserError, match="makes no tokens"):
        run()


def test_a_server_that_hangs_under_a_second_opinion_ends_it_too(run, monkeypatch):
    monkeypatch.setattr(serve_arms, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(serve_arms, "STALL_S", 0.2)
    ended = threading.Event()
    monkeypatch.setattr(serve_arms, "bench_serve", lambda *_, **__: ended.wait(30))
    with pytest.raises(UserError, match="makes no tokens"):
        run(change(bench_serve=True))
    ended.set()


def test_a_second_opinion_is_asked_of_every_server_once_and_can_be_added_later(
    run, tmp_path, monkeypatch
):
    asked = []

    def bench_serve(prompts, url, config, **options):
        asked.append((config.drafter and config.drafter.name, len(prompts), options))
        n = len(prompts)
        return BenchServe(n * 1.0, [2] * n, [9] * n, [0.1] * n, [1.0] * n, [[0.9]] * n, None)

    monkeypatch.setattr(serve_arms, "bench_serve", bench_serve)
    run()
    assert asked == []
    cfg = change(bench_serve=True)
    rows = run(cfg)
    options = {"tokens": 9, "concurrency": 1, "temperature": 0.0}
    assert asked == [(None, 5, options), ("good", 5, options)]
    run(cfg)
    assert len(asked) == 2
    lines = [json.loads(x) for x in (tmp_path / "outside.jsonl").read_text().splitlines()]
    told = summarise(rows, cfg, {}, outside=lines)["outside"]
    assert [(t["arm"], t["client"]) for t in told[1::2]] == [
        (PLAIN, "vllm bench serve"), (OWN, "vllm bench serve")
    ]  # fmt: skip


def test_prompts_that_allow_no_second_opinion_are_told_before_anything_is_measured(
    run, monkeypatch
):
    two = [{"role": "system", "content": "S"}, *PROMPTS[0].messages]
    monkeypatch.setattr(
        sys.modules[__name__], "PROMPTS", [dataclasses.replace(p, messages=two) for p in PROMPTS]
    )
    with pytest.raises(UserError, match="no prompt of the workload"):
        run(change(bench_serve=True))
    assert FakeServer.started == []


def test_rows_are_plain_values():
    fields = {f.name for f in dataclasses.fields(serve_arms.RequestRow)}
    assert {"engine", "steps", "concurrency", "temperature", "chunk_s", "counts"} <= fields


def test_a_named_drafter_is_measured_without_phase_05(run, tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    cfg = change(drafter=str(tmp_path / "theirs"))
    assert cfg.upstream() == ("01_generate_data",) and "05_export_drafter" in CFG.upstream()
    with pytest.raises(UserError, match="the folder of drafter has no config"):
        own_drafter(FakePhase(tmp_path), cfg)
    (tmp_path / "theirs" / "config.json").write_text("{}")
    assert own_drafter(FakePhase(tmp_path), cfg) == tmp_path / "theirs"
    assert own_drafter(FakePhase(tmp_path), CFG) == tmp_path / "drafter"
    assert cfg.input_files()["drafter"] == tmp_path / "theirs"


@pytest.mark.parametrize("load", [1, 3])
def test_a_load_does_not_wait_for_the_disk(load):
    """What is kept of an answer must not hold back the next one, unless one is asked at a time."""
    begun, last, seen = [], threading.Event(), []

    def ask(task):
        begun.append(task)
        if len(begun) == 6:
            last.set()
        return task

    def keep(task):
        seen.append(last.wait(10 if load > 1 else 0.2) if not seen else True)

    visit = object.__new__(serve_arms._Visit)
    visit.servers = {}
    visit._work([("arm", i) for i in range(6)], ask, keep, load)
    assert seen == [load > 1, *[True] * 5] and len(begun) == 6


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_lone_requests_chunks_are_its_rounds_where_the_engine_tells_none(tmp_path, kind):
    """Of either engine, in a gate and in the benchmark: both ask here."""
    engine = FakeEngine([0, 2, 3], kind=kind)
    told = list(
        engine.stream({"max_completion_tokens": 9, "sampling_params": {"max_new_tokens": 9}})
    )
    for event in told:
        event.pop("metrics", None)
        for name in [n for n in event.get("meta_info", {}) if n.startswith("spec_")]:
            event["meta_info"].pop(name)
    engine.events = told
    asker = Asker(CFG, tmp_path, "vllm", 3)
    if kind == "sglang":
        asker._renderer = type("Renderer", (), {"prompt": lambda self, asked: ([1, 2], "q")})()
    server = type(
        "Server", (), {"url": engine.url, "config": EngineConfig(tmp_path, drafter=tmp_path)}
    )
    counts = asker.ask(server, PROMPTS[0], Point(kind), 9).counts
    assert (counts.rounds, counts.accepted) == (3, 5)
    engine.close()


def test_a_prompt_that_the_template_refuses_is_a_message(tmp_path):
    class Renderer:
        def prompt(self, asked):
            raise NotExact("refused turn", "no tools")

    asker = Asker(CFG, tmp_path, "vllm", 3)
    asker._renderer = Renderer()
    server = type("Server", (), {"url": "http://127.0.0.1:9", "config": EngineConfig(tmp_path)})
    with pytest.raises(BadReply, match=r"p0.*refused turn: no tools"):
        asker.ask(server, PROMPTS[0], Point("sglang"), 9)
