"""Figures and tables of the sweeps hold every point, and do with a demo that has one."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))
from test_result import streamed

from eagle3lib.lab.files import write_json
from eagle3lib.lab.params import PHASES, BenchmarkParams
from eagle3lib.lab.run import begin
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE
from eagle3lib.measure.points import points_of
from eagle3lib.measure.summary import arms_table, points_table, summarise
from eagle3lib.report import runner, tables
from eagle3lib.report.benchmark_figures import (
    arrival_bars,
    load_curves,
    pays_curves,
    sweep_curves,
)
from eagle3lib.report.figures import arms_bars
from eagle3lib.report.page import build_page
from eagle3lib.report.tables import acceptance_table, facts_table
from eagle3lib.report.welcome import runs_table

DEMO = BenchmarkParams(repeats=1)
SWEEP = BenchmarkParams(repeats=1, engines="vllm,sglang", concurrency="1,8",
                        more_speculative_tokens="5", temperatures="0,1")  # fmt: skip


def rows_of(cfg, told=(3, 3)):
    """``told``: accepted drafts of each round of the own drafter; None where none are told."""
    return [
        streamed(arm, f"p{i}", accepted, engine=p.engine, steps=p.steps, temperature=p.temperature,
                 concurrency=p.concurrency, context_tokens=p.context_tokens, started_s=100.0 + i)
        for p in points_of(cfg)
        for i in range(6)
        for arm, accepted in ((PLAIN, None), (OWN, told and list(told)))
    ]  # fmt: skip


def metrics_of(cfg):
    return summarise(rows_of(cfg), cfg, {})


@pytest.mark.parametrize("cfg", [DEMO, SWEEP], ids=["demo", "sweep"])
def test_every_figure_and_table_is_drawn(cfg):
    metrics = metrics_of(cfg)
    for figure in (arms_bars, arrival_bars, pays_curves, load_curves):
        assert figure(metrics).to_json()
    for table in (arms_table(metrics), points_table(metrics)):
        assert len(table)
    assert acceptance_table(metrics).to_html()
    assert facts_table(metrics["best"]).to_html()


def test_a_table_without_rows_is_words_and_not_a_bare_header():
    """The demo's answers are all equal: phase 06 showed the header of no row at all."""
    metrics = metrics_of(DEMO)
    same = tables.parted_answers_table(rows_of(DEMO), OWN)
    assert "all 6 answers" in repr(same) and "<table" not in same.to_html()
    none = tables.parted_answers_table([r for r in rows_of(DEMO) if r.arm == PLAIN], OWN)
    assert "No greedy answer" in repr(none)
    assert "No temperature above 0" in tables.lossless_table(metrics).to_html()
    assert "Nothing was found wrong" in tables.findings_table([]).to_html()
    assert repr(tables.show(tables.pd.DataFrame(columns=["a"]), "a < b")) == "a < b"
    assert "a &lt; b" in tables.show(tables.pd.DataFrame(columns=["a"]), "a < b").to_html()


def test_answers_that_part_are_a_table_and_sampled_ones_are_not_compared():
    rows = [
        streamed(arm, "p", answer_token_ids=ids) for arm, ids in ((PLAIN, [1, 2]), (OWN, [1, 3]))
    ]
    assert list(tables.parted_answers_table(rows, OWN).data["differs_at"]) == [1]
    heated = [replace(row, temperature=0.7) for row in rows]
    assert "No greedy answer" in repr(tables.parted_answers_table(heated, OWN))


def test_a_curve_a_drafter_and_one_baseline_an_engine():
    figure = load_curves(metrics_of(SWEEP))
    assert [trace.name for trace in figure.data] == [
        "vllm, engine alone", "vllm, own drafter, K=3", "vllm, own drafter, K=5",
        "sglang, engine alone", "sglang, own drafter, K=3", "sglang, own drafter, K=5",
    ]  # fmt: skip
    assert all(list(trace.x) == [1, 8] for trace in figure.data)


def test_context_and_temperature_have_a_curve_where_they_are_swept():
    assert sweep_curves(metrics_of(DEMO)) == []
    cfg = BenchmarkParams(repeats=1, temperatures="0,1", context_tokens="256,512",
                          concurrency="1,8", more_speculative_tokens="5")  # fmt: skip
    along_context, along_heat = sweep_curves(metrics_of(cfg))
    assert [t.name for t in along_context.data] == [
        "vllm, acceptance length", "vllm, cost of a round, plain steps", "vllm, speed-up"
    ]  # fmt: skip
    # The headline and both contexts, not the points of other loads, K and temperatures.
    assert all(len(trace.x) == 3 for trace in along_context.data)
    assert all(list(trace.x) == [0, 1] for trace in along_heat.data)
    assert along_heat.data[0].y[0] == 4.0


def test_where_it_pays_has_a_panel_a_load():
    figure = pays_curves(metrics_of(SWEEP))
    assert [a.text for a in figure.layout.annotations] == ["1 in flight", "8 in flight"]


def test_an_arm_has_one_colour_in_every_figure():
    """The reference's blue and our green had changed places between two figures of phase 06."""
    metrics = metrics_of(DEMO)
    metrics["arms"] += [line | {"arm": REFERENCE} for line in metrics["arms"] if line["arm"] == OWN]
    bars = {trace.name: trace.marker.color for trace in arms_bars(metrics).data}
    first, _ = arrival_bars(metrics).data
    assert bars == dict(zip(first.x, first.marker.color, strict=True)) and len(bars) == 3


def written_run(metrics):
    """A run whose benchmark is done, beside a plan."""
    phase = begin(PHASES["00_plan"](run="r"), "0123456789abcdef")
    phase.finish({})
    place = phase.of(BenchmarkParams.PHASE)
    inputs = {"params": {}, "upstream": {}}
    write_json(place / "inputs.json", inputs)
    write_json(place / "metrics.json", metrics)
    write_json(place / "manifest.json", {"inputs": inputs, "artefacts": {}, "fingerprint": "",
                                         "finished": "2026-11-30", "duration_s": 1})  # fmt: skip
    return place.parent


@pytest.mark.parametrize(
    ("changes", "told"),
    [({}, "greedy, one request at a time"),
     ({"concurrency": "8", "temperatures": "0.7"}, "temperature 0.7, 8 requests in flight")],
)  # fmt: skip
def test_the_page_tells_the_headlines_load_and_temperature(changes, told, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    metrics = metrics_of(BenchmarkParams(repeats=1, **changes))
    written_run(metrics)
    page = build_page("r").read_text(encoding="utf-8")
    assert f"K = 3, {told}, vllm" in page
    assert told.split(", ")[1] in arms_bars(metrics).layout.title.text


def test_an_engine_that_tells_no_rounds_still_has_its_page_and_its_speed(
    tmp_path, monkeypatch, capsys
):
    """The page of such a run failed: its length and the cost of a round are None."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    metrics = summarise(rows_of(DEMO, told=None), DEMO, {})
    folder = written_run(metrics)
    page = re.sub(r"<script.*?</script>", "", build_page("r").read_text("utf-8"), flags=re.DOTALL)
    (row,) = re.findall(r"<tr><td>workload</td><td>own drafter</td>.*?</tr>", page, flags=re.DOTALL)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
    assert cells[3] == cells[6] == "unknown" and float(cells[4]) == pytest.approx(1.0)
    assert "1.00x" in page and "the engine told no rounds of 6 prompts" in page
    runner._print_answer(folder / "index.html", folder)
    assert "acceptance length  unknown" in capsys.readouterr().out
    assert "1.00x at acceptance length unknown" in runs_table().rows[0][3]


def test_a_drafter_without_a_baseline_has_its_page_too(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    written_run(summarise([r for r in rows_of(DEMO) if r.arm == OWN], DEMO, {}))
    page = build_page("r").read_text("utf-8")
    (row,) = re.findall(r"<tr><td>workload</td><td>own drafter</td>.*?</tr>", page, flags=re.DOTALL)
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
    assert cells[3:7] == ["4.000", "unknown", "", "unknown"]
