"""Phase 07's own function on planted faults and damaged inputs: it names causes and never breaks.

``test_sample`` judges the rules; here the whole of ``diagnose`` runs, with replay, verdicts,
waterfalls and every table, as the notebook and ``eagle3 diagnose`` call it.
"""

from __future__ import annotations

import json
import math

import pytest
from bench import Bench, judged
from catalogue import FAULTS
from kinds import KINDS
from plants import PLANTS

from eagle3lib.diagnose.material import read_material
from eagle3lib.diagnose.phase import diagnose, report_of
from eagle3lib.lab.params import DiagnoseParams

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
    return metrics, causes, replayed


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
