"""Phase 07's own function on planted faults and damaged inputs: it names causes and never breaks.

``test_sample`` judges the rules; here the whole of ``diagnose`` runs, with replay, verdicts,
waterfalls and every table, as the notebook and ``eagle3 diagnose`` call it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from bench import Bench, judged
from catalogue import FAULTS
from kinds import KINDS
from plants import PLANTS

from eagle3lib.diagnose.material import read_material
from eagle3lib.diagnose.phase import diagnose, report_of
from eagle3lib.drafter.simulate import histogram
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.params import DiagnoseParams
from eagle3lib.measure.arms import OWN, read_requests
from eagle3lib.report.diagnosis_figures import counterfactuals, waterfall
from eagle3lib.report.figures import acceptance_per_step, round_agreement
from eagle3lib.report.tables import comparison_table, facts_table, findings_table

BY_ID = {f.id: f for f in FAULTS}
# Two of every section, and those that leave no drafter or no record that fits.
SAMPLE = ("F01", "F08", "F15", "F22", "F29", "F35", "F43", "F51", "F57", "F64")
CFG = DiagnoseParams()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench.small(tmp_path_factory.mktemp("phase"), KINDS[0])


def run_on(bench, folder):
    material = read_material(folder, bench.target, bench.states_of, bench.head)
    metrics, causes, replayed = diagnose(material, CFG, every_variant=False)
    text = json.dumps(report_of(metrics) | {"all": metrics}, allow_nan=False)
    assert json.loads(text)["findings"] == json.loads(json.dumps([c.as_dict() for c in causes]))
    assert metrics["verdicts"].keys() == {"acceptance", "speed", "cause"}
    show_all(metrics, replayed, causes)
    return metrics, causes, replayed


def show_all(metrics, replayed, causes):
    """What the notebook shows of them, whatever is missing."""
    acceptance_per_step(metrics["workload"], metrics["bigram_per_step"])
    round_agreement(replayed["workload"])
    counterfactuals(metrics["engine_table"])
    waterfall(metrics["waterfall"], "tokens")
    waterfall(metrics["speed_waterfall"], "speed")
    for table in (comparison_table(metrics), facts_table(metrics["verdicts"]),
                  findings_table(causes)):  # fmt: skip
        assert table.to_html()


def codes(causes):
    return [c.code for c in causes if c.severity != "note"]


def test_a_healthy_run_is_good_whatever_it_lacks_of_speed(bench):
    metrics, causes, replayed = run_on(bench, bench.plant("phase").folder)
    assert codes(causes) == []
    compared = metrics["workload"]
    assert compared["rounds_equal"] == compared["rounds_compared"] > 50
    assert len(replayed["workload"]) == compared["answers"] == 10
    assert metrics["verdicts"]["acceptance"].startswith("good")
    assert metrics["verdicts"]["speed"] == "not measured"
    assert metrics["waterfall"][-1]["level"] == "engine"


@pytest.mark.parametrize("fault", SAMPLE)
def test_every_planted_fault_gives_causes_and_no_exception(bench, fault):
    plant = bench.plant("phase")
    PLANTS[fault](plant)
    _, causes, _ = run_on(bench, plant.folder)
    assert judged(causes, {BY_ID[fault].cause}) in ("right", "second"), causes[:3]


@pytest.mark.parametrize("damage", ["cut", "no-config", "list-config", "words-config", "gone"])
def test_a_drafter_that_can_not_be_read_is_named_and_the_rest_diagnosed(bench, damage):
    plant = bench.plant("phase")
    drafter = plant.folder / "05_export_drafter" / "drafter"
    if damage == "cut":
        plant.cut(drafter / "model.safetensors")
    elif damage == "no-config":
        (drafter / "config.json").unlink()
    elif damage == "gone":
        drafter.rename(plant.folder / "elsewhere")
    else:
        (drafter / "config.json").unlink()
        words = {"hidden_size": "wide", "num_attention_heads": None, "draft_vocab_size": "all"}
        (drafter / "config.json").write_text(json.dumps([1] if "list" in damage else words))
    metrics, causes, replayed = run_on(bench, plant.folder)
    assert codes(causes), "a drafter that can't be read is an error"
    assert any(c.question == 3 and c.severity == "error" for c in causes), causes
    compared = metrics["workload"]
    assert compared["engine"]["acceptance_length"] > 1 and compared["simulator"]["rounds"] == 0
    assert metrics["verdicts"]["acceptance"].endswith("no drafter could be replayed beside it")
    assert all(a.simulated is None and a.teacher_right for a in replayed["workload"])
    assert metrics["waterfall"] == metrics["speed_waterfall"] == metrics["paying_steps"] == []
    assert math.isclose(metrics["greedy_share"], 1.0, abs_tol=0.02), "the target is still asked"


def as_counts(row):
    """What SGLang tells of the same rounds: their histogram."""
    if row.arm != OWN:
        return row
    by_accepted = histogram([row.accepted], 3)
    at = [sum(by_accepted[k:]) for k in (1, 2, 3)]
    counts = {"rounds": len(row.accepted), "accepted": sum(row.accepted), "drafted": None,
              "accepted_at": at, "source": "sglang meta_info"}  # fmt: skip
    return replace(row, accepted=None, drafted=None, counts=counts)


def untold(row):
    return replace(row, accepted=None, drafted=None, counts=None)


def by_code(causes):
    return {c.code: c for c in causes}


@pytest.mark.parametrize(("told", "source"), [(as_counts, "counts a request"),
                                              (untold, "the server's counters alone")])  # fmt: skip
def test_a_healthy_engine_that_tells_no_rounds_one_by_one_gets_a_note(bench, told, source):
    plant = bench.plant("phase")
    plant.requests(told)
    metrics, causes, _ = run_on(bench, plant.folder)
    assert codes(causes) == [], causes
    assert by_code(causes)["rounds-not-told"].title.endswith(source)
    assert metrics["workload"]["simulator"]["acceptance_length"] > 1.2
    assert metrics["workload"]["rounds_compared"] == 0
    assert metrics["num_speculative_tokens"] == 3


@pytest.mark.parametrize("told", [as_counts, untold])
def test_a_faulty_engine_is_found_by_its_sums_and_its_faults_are_listed(bench, told):
    plant = bench.plant("phase")
    plant.record("slots in reverse")
    plant.requests(told)
    _, causes, _ = run_on(bench, plant.folder)
    first = causes[0]
    assert first.question == 2 and first.severity == "error"
    assert "engine-layer-ids" in first.names, (first.names, first.evidence)


def test_k_is_taken_from_the_record_where_the_benchmark_names_none(bench):
    plant = bench.plant("phase")
    plant.json("06_benchmark_serving/metrics.json",
               lambda x: {k: v for k, v in x.items() if k != "num_speculative_tokens"})  # fmt: skip
    metrics, causes, _ = run_on(bench, plant.folder)
    assert (metrics["num_speculative_tokens"], codes(causes)) == (3, [])


def test_an_engine_that_tells_nothing_is_asked_whether_it_has_the_drafter(bench):
    plant = bench.plant("phase")
    plant.requests(untold)
    plant.counters(lambda c: {})
    _, causes, _ = run_on(bench, plant.folder)
    assert codes(causes) == ["rounds-not-told"]
    assert "started with the drafter at all" in causes[0].remedy


def test_records_that_are_torn_are_named_and_the_others_compared(bench):
    plant = bench.plant("phase")
    first = next(r.prompt for r in plant_rows(plant))
    plant.requests(
        lambda r: replace(r, drafted=r.drafted[1:]) if r.prompt == first and r.drafted else r
    )
    metrics, causes, _ = run_on(bench, plant.folder)
    assert "record-torn" in codes(causes)
    compared = metrics["workload"]
    assert compared["answers"] == 9 and compared["rounds_equal"] == compared["rounds_compared"] > 50


def plant_rows(plant):
    return read_requests(plant.folder / "06_benchmark_serving")


def test_a_run_without_a_benchmark_is_diagnosed_on_its_held_out_answers(bench):
    plant = bench.plant("phase")
    (plant.folder / "06_benchmark_serving").rename(plant.folder / "gone")
    metrics, causes, _ = run_on(bench, plant.folder)
    assert (metrics["answered_by"], metrics["num_speculative_tokens"]) == ("target", 3)
    assert metrics["workload"]["simulator"]["acceptance_length"] > 1.2
    assert codes(causes) == [] and "not-served" in by_code(causes)
    assert metrics["verdicts"]["cause"].endswith("no engine was asked")


@pytest.mark.parametrize("lost", ["01_generate_data", "02_capture_hidden_states",
                                  "03_build_vocab_map", "04_train_drafter"])  # fmt: skip
def test_a_phase_that_is_not_there_is_no_fault(bench, lost):
    plant = bench.plant("phase")
    (plant.folder / lost).rename(plant.folder / "gone")
    _, causes, _ = run_on(bench, plant.folder)
    assert codes(causes) == [], causes


@pytest.mark.parametrize("file", ["06_benchmark_serving/metrics.json",
                                  "06_benchmark_serving/servers.json",
                                  "06_benchmark_serving/requests.jsonl",
                                  "04_train_drafter/metrics.json",
                                  "01_generate_data/answers.jsonl"])  # fmt: skip
def test_a_file_that_is_no_json_is_named(bench, file):
    plant = bench.plant("phase")
    (plant.folder / file).unlink()
    (plant.folder / file).write_text("{not json\n")
    _, causes, _ = run_on(bench, plant.folder)
    (named,) = [c for c in causes if c.code == "unreadable"]
    assert file in str(named), named


def test_a_phase_of_another_target_is_named(bench):
    plant = bench.plant("phase")
    inputs = plant.folder / "04_train_drafter" / "inputs.json"
    write_json(inputs, read_json(inputs) | {"target": "another"})
    _, causes, _ = run_on(bench, plant.folder)
    assert codes(causes) == ["foreign-phase"] and causes[0].where == "04_train_drafter"


@pytest.mark.parametrize("every", [True, False])
def test_prompts_that_show_images_are_not_replayed(bench, every, monkeypatch):
    """Ids of a placeholder in the prompts of some answers, or of all."""
    monkeypatch.setattr(type(bench.target), "media_ids", property(lambda _: {319}))
    plant = bench.plant("phase")
    first = next(r.prompt for r in plant_rows(plant))

    def shown(r):
        ids = [t if t != 319 else 318 for t in r.prompt_token_ids]
        chosen = every or r.prompt == first
        return replace(r, prompt_token_ids=[*ids[:2], 319, *ids[2:]] if chosen else ids)

    plant.requests(shown)
    metrics, causes, replayed = run_on(bench, plant.folder)
    note = by_code(causes)["images-not-replayed"]
    assert note.title.startswith("10 answers" if every else "1 answers")
    assert len(replayed["workload"]) == (0 if every else 9)
    assert metrics["not_replayed"] == ("all its prompts show images" if every else "")
    assert "not one" not in metrics["verdicts"]["acceptance"]
