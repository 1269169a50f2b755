"""A run's plan beside what the run measured."""

import pytest

from eagle3lib.lab import run
from eagle3lib.lab.files import write_json
from eagle3lib.lab.machine import describe_machine
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import begin, run_folder
from eagle3lib.plan.plan import make_plan
from eagle3lib.plan.source import open_source, shipped_config
from eagle3lib.report.page import build_page, phase_metrics
from eagle3lib.report.planned import planned_beside_measured

TARGET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(run, "ROOT", tmp_path)


def make(name, metrics, stored=0, duration_s=None, **values):
    phase = begin(PHASES[name](run="r", **values), TARGET)
    file = phase.folder / "made.bin"
    file.write_bytes(b"x" * stored)
    phase.finish(metrics, [file])
    if duration_s is not None:
        manifest = phase_manifest(name)
        write_json(phase.folder / "manifest.json", manifest | {"duration_s": duration_s})
    phase.lock.release(force=True)


def phase_manifest(name):
    return run.read_json(run_folder("r") / name / "manifest.json")


@pytest.fixture
def plan(target_config):
    """A whole plan phase, of a true plan; its numbers."""
    cfg = PHASES["00_plan"](run="r", gpu="h200", answer_tokens=1000, batch_sizes="1,8",
                            disk_free_gb=10, measured_round_cost=1.3)  # fmt: skip
    numbers = make_plan(cfg, open_source(str(target_config)), describe_machine()).numbers
    make("00_plan", numbers)
    return numbers


@pytest.fixture
def target_config(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, shipped_config("Qwen/Qwen3-8B"))
    return path


def point(arm, load, k, **found):
    where = {"engine": "vllm", "concurrency": load, "temperature": 0.0, "context_tokens": 0}
    return {"arm": arm, "set": "workload", "num_speculative_tokens": k} | where | found


def lines():
    told = planned_beside_measured(run_folder("r"), phase_metrics(run_folder("r")))
    return {line.what: line for line in told.lines} if told else {}


def test_before_anything_is_measured_there_is_nothing_to_compare(plan):
    assert lines() == {}
    assert "Planned beside measured" not in build_page("r").read_text()


def test_time_speed_and_size_of_a_phase_stand_beside_the_plans(plan):
    generate = next(p for p in plan["phases"] if p["phase"] == "generate answers")
    told = {"answer_tokens": {"workload_train": 800, "workload_heldout": 50},
            "tokens_per_s": 2 * generate["tokens_per_s"]}  # fmt: skip
    make("01_generate_data", told, stored=3 * generate["disk_bytes"], duration_s=7200.0)
    found = lines()
    assert found["generate answers: tokens/s"].ratio == pytest.approx(2)
    assert found["generate answers: disk"].ratio == pytest.approx(3)
    time = found["generate answers: time"]
    assert time.measured == "2:00:00"
    assert time.ratio == pytest.approx(7200 / (3600 * generate["hours"]))
    assert "1,000 tokens planned, 850 made" in time.detail
    assert not any(what.startswith("capture") for what in found), "it is not done"


def test_cost_length_and_speedup_are_compared_where_load_and_k_are_the_same(plan):
    make("01_generate_data", {})
    cost = next(c for c in plan["round_costs"] if (c["batch"], c["K"]) == (8, 3))
    accepted = {"acceptance_length": 2 * cost["acceptance_length"]}
    points = [
        point("engine alone", 8, 0, throughput_tokens_per_s=4000 / cost["plain_step_ms"]),
        point("own drafter", 8, 3, round_cost=cost["round_cost"] * 1.5, acceptance=accepted,
              speedup={"value": cost["speedup"] / 2}),
        point("own drafter", 4, 3, round_cost=9.0),  # a load that was not planned
        point("own drafter", 8, 3, round_cost=9.0, temperature=1.0),
        point("own drafter", 8, 3, round_cost=9.0) | {"set": "general"},
        point("own drafter", 1, 3, round_cost=None),
    ]  # fmt: skip
    drafter = run_folder("r") / "theirs"
    drafter.mkdir()
    make("06_benchmark_serving", {"points": points}, drafter=str(drafter))
    told = phase_metrics(run_folder("r"))
    found = {p.what: p for p in planned_beside_measured(run_folder("r"), told).lines}
    assert found["vllm, 8 at once: tokens/s, engine alone"].ratio == pytest.approx(0.5)
    assert found["vllm, 8 at once, K=3: cost of a round"].ratio == pytest.approx(1.5)
    assert found["vllm, 8 at once, K=3: acceptance length"].ratio == pytest.approx(2)
    assert found["vllm, 8 at once, K=3: speed-up"].ratio == pytest.approx(0.5)
    unknown = found["vllm, 1 at once, K=3: cost of a round"]
    assert (unknown.measured, unknown.ratio) == ("not measured", None)
    assert not any("9.00" in line.measured for line in found.values())


def test_the_page_shows_it(plan):
    make("01_generate_data", {"tokens_per_s": 5.0})
    text = build_page("r").read_text()
    assert "Planned beside measured" in text and "Planned for 1 x h200" in text
