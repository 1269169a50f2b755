"""The roofline of a sweep: requests made from the cost model itself must give it back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from public_shapes import LLAMA_8B

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.notebooks import read_notebook
from eagle3lib.lab.params import PlanParams
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE, RequestRow
from eagle3lib.measure.loads import measured_loads
from eagle3lib.plan.gpus import GPUS
from eagle3lib.plan.roofline import (
    OUTSIDE,
    UNKNOWN,
    all_limits,
    benchmarked_device,
    benchmarked_setting,
    end_of_gain,
    lines_table,
    roofline_lines,
)
from eagle3lib.plan.shape import Shape
from eagle3lib.plan.step import Setting
from eagle3lib.report import roofline_figures as figures

STEPS, ROUNDS, PROMPT = 3, 60, 39
TOKENS = 1 + 2 * ROUNDS  # one draft accepted a round: an acceptance length of 2
CONTEXT = round(PROMPT + TOKENS / 2)


def setting(**changes):
    found = Setting.of(
        Shape(LLAMA_8B), GPUS["h200"], devices=1, draft_vocab_size=32_000, context_tokens=CONTEXT
    )
    return replace(found, **changes)


def slow(layer_s=30e-6, host_s=400e-6):
    """An engine whose layers and host take other times than the plan thinks."""
    return setting(device=replace(GPUS["h200"], layer_s=layer_s), host_s=host_s)


def request(arm, load, number, step_s, first_s, told=True, engine="vllm"):
    chunks = ROUNDS + 1 if arm != PLAIN else TOKENS
    at = [first_s + i * step_s for i in range(chunks)]
    own = told and arm != PLAIN
    return RequestRow(
        arm=arm, set="workload", prompt=f"p{number}", repeat=0, prompt_token_ids=[1] * PROMPT,
        answer_token_ids=[2] * TOKENS, finish_reason="length", duration_s=at[-1],
        accepted=[1] * ROUNDS if own else None, drafted=[STEPS] * ROUNDS if own else None,
        engine=engine, steps=STEPS, concurrency=load, chunk_s=at,
        chunk_tokens=[1] + [TOKENS // (chunks - 1)] * (chunks - 1),
    )  # fmt: skip


def benchmark(folder, served, loads=(1, 8, 64), first_s=0.0, slower=1.0, told=lambda load: True,
              arm=OWN, **metrics):  # fmt: skip
    """A phase 06 of an engine that ``served`` describes; its rounds take ``slower`` as long."""
    rows = []
    for load in loads:
        paces = {
            PLAIN: served.step_s(load),
            arm: slower * sum(served.round_parts(load, STEPS).values()),
        }
        rows += [
            request(name, load, i, step_s, first_s, told(load))
            for name, step_s in paces.items()
            for i in range(load)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    told = {"dtype": "bfloat16", "num_speculative_tokens": STEPS, "temperature": 0.0} | metrics
    write_json(folder / "metrics.json", told)
    for name, part in (("requests", rows[:2]), ("sweeps", rows[2:])):
        lines = "".join(_line(row) for row in part)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def _line(row):
    return json.dumps(asdict(row)) + "\n"


def test_the_model_solves_its_constants_at_one_load_and_predicts_the_others(tmp_path):
    loads = measured_loads(benchmark(tmp_path, slow()), OWN)
    assert [(x.concurrency, x.context_tokens) for x in loads] == [
        (1, CONTEXT),
        (8, CONTEXT),
        (64, CONTEXT),
    ]
    for line in roofline_lines(loads, setting(), STEPS):
        assert (line["layer_us"], line["host_us"]) == pytest.approx((30, 400), rel=1e-3)
        assert line["calibrated"]["cost_error"] == pytest.approx(0, abs=1e-3)
        assert line["terms"][UNKNOWN] == pytest.approx(0, abs=1e-3)
        assert line["in_flight"] == pytest.approx(line["concurrency"])
        assert line["acceptance_length"] == 2.0
        assert abs(line["planned"]["cost_error"]) > 0.02, "the plan's own constants are others"


def test_the_terms_say_where_the_speedup_is_lost(tmp_path):
    """A fifth of each round is the engine's own, and every request waits for its first token."""
    loads = measured_loads(benchmark(tmp_path, slow(), slower=1.2, first_s=0.05), OWN)
    lines = roofline_lines(loads, slow(), STEPS)
    for line in lines:
        whole = line["acceptance_length"] / line["speedup"] - 1
        assert sum(line["terms"].values()) == pytest.approx(whole, abs=1e-3)
    assert lines[0]["terms"][OUTSIDE] > 0.01, "both arms wait alike: a ratio above 1 shrinks"
    assert lines[-1]["terms"][UNKNOWN] > 0.05


def test_an_engine_at_the_data_sheet_reaches_all_of_the_limit_and_none_reaches_more(tmp_path):
    ideal = setting().at_the_limit()
    line, *_ = roofline_lines(measured_loads(benchmark(tmp_path, ideal), OWN), setting(), STEPS)
    # The prefill's token is in the machine's speed and in no step.
    assert line["plain"]["share_of_limit"] == pytest.approx(TOKENS / (TOKENS - 1), rel=1e-3)
    slower = roofline_lines(measured_loads(benchmark(tmp_path, slow()), OWN), setting(), STEPS)
    assert all(x[arm]["share_of_limit"] < 1 for x in slower for arm in ("plain", "drafted"))


def test_what_a_token_moves_counted_by_hand(tmp_path):
    """Llama-3.1-8B: 7.50e9 weights without the embedding, two bytes and two FLOPs each; 131,072
    bytes of cache a token of context. A drafter halves the target's bytes at an acceptance length
    of 2, and makes twice the FLOPs."""
    first, _, last = roofline_lines(
        measured_loads(benchmark(tmp_path, slow()), OWN), setting(), STEPS
    )
    weights = 2 * 7_504_924_672
    assert first["plain"]["bytes_per_token"]["weights"] == pytest.approx(weights, rel=1e-4)
    assert last["plain"]["bytes_per_token"]["weights"] == pytest.approx(weights / 64, rel=1e-4)
    assert last["plain"]["bytes_per_token"]["keys and values"] == CONTEXT * 131_072
    attention = 4 * 32 * 32 * 128 * CONTEXT
    assert first["plain"]["flops_per_token"] == pytest.approx(weights + attention, rel=1e-4)
    assert first["drafted"]["bytes_per_token"]["weights"] == pytest.approx(weights / 2, rel=1e-4)
    assert first["drafted"]["flops_per_token"] > 1.99 * first["plain"]["flops_per_token"]
    reached = sum(last["plain"]["bytes_per_token"].values()) * last["plain"]["tokens_per_s"]
    assert last["plain"]["read_gb_per_s"] == pytest.approx(reached / 1e9, rel=1e-3)
    curves = all_limits(setting(), measured_loads(tmp_path, OWN), STEPS)["vllm"]
    assert curves["plain"][0]["bandwidth"] == pytest.approx(
        first["plain"]["bandwidth_limit"], rel=1e-4
    )
    assert curves["drafted"][-1]["batch"] == 128


def test_the_gain_ends_where_arithmetic_begins_to_cost(tmp_path):
    lines = roofline_lines(
        measured_loads(benchmark(tmp_path, slow(), loads=(1, 64, 256, 1024)), OWN), setting(), STEPS
    )
    (end,) = end_of_gain(lines)
    paying = [x["concurrency"] for x in lines if x["speedup"] > 1]
    assert paying and len(paying) < len(lines)
    assert paying[-1] < end["ends_at"] < [x["concurrency"] for x in lines][len(paying)]
    assert end["cause"] == "compute"
    assert "arithmetic" in end["told"] and "pays up to about" in end["told"]


def test_a_gain_that_does_not_end_and_one_that_never_was(tmp_path):
    always = roofline_lines(
        measured_loads(benchmark(tmp_path, slow(), (1, 8)), OWN), setting(), STEPS
    )
    (end,) = end_of_gain(always)
    assert end["ends_at"] is None and "at all loads measured, up to 8" in end["told"]
    dear = benchmark(tmp_path, slow(), loads=(1, 8), slower=2.5)
    (end,) = end_of_gain(roofline_lines(measured_loads(dear, OWN), slow(), STEPS))
    assert end["ends_at"] == 0 and end["told"].startswith("never pays")


def test_rounds_that_an_engine_tells_for_a_lone_request_only_are_taken_from_there(tmp_path):
    """vLLM 0.26 keeps no record: the chunks of a lone request are its rounds, others' are not."""
    loads = measured_loads(benchmark(tmp_path, slow(), told=lambda load: load == 1), OWN)
    assert [x.rounds_from for x in loads] == ["the engine's record", *["as at 1 in flight"] * 2]
    assert roofline_lines(loads, setting(), STEPS)[2]["cost"] == pytest.approx(
        slow().round_cost(64, STEPS), rel=1e-3
    )
    with pytest.raises(UserError, match="vllm told no rounds at 8"):
        measured_loads(benchmark(tmp_path, slow(), (8, 64), told=lambda load: False), OWN)


def test_of_many_in_flight_a_few_streams_tell_the_time_of_a_step(tmp_path):
    """The benchmark reads about eight as streams; the others' answers come whole."""
    folder = benchmark(tmp_path, slow())
    whole = measured_loads(folder, OWN)
    lines = [json.loads(x) for x in (folder / "sweeps.jsonl").read_text().splitlines()]
    for line in lines:
        if line["concurrency"] == 64 and line["prompt"] not in ("p3", "p7"):
            line |= {"chunk_s": [], "chunk_tokens": []}
    (folder / "sweeps.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    few = measured_loads(folder, OWN)[2]
    assert few.plain.step_s == pytest.approx(whole[2].plain.step_s)
    assert few.drafted.step_s == pytest.approx(whole[2].drafted.step_s)
    assert few.plain.tokens_per_s == whole[2].plain.tokens_per_s
    none = [x | {"chunk_s": []} for x in lines]
    (folder / "sweeps.jsonl").write_text("".join(json.dumps(x) + "\n" for x in none))
    with pytest.raises(UserError, match="at 8 in flight was streamed"):
        measured_loads(folder, OWN)


def test_what_cannot_be_read_is_said(tmp_path):
    with pytest.raises(UserError, match="no requests of 'own drafter'"):
        measured_loads(benchmark(tmp_path / "a", slow(), arm=REFERENCE), OWN)


def test_the_device_is_the_one_that_the_run_names(tmp_path):
    """A CPU's figures are measured where it is; those of another one must be given."""
    folder = tmp_path / "06_benchmark_serving"
    gpu = {"name": "NVIDIA H200", "memory_bytes": 141 * 10**9}
    write_json(tmp_path / "manifest.json", {"machine": {"gpus": [gpu], "cpu": "x", "cores": 2}})
    assert benchmarked_device(PlanParams(), folder, "bfloat16").name == "h200"
    with pytest.raises(UserError, match="served float32"):
        benchmarked_device(PlanParams(), folder, "float32")
    other = {"gpus": [], "cpu": "another", "cores": 2, "memory_available_bytes": 10**9}
    write_json(tmp_path / "manifest.json", {"machine": other})
    with pytest.raises(UserError, match="another"):
        benchmarked_device(PlanParams(bandwidth_gb_per_s=50), folder, "float32")
    given = benchmarked_device(PlanParams(bandwidth_gb_per_s=50, tflops=0.4), folder, "float32")
    assert (given.bandwidth_bytes_per_s, given.flops_per_s) == (50e9, 0.4e12)


def test_float32_is_twice_the_bytes_and_the_drafters_own_width_counts(tmp_path):
    shape = Shape(LLAMA_8B)
    config = DrafterConfig.for_target(LLAMA_8B, 32_000, intermediate_size=1024)
    (tmp_path / "config.json").write_text(json.dumps(config.as_hf_config("bfloat16")))
    found = {
        dtype: benchmarked_setting(shape, GPUS["h200"], 1, tmp_path, dtype)
        for dtype in ("bfloat16", "float32")
    }
    two, four = (replace(s, context_tokens=100).round_bytes(4, 3) for s in found.values())
    assert all(four[part] == pytest.approx(2 * two[part]) for part in two)
    numbers = 4096 * 32_000 + config.layer_parameters
    assert found["bfloat16"].draft_bytes(1) == 2 * numbers


def test_the_notebook_takes_the_drafter_of_its_arm(tmp_path, monkeypatch):
    """Of a benchmark that served named drafters, not the one that the run exported."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    named = {"drafter": "/own", "reference_drafter": "/reference"}
    write_json(tmp_path / "r" / "06_benchmark_serving" / "inputs.json", {"params": named})
    cells = [c for c in read_notebook(ROOT / "notebooks/bench/roofline.ipynb").cells
             if c.cell_type == "code"]  # fmt: skip
    for arm, folder in ((OWN, "/own"), (REFERENCE, "/reference")):
        values: dict[str, object] = {}
        exec(cells[0].source, values)
        values |= {"run": "r", "arm": arm}
        exec(cells[1].source, values)
        assert str(values["served"]) == folder


def test_every_figure_holds_both_engines(tmp_path):
    loads = measured_loads(benchmark(tmp_path, slow()), OWN)
    loads += [replace(load, engine="sglang") for load in loads]
    lines = roofline_lines(loads, setting(), STEPS)
    drawn = figures.roofline_curves(lines, all_limits(setting(), loads, STEPS))
    assert len(drawn.data) == 2 * (2 * 2 + 2)  # engines, arms with two limits each
    assert len(figures.cost_curves(lines).data) == 2 * 3
    assert len(figures.speedup_curves(lines).data) == 2 * 5
    assert list(figures.terms_bars(lines).data[0].x) == [
        f"{line['engine']}, {line['concurrency']}" for line in lines
    ]
    assert figures.moved_bars(lines).data[-1].name == "FLOPs"
    assert len(lines_table(lines)) == 6
