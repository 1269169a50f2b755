"""`vllm bench serve` as a second opinion: its result in our schema, its errors, what must agree."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest
from test_arms import request

from eagle3lib.data.rows import AnswerRow
from eagle3lib.engine.bench_serve import BenchServe, bench_serve, read_result
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.records import RoundCounts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import OWN, PLAIN
from eagle3lib.measure.check import check_benchmark
from eagle3lib.measure.outside import (
    check_outside,
    outside_line,
    outside_prompts,
    outside_results,
)
from eagle3lib.measure.points import Point
from eagle3lib.measure.summary import outside_table, summarise
from eagle3lib.report.benchmark_figures import outside_bars

TOLD = {
    "duration": 2.5, "completed": 2, "failed": 0, "input_lens": [9, 8], "output_lens": [4, 4],
    "ttfts": [0.5, 0.5], "latencies": [1.0, 1.5], "itls": [[0.5], [0.5, 0.5]], "errors": ["", ""],
    "spec_decode_num_drafts": 3, "spec_decode_draft_tokens": 9, "spec_decode_accepted_tokens": 4,
    "spec_decode_per_position_acceptance_rates": [2 / 3, 2 / 3, 0.0],
}  # fmt: skip


def test_its_result_is_read_with_the_servers_counts():
    result = read_result(json.dumps(TOLD), 2)
    assert (result.seconds, result.answer_tokens, result.wait_s) == (2.5, [4, 4], TOLD["itls"])
    assert result.counts == RoundCounts(3, 4, 9, [2, 2, 0], "vllm bench serve")
    plain = {k: v for k, v in TOLD.items() if not k.startswith("spec_decode")}
    assert read_result(json.dumps(plain), 2).counts is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Traceback", "can't be read"),
        (json.dumps({k: v for k, v in TOLD.items() if k != "itls"}), "'itls'"),
        (
            json.dumps({k: v for k, v in TOLD.items() if k != "spec_decode_accepted_tokens"}),
            "'spec_decode_accepted_tokens'",
        ),
        (json.dumps(TOLD | {"completed": 1, "errors": ["", "HTTP 500"]}), "1 of 2 .* HTTP 500"),
        (json.dumps(TOLD | {"ttfts": [0.5]}), "ttfts of another length"),
    ],
    ids=["no JSON", "a key less", "a counter less", "a request failed", "a list cut short"],
)
def test_a_result_that_can_not_be_trusted_is_refused(text, said):
    with pytest.raises(UserError, match=f"vllm bench serve failed: (?s:.)*{said}"):
        read_result(text, 2)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """``stub(body)``: a Python that is named as vLLM's and runs ``body`` in place of the command;
    ``words`` are its arguments, ``folder`` is where the result belongs."""

    def make(body):
        script = tmp_path / "python-of-vllm"
        lines = [
            f"#!{sys.executable}",
            "import json, sys",
            "from pathlib import Path",
            "words = sys.argv[1:]",
            "value = lambda name: words[words.index(name) + 1]",
            "folder = Path(value('--result-dir'))",
            body,
        ]
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)
        monkeypatch.setenv("EAGLE3_VLLM_PYTHON", str(script))
        return EngineConfig(tmp_path / "target")

    return make


def test_the_command_asks_these_prompts_of_this_server_as_they_are(stub, tmp_path):
    config = stub(
        f"Path({str(tmp_path / 'seen.json')!r}).write_text(json.dumps({{'words': words,"
        " 'prompts': Path(value('--dataset-path')).read_text()}))\n"
        f"(folder / 'result.json').write_text({json.dumps(TOLD)!r})"
    )
    url = "http://127.0.0.1:1"
    told = bench_serve(["a\nb", "ü"], url, config, tokens=32, concurrency=4, temperature=0.7)
    assert told.answer_tokens == [4, 4]
    seen = json.loads((tmp_path / "seen.json").read_text())
    words = seen["words"]
    assert words[:4] == ["-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    for name, value in (("--base-url", url), ("--max-concurrency", "4"), ("--temperature", "0.7"),
                        ("--custom-output-len", "32"), ("--num-prompts", "2")):  # fmt: skip
        assert words[words.index(name) + 1] == value
    # The server renders the chat: rendered here as well, the template would stand there twice.
    assert {"--skip-chat-template", "--disable-shuffle", "--save-detailed"} <= set(words)
    assert [json.loads(x)["prompt"] for x in seen["prompts"].splitlines()] == ["a\nb", "ü"]


@pytest.mark.parametrize(
    "body",
    ["print('no such flag', file=sys.stderr); sys.exit(3)", "print('no such flag')"],
    ids=["exits with 3", "writes nothing"],
)
def test_a_command_that_fails_says_its_last_words(stub, body):
    config = stub(body)
    with pytest.raises(UserError, match=r"no such flag(?s:.)*bench_serve=false"):
        bench_serve(["a"], "http://127.0.0.1:1", config, tokens=4, concurrency=1)


def test_its_deadline_grows_with_what_is_asked(stub, monkeypatch):
    """Half an hour for everything would end any long benchmark at its last step."""
    config, given = stub(""), []

    def run(argv, timeout, **_):
        given.append(timeout)
        raise subprocess.TimeoutExpired(argv, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    for prompts, tokens, concurrency in ((16, 96, 1), (200, 4096, 1), (200, 4096, 8)):
        with pytest.raises(
            UserError, match=f"no end .deadline {600 + tokens * prompts // concurrency} s"
        ):
            bench_serve(["a"] * prompts, "http://127.0.0.1:1", config, tokens=tokens,
                        concurrency=concurrency)  # fmt: skip
    assert given[1] > 8 * 3600 and given[1] > 7 * given[2]


def prompt(name, **values):
    messages = [{"role": "user", "content": "Q?"}]
    row = AnswerRow(
        id=name,
        set="workload",
        split="heldout",
        messages=messages,
        prompt_token_ids=[9],
        answer_token_ids=[2],
        text="",
        finish_reason="stop",
    )
    return replace(row, **values)  # fmt: skip


def test_only_what_it_can_ask_is_asked():
    two = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}]
    rows = [prompt("a"), prompt("b", messages=two), prompt("c", tools=[{}]),
            prompt("d", set="general"), prompt("e", sampling={"thinking": "on"}),
            prompt("f", messages=[{"role": "user", "content": [{"type": "image"}]}])]  # fmt: skip
    assert [p.id for p in outside_prompts(rows)] == ["a"]
    with pytest.raises(UserError, match="bench_serve=false"):
        outside_prompts(rows[1:])


PROMPTS = [prompt(f"p{i}") for i in range(6)]
CFG = BenchmarkParams(repeats=1, bench_serve=True)
OTHERS = RoundCounts(60, 120, 180, [60, 60, 0], "vllm bench serve")


def told(seconds, accepted=None, prompt_tokens=1):
    """Every answer has 4 tokens: with a drafter, the prefill's and a round's."""
    counts = None
    if accepted is not None:
        at = [6 * (accepted > k) for k in range(3)]
        counts = RoundCounts(6, 6 * accepted, 18, at, "vllm bench serve")
    n = len(PROMPTS)
    return BenchServe(n * seconds, [prompt_tokens] * n, [4] * n, [0.1] * n, [seconds] * n,
                      [[seconds - 0.1]] * n, counts)  # fmt: skip


def measured(plain, own, ours=1.2):
    """Metrics of ours (1 s an answer, with the drafter ``ours`` times as fast) and theirs."""
    rows = [
        row
        for p in PROMPTS
        for row in (request(PLAIN, p.id), request(OWN, p.id, seconds=1 / ours, accepted=[2]))
    ]
    lines = [outside_line(PLAIN, Point(), PROMPTS, plain), outside_line(OWN, Point(), PROMPTS, own)]
    metrics = json.loads(
        json.dumps(summarise(rows, CFG, {}, outside=json.loads(json.dumps(lines))))
    )
    return rows, metrics


def found(plain, own, **values):
    rows, metrics = measured(plain, own, **values)
    return [(f.code, f.severity) for f in check_benchmark(rows, metrics)]


def test_both_clients_stand_beside_each_other_in_one_schema():
    _, metrics = measured(told(1.0), told(0.8, 2))
    ours, theirs = metrics["outside"][2:]
    assert theirs.keys() - {"other_prompts"} >= ours.keys()
    assert (ours["tokens_per_s"], theirs["tokens_per_s"]) == (4.8, 5.0)
    assert theirs["throughput_tokens_per_s"] == pytest.approx(5.0)
    assert theirs["acceptance"]["acceptance_length"] == ours["acceptance"]["acceptance_length"] == 3
    assert theirs["speedup"]["value"] == pytest.approx(1.25)
    assert theirs["round_cost"] == pytest.approx(3 / 1.25)
    table = outside_table(metrics)
    assert list(table["client"]) == ["ours", "vllm bench serve"] * 2
    (figure,) = outside_bars(metrics)
    assert [list(bar.y) for bar in figure.data] == [[4.0, 4.8], [4.0, 5.0]]


def test_under_load_prompts_that_it_can_not_ask_take_nothing_from_our_speed():
    """Two in flight, each 1 s: six prompts of both clients, six of ours alone, in 6 s."""
    point = Point(concurrency=2)
    rows = [
        replace(request(PLAIN, name), concurrency=2, started_s=float(i))
        for i in range(6)
        for name in (f"p{i}", f"of two turns {i}")
    ]
    theirs = replace(told(1.0), seconds=3.0)
    line = json.loads(json.dumps(outside_line(PLAIN, point, PROMPTS, theirs)))
    found = outside_results([line], rows, point, 3.6)
    assert [r["throughput_tokens_per_s"] for r in found] == [8.0, 8.0]
    assert [r["cost_per_million_tokens"] for r in found] == [125.0, 125.0]
    assert check_outside(found) == [] and found[0]["tokens"] == 24


def test_without_it_nothing_is_shown_or_found():
    rows, metrics = measured(told(1.0), told(0.8, 2))
    metrics["outside"] = []
    assert outside_bars(metrics) == [] and outside_table(metrics).empty
    assert check_outside([]) == [] == check_benchmark(rows, metrics)


def test_clients_that_agree_give_no_finding():
    assert found(told(1.05), told(0.8, 2)) == []


@pytest.mark.parametrize(
    ("plain", "own", "codes"),
    [
        (told(1.3), told(0.83, 2), [("outside-speed", "warning")]),
        (told(1.0), replace(told(0.83, 2), counts=OTHERS), [("accounting", "error")]),
        (told(1.0), told(0.83, 1), [("outside-acceptance", "warning")]),
        (told(1.0, prompt_tokens=40), told(0.83, 2), [("outside-other-prompts", "error")]),
    ],
    ids=["one is slower", "counts of another server", "other rounds", "a template twice"],
)
def test_what_two_clients_of_one_server_can_not_both_say(plain, own, codes):
    assert [c for c in found(plain, own) if c in codes] == codes


def test_an_impossible_speed_up_is_an_error_whoever_measured_it():
    """Three tokens a round can't be four times as fast."""
    codes = found(told(1.0), told(0.25, 2), ours=1.2)
    assert ("impossible-speedup", "error") in codes


def test_without_the_parameter_what_was_asked_before_is_passed_over():
    """``bench_serve=false`` is the remedy of its errors: they must end with it."""
    rows, _ = measured(told(1.0), told(0.8, 2))
    lines = [outside_line(PLAIN, Point(), PROMPTS, told(1.0, prompt_tokens=40))]
    assert check_outside(summarise(rows, CFG, {}, outside=lines)["outside"]) != []
    without = CFG.model_copy(update={"bench_serve": False})
    assert summarise(rows, without, {}, outside=lines)["outside"] == []


def test_a_line_of_another_point_is_passed_over():
    rows, _ = measured(told(1.0), told(0.8, 2))
    line = outside_line(PLAIN, Point(steps=5), PROMPTS, told(1.0))
    assert outside_results([line], rows, Point(), 0.0) == []
    assert asdict(Point(steps=5)) == line["point"]
