"""The result of an arm: rates by hand, and the checks that make numbers unusable."""

from __future__ import annotations

import random
import shlex
from dataclasses import replace

import pytest
from test_arms import benchmark, counters, request

from eagle3lib.engine.settings import ServeParams, split_words
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.accounting import round_cost, rounds_of
from eagle3lib.measure.arms import OWN, PLAIN, RequestRow
from eagle3lib.measure.ask import engine_config
from eagle3lib.measure.best_k import best_settings, with_commands
from eagle3lib.measure.check import (
    check_baseline,
    check_benchmark,
    check_drift,
    check_mended,
    check_sampled,
    check_workload,
    looks_random,
)
from eagle3lib.measure.points import Point
from eagle3lib.measure.result import arm_result, cost_per_million, per_request_length, reference_of
from eagle3lib.measure.summary import drift_of, summarise

POINT = Point()


def streamed(arm, prompt, accepted=None, *, step_s=0.1, **values):
    """An answer whose first token takes 1 s and whose steps (rounds, for a drafter) ``step_s``."""
    sizes = [1, *([1] * 8 if accepted is None else [a + 1 for a in accepted])]
    at_s = [round(1 + step_s * i, 6) for i in range(len(sizes))]
    told = {
        "arm": arm, "set": "workload", "prompt": prompt, "repeat": 0, "prompt_token_ids": [9],
        "answer_token_ids": list(range(sum(sizes))), "finish_reason": "length",
        "duration_s": at_s[-1], "accepted": accepted,
        "drafted": [3] * len(accepted) if accepted is not None else None, "steps": 3,
        "chunk_s": at_s, "chunk_tokens": sizes,
    }  # fmt: skip
    return RequestRow(**told | values)


def pair(**values):
    """Plain: 9 tokens in 1.8 s. Own: rounds of 3 accepted drafts that cost 2 plain steps each."""
    return [
        streamed(arm, f"p{i}", accepted, step_s=step_s, **values)
        for i in range(6)
        for arm, accepted, step_s in ((PLAIN, None, 0.1), (OWN, [3, 3], 0.2))
    ]


def test_the_clock_alone_gives_the_cost_of_a_round():
    plain, own = (arm_result(pair(), arm, "workload", POINT) for arm in (PLAIN, OWN))
    assert own.round_cost_streamed == pytest.approx(2.0)
    assert own.acceptance["acceptance_length"] == 4.0
    assert own.speedup["value"] == pytest.approx(1.8 / 1.4, abs=1e-4)
    assert own.round_cost == pytest.approx(4 / (1.8 / 1.4), abs=1e-3)
    assert plain.first_token_s == own.first_token_s == {"p50": 1.0, "p99": 1.0}
    assert plain.inter_token_s["p50"] == pytest.approx(0.1)
    assert own.inter_token_s["p50"] == pytest.approx(0.05)  # a round's wait, shared by 4 tokens
    assert own.inter_chunk_s["p50"] == pytest.approx(0.2)
    assert plain.as_dict().keys() < own.as_dict().keys()


def test_the_published_story_as_a_result():
    """7,530 drafted at K=5, 1,127 accepted, 54.6 against 82.5 tok/s: a round cost 2.64 steps."""
    rounds, tokens = int(rounds_of(7530, 5)), 1 + 1506 + 1127
    accepted = [1] * 1127 + [0] * (rounds - 1127)
    rows = []
    for i in range(6):
        for arm, speed in ((PLAIN, 82.5), (OWN, 54.6)):
            row = request(arm, f"p{i}", answer=range(tokens), seconds=tokens / speed,
                          accepted=accepted if arm == OWN else None)  # fmt: skip
            rows.append(row)
    own = arm_result(rows, OWN, "workload", Point(steps=5))
    assert own.acceptance["rounds"] == 6 * 1506
    assert own.acceptance["acceptance_length"] == pytest.approx(1.748, abs=5e-4)
    assert own.speedup["value"] == pytest.approx(0.66, abs=5e-3)
    assert own.round_cost == pytest.approx(2.64, abs=5e-3)
    assert own.round_cost == pytest.approx(
        round_cost(own.acceptance["acceptance_length"], own.speedup["value"]), abs=1e-3
    )


def test_pooled_is_the_headline_and_the_mean_of_requests_beside_it():
    """vLLM issue 42508: 10 tokens in 10 rounds and 300 in 100 are 2.82 pooled, 2.0 in the mean."""
    rows = [request(OWN, "a", accepted=[0] * 10), request(OWN, "b", accepted=[2] * 100)]
    own = arm_result(rows, OWN, "workload", POINT)
    assert own.acceptance["acceptance_length"] == pytest.approx(2.818, abs=1e-3)
    assert own.acceptance["per_request_length"] == per_request_length(rows, 3) == 2.0


def test_throughput_of_a_block_is_by_the_wall_clock():
    """Two requests of 9 tokens and 1.8 s, started together: 18 tokens in 1.8 s."""
    rows = [streamed(PLAIN, f"p{i}", concurrency=2, started_s=1000.0) for i in range(2)]
    line = arm_result(rows, PLAIN, "workload", Point(concurrency=2))
    assert line.throughput_tokens_per_s == pytest.approx(10.0)
    assert line.tokens_per_s == pytest.approx(5.0)


def test_cost_follows_from_the_price_and_the_throughput():
    assert cost_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert cost_per_million(0.0, 1000.0) is None


def codes(findings):
    return [(f.code, f.severity) for f in findings]


def test_a_baseline_of_another_engine_is_none():
    rows = [*pair(), *(r for r in pair(engine="sglang") if r.arm == OWN)]
    assert codes(check_baseline(rows)) == [("no-baseline", "error")]
    assert check_baseline(pair()) == []
    # Nor is one of another load, temperature or K.
    for change in ({"concurrency": 8}, {"temperature": 1.0}, {"steps": 5}):
        more = [r for r in pair(**change) if r.arm == OWN]
        assert codes(check_baseline([*pair(), *more])) == [("no-baseline", "error")]


def test_looping_answers_measure_nothing():
    looping = [request(PLAIN, "p", answer=[1, 2, 3, 4, 5, 6, 7, 8] * 12)]
    assert codes(check_workload(looping)) == [("no-measure-of-acceptance", "warning")]
    assert check_workload([request(PLAIN, "p", answer=range(100))]) == []


def test_random_prompts_measure_nothing():
    """vLLM issue 33497: random tokens with ignored end. The template around them is no language."""
    rng = random.Random(0)
    template = list(range(20))
    noise = [template + [rng.randrange(50_000) for _ in range(100)] for _ in range(8)]
    words = [template + [rng.randrange(200) for _ in range(100)] for _ in range(8)]
    assert looks_random(noise) and not looks_random(words)
    assert not looks_random(noise[:2])  # too few tokens to tell


def test_drift_is_that_of_the_baseline_between_its_visits():
    rows = [
        streamed(PLAIN, "p", visit=visit, repeat=visit, duration_s=seconds)
        for visit, seconds in ((0, 1.0), (2, 1.25))
    ]
    drift = drift_of(rows, POINT)
    assert drift["change"] == pytest.approx(-0.2) and drift["blocks"]
    assert codes(check_drift([drift])) == [("drift", "warning")]
    assert check_drift([drift | {"change": 0.01}]) == []
    assert drift_of(rows[:1], POINT) is None


def test_a_broken_identity_is_found_in_one_request():
    rows = benchmark()
    told = {"rounds": 1, "accepted": 2, "drafted": 3, "accepted_at": [1, 1, 0], "source": "test"}
    rows = [r if r.arm == PLAIN else request_with(r, told) for r in rows]
    metrics = summarise(rows, BenchmarkParams(repeats=1), counters())
    assert check_benchmark(rows, metrics) == []
    broken = [r if r.arm == PLAIN else request_with(r, told | {"rounds": 9}) for r in rows]
    found = codes(check_benchmark(broken, summarise(broken, BenchmarkParams(repeats=1), {})))
    assert ("record-identity", "error") in found and ("accounting", "error") in found


def request_with(row, counts):
    return RequestRow(**{**row.__dict__, "accepted": None, "drafted": None, "counts": counts})


@pytest.mark.parametrize(
    ("sampled", "told"),
    [
        ([0, 0, 0], ["sampling-accepts-nothing"]),  # 90 rounds, 90 accepted at the greedy rate
        ([0, 1, 0], []),  # less than greedily, as it may be
    ],
)
def test_a_sampler_that_never_accepts_is_not_the_drafters_fault(sampled, told):
    """vLLM issue 55005: exactly 1.00 at a temperature where greedy rounds accept."""
    rows = [
        request_at(heat, f"p{i}", accepted)
        for i in range(30)
        for heat, accepted in ((0.0, [1, 2, 0]), (0.7, sampled))
    ]
    assert [f.code for f in check_sampled(rows, 3)] == told
    assert check_sampled(rows[:10], 3) == []  # too few rounds to tell
    assert check_sampled([r for r in rows if r.temperature], 3) == []  # nothing to hold it against


def request_at(temperature, prompt, accepted):
    row = request(OWN, prompt, answer=range(1 + len(accepted) + sum(accepted)), accepted=accepted)
    return replace(row, temperature=temperature)


def test_figures_of_a_mended_engine_are_marked_where_it_matters():
    servers = {OWN: {"mended": True}, PLAIN: {"mended": False}}
    hot = [request_at(0.7, "p", [0])]
    assert codes(check_mended(hot, servers)) == [("sampling-mended", "note")]
    assert check_mended([request_at(0.0, "p", [0])], servers) == []
    assert check_mended(hot, {OWN: {}}) == []


def test_unknown_rounds_are_said_not_guessed():
    rows = [r if r.arm == PLAIN else request_with(r, None) for r in benchmark()]
    metrics = summarise(rows, BenchmarkParams(repeats=1), {})
    assert codes(check_benchmark(rows, metrics)) == [("no-round-record", "warning")]


def lines(*measured):
    """Own drafter's lines of (concurrency, K, speed-up, low)."""
    return [
        {"arm": OWN, "set": "workload", "engine": "vllm", "temperature": 0.0, "context_tokens": 0,
         "concurrency": load, "num_speculative_tokens": steps, "round_cost": 2 / value,
         "acceptance": {"acceptance_length": 2.0},
         "speedup": {"value": value, "low": low, "high": value + 0.2}}
        for load, steps, value, low in measured
    ]  # fmt: skip


def test_the_best_k_depends_on_the_load():
    best = best_settings(
        lines((1, 3, 1.4, 1.3), (1, 5, 1.6, 1.5), (64, 3, 0.9, 0.8), (64, 5, 0.7, 0.6))
    )
    assert [(b["concurrency"], b["num_speculative_tokens"]) for b in best] == [(1, 5), (64, 0)]
    assert best[0]["break_even"] == {"3": 2 / 1.4, "5": 2 / 1.6}


def test_without_a_baseline_there_is_no_best_k():
    known, unknown = lines((1, 3, 1.4, 1.3), (1, 5, 1.6, 1.5))
    assert best_settings([known, unknown | {"speedup": None}])[0]["num_speculative_tokens"] == 3
    assert best_settings([unknown | {"speedup": None}]) == []


def test_a_gain_that_may_be_noise_starts_no_drafter(tmp_path):
    best = best_settings(lines((1, 3, 1.2, 0.9)))
    assert best[0]["num_speculative_tokens"] == 0 and not best[0]["sure"]
    (line,) = with_commands(best, BenchmarkParams(), tmp_path, tmp_path / "drafter")
    assert "speculative" not in line["command"] + line["engine_command"]


@pytest.mark.parametrize(
    ("engine", "words"),
    [("vllm", ("vllm serve", '"num_speculative_tokens": 5')),
     ("sglang", ("-m sglang.launch_server", "--speculative-num-draft-tokens 6"))],
)  # fmt: skip
def test_the_command_starts_what_was_best(tmp_path, engine, words):
    """SGLang counts the root: K=5 is 6 draft tokens there."""
    best = [line | {"engine": engine} for line in best_settings(lines((8, 5, 1.6, 1.5)))]
    (line,) = with_commands(best, BenchmarkParams(), tmp_path, tmp_path / "my drafter")
    command = line["engine_command"]
    assert all(word in command for word in words) and "my drafter" in command


@pytest.mark.parametrize("cfg", [
    BenchmarkParams(),
    BenchmarkParams(compile=True, dtype="float32", concurrency="1,64", max_model_len=2048,
                    vllm_settings="memory_share=0.4 attention_backend=X -- --a-flag 3"),
])  # fmt: skip
@pytest.mark.parametrize("steps", [5, 0])
def test_our_command_starts_the_server_that_was_measured(tmp_path, cfg, steps):
    """Read as ``eagle3 serve`` reads it, it gives the same settings, but for the prefix cache."""
    best = best_settings(lines((64, 5, 1.6, 1.5 if steps else 0.9)))
    target, drafter = tmp_path / "a target", tmp_path / "my drafter"
    (line,) = with_commands(best, cfg, target, drafter)
    words = shlex.split(line["command"])
    assert words[:3] == ["eagle3", "serve", str(target)]
    values, flags = split_words(words[3:])
    measured = engine_config(cfg, target, "vllm", steps or 1, drafter if steps else None)
    told = ServeParams.checked(values).config(target, flags)
    k = steps or told.num_speculative_tokens  # without a drafter it says nothing
    assert told == replace(measured, prefix_cache=True, max_num_seqs=64, num_speculative_tokens=k)
    assert values["port"] == 8000


def test_the_reference_of_a_watch_counts_first_repeats_alone():
    rows = [
        request(OWN, f"p{i}", repeat=repeat, accepted=[i % 3] * 10)
        for i in range(6)
        for repeat in range(3)
    ]
    told = reference_of(rows, 3)
    assert (told["rounds"], told["accepted"]) == (60, 60)
    # All rounds of a prompt accept the same: ten times as spread as independent rounds (6 / 5
    # for the prompts' own mean).
    assert told["spread"] == pytest.approx(10 * 6 / 5)
    assert reference_of([], 3) is None


def test_the_headlines_engine_is_the_one_that_served():
    """The environment's vLLM says nothing of an SGLang server."""
    rows = [replace(row, engine="sglang") for row in benchmark()]
    cfg = BenchmarkParams(repeats=1, engines="sglang")
    told = summarise(rows, cfg, {}, servers={PLAIN: {"version": "0.5.15"}})
    assert told["engine"] == {"engine": "sglang", "version": "0.5.15"}
    assert summarise(rows, cfg, {})["engine"] == {"engine": "sglang", "version": None}
