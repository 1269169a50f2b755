"""Arms: their order, their pairs, what is read out of recorded requests."""

from __future__ import annotations

import dataclasses
import json

import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import (
    OWN,
    PLAIN,
    REFERENCE,
    RequestRow,
    arms_of,
    counts_of,
    drafter_folder,
    output_differences,
)
from eagle3lib.measure.order import turned
from eagle3lib.measure.summary import arms_table, check_benchmark, summarise


def test_an_arms_drafter_is_the_exported_one_or_the_one_that_was_named(tmp_path):
    assert drafter_folder(tmp_path, OWN) == tmp_path / "05_export_drafter" / "drafter"
    with pytest.raises(UserError, match="has no arm 'reference drafter'"):
        drafter_folder(tmp_path, REFERENCE)
    named = {"params": {"reference_drafter": str(tmp_path / "known_good")}}
    write_json(tmp_path / "06_benchmark_serving" / "inputs.json", named)
    assert drafter_folder(tmp_path, REFERENCE) == tmp_path / "known_good"


def request(
    arm, prompt, *, repeat=0, answer=(1, 2, 3, 4), seconds=1.0, accepted=None, name="workload"
):
    return RequestRow(
        arm=arm, set=name, prompt=prompt, repeat=repeat, prompt_token_ids=[9],
        answer_token_ids=list(answer), finish_reason="length", duration_s=seconds,
        accepted=accepted, drafted=[3] * len(accepted) if accepted is not None else None,
    )  # fmt: skip


def benchmark(speedup=1.2, prompts=6, **values):
    """Both arms answer 4 tokens: the prefill's, one round of 2 accepted drafts and the target's
    own. ``values``: of every row, those of another point."""
    rows = []
    for i in range(prompts):
        rows.append(request(PLAIN, f"p{i}"))
        rows.append(request(OWN, f"p{i}", seconds=1 / speedup, accepted=[2]))
    return [dataclasses.replace(row, **values) for row in rows]


def counters(prompts=6):
    return {PLAIN: {}, OWN: {"drafts": float(prompts), "accepted_tokens": 2.0 * prompts}}


def test_the_baseline_is_always_the_first_arm(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cfg = BenchmarkParams(reference_drafter=str(tmp_path))
    assert list(arms_of(cfg, tmp_path / "own")) == [PLAIN, REFERENCE, OWN]
    assert list(arms_of(BenchmarkParams(), tmp_path / "own")) == [PLAIN, OWN]


def test_a_reference_drafter_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="reference_drafter"):
        arms_of(BenchmarkParams(reference_drafter=str(tmp_path / "nothing")), tmp_path)


def test_the_order_of_arms_turns_with_every_prompt():
    names = [PLAIN, REFERENCE, OWN]
    orders = [turned(names, i) for i in range(3)]
    assert [o[0] for o in orders] == names
    assert all(sorted(o) == sorted(names) for o in orders)


def test_summary_by_hand():
    metrics = summarise(benchmark(), BenchmarkParams(repeats=1), counters())
    plain, own = metrics["arms"]
    assert (plain["arm"], plain["tokens_per_s"]) == (PLAIN, 4.0)
    assert own["tokens_per_s"] == pytest.approx(4.8, abs=0.01)
    assert own["acceptance"]["acceptance_length"] == 3.0
    assert own["speedup"]["value"] == pytest.approx(1.2, abs=1e-3)
    assert own["round_cost"] == pytest.approx(2.5, abs=1e-3)
    assert metrics["identical_outputs"][OWN] == {"prompts": 6, "equal": 6}
    assert check_benchmark(benchmark(), metrics) == []


def test_metrics_are_plain_json_and_make_a_table():
    metrics = json.loads(json.dumps(summarise(benchmark(), BenchmarkParams(), counters())))
    assert list(arms_table(metrics)["arm"]) == [PLAIN, OWN]


def test_an_impossible_benchmark_is_an_error():
    """A round of 3 tokens can't be 3.5 times as fast as plain steps."""
    rows = benchmark(speedup=3.5)
    findings = check_benchmark(rows, summarise(rows, BenchmarkParams(), counters()))
    assert [f.code for f in findings] == ["impossible-speedup"]


@pytest.mark.parametrize(
    ("parameter", "value", "of_the_rows"),
    [
        ("concurrency", "1,8", {"concurrency": 8}),
        ("more_speculative_tokens", "5", {"steps": 5}),
        ("temperatures", "0,1", {"temperature": 1.0}),
        ("context_tokens", "512", {"context_tokens": 512}),
    ],
)
def test_an_impossible_point_of_a_sweep_is_an_error_and_named(parameter, value, of_the_rows):
    """Under load too: both arms have as many requests in flight, so a round costs a plain step."""
    cfg = BenchmarkParams(repeats=1, **{parameter: value})

    def found(speedup):
        rows = benchmark() + benchmark(speedup=speedup, **of_the_rows)
        findings = check_benchmark(rows, summarise(rows, cfg, counters()))
        return [f for f in findings if f.severity == "error"]

    (error,) = found(3.5)
    (name, value) = next(iter(of_the_rows.items()))
    words = {"concurrency": "8 at once", "steps": "K=5", "temperature": "T=1"}
    assert error.code == "impossible-speedup"
    assert words.get(name, f"context {value}") in error.where
    assert found(2.9) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_impossible_point_without_a_record_is_held_against_the_acceptance_of_a_lone_request(
    temperature,
):
    """Under load some engines tell no rounds; greedily the acceptance is the lone requests'."""
    cfg = BenchmarkParams(repeats=1, concurrency="1,8", temperatures=f"{temperature:g}")

    def codes(speedup):
        rows = [
            dataclasses.replace(row, concurrency=load, temperature=temperature, **told)
            for load, told in ((1, {}), (8, {"accepted": None, "drafted": None}))
            for row in benchmark(speedup=speedup if load > 1 else 1.2)
        ]
        findings = check_benchmark(rows, summarise(rows, cfg, counters()))
        return [f.code for f in findings if "8 at once" in f.where and f.code != "thin-load"]

    impossible = [] if temperature else ["impossible-speedup"]
    assert codes(3.5) == [*impossible, "no-round-record"]
    assert codes(2.9) == ["no-round-record"]


def test_counters_of_another_server_are_noticed():
    rows = benchmark()
    wrong = {
        PLAIN: {},
        OWN: {"drafts": 60.0, "accepted_tokens": 120.0},
    }  # cumulative, ten times over
    findings = check_benchmark(rows, summarise(rows, BenchmarkParams(), wrong))
    assert [(f.code, f.severity) for f in findings] == [("counters-differ", "warning")]


def test_answers_that_part_are_shown_with_their_place():
    rows = benchmark()
    rows[3] = dataclasses.replace(rows[3], answer_token_ids=[1, 2, 7, 4])
    table = output_differences(rows, OWN)
    assert table.to_dict("records") == [
        {"prompt": "p1", "differs_at": 2, "plain": [3], "with_drafter": [7]}
    ]


def test_an_answer_that_only_ends_earlier_differs_at_its_end():
    rows = benchmark()
    rows[3] = dataclasses.replace(rows[3], answer_token_ids=[1, 2])
    table = output_differences(rows, OWN)
    assert table.to_dict("records")[0]["differs_at"] == 2


def test_a_request_without_a_round_record_counts_no_rounds():
    rows = [request(OWN, "p", accepted=None)]
    assert counts_of(rows, 3).requests == 0
