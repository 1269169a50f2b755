"""The model card: what was measured of this very drafter, and nothing of another one."""

import json

import pytest
from huggingface_hub import ModelCard

from eagle3lib.drafter.card import CardFacts, model_card, rewrite_card
from eagle3lib.lab.errors import UserError

BENCHMARK = {
    "engine": "vllm 9.9", "dtype": "bfloat16", "num_speculative_tokens": 3, "concurrency": 1,
    "temperature": 0.0,
    "arms": [
        {"arm": "engine alone", "set": "workload", "tokens_per_s": 20.0},
        {"arm": "own drafter", "set": "workload", "tokens_per_s": 25.0,
         "acceptance": {"acceptance_length": 1.748},
         "speedup": {"value": 1.25, "low": 1.2, "high": 1.3}},
    ],
}  # fmt: skip


@pytest.fixture
def run_folder(make_folder, tmp_path, monkeypatch):
    """A run with an export and a benchmark that used it."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    phase = tmp_path / "r" / "05_export_drafter"
    phase.mkdir(parents=True)
    make_folder().path.rename(phase / "drafter")
    params = {"target": "t", "base_model": "org/T", "licence": "apache-2.0"}
    files = {
        "inputs": {"params": params, "target": "f00d"},
        "metrics": {"trained_on": "Trained for 2 epochs."},
        "manifest": {"fingerprint": "one", "inputs": {"upstream": {}}},
    }
    for name, content in files.items():
        (phase / f"{name}.json").write_text(json.dumps(content))
    served = tmp_path / "r" / "06_benchmark_serving"
    served.mkdir()
    used = {"inputs": {"upstream": {"05_export_drafter": "one"}}}
    (served / "manifest.json").write_text(json.dumps(used))
    (served / "metrics.json").write_text(json.dumps(BENCHMARK))
    return tmp_path / "r"


def test_a_card_is_one_that_the_hub_reads(random_drafter):
    about = CardFacts("target", "f00d", "Trained.", "org/T", "mit")
    card = ModelCard(model_card(random_drafter().config, about))
    assert (card.data.base_model, card.data.license) == ("org/T", "mit")
    assert "eagle3" in card.data.tags and "not served yet" in card.text
    bare = ModelCard(model_card(random_drafter().config, CardFacts("target", "f00d", "")))
    assert bare.data.base_model == "target" and bare.data.license is None


def test_the_benchmarks_figures_are_written_into_it(run_folder):
    text = rewrite_card("r").read_text()
    assert "| own drafter | workload | 1.75 | 25.0 | 1.25 (1.2 to 1.3) |" in text
    assert "vllm 9.9" in text and "license: apache-2.0" in text and "Trained for 2 epochs." in text


def test_data_and_licence_are_told_and_what_is_not_known_is_said(run_folder):
    assert "Its data is not told here." in rewrite_card("r").read_text()
    phase = run_folder / "01_generate_data"
    phase.mkdir()
    params = {"workload": "/data/private/tasks.jsonl", "temperature": 0.7}
    (phase / "inputs.json").write_text(json.dumps({"params": params}))
    text = rewrite_card("r").read_text()
    assert (
        "its target's own answers to prompts of `tasks.jsonl`, sampled at temperature 0.7" in text
    )
    assert "Licence of this drafter: apache-2.0." in text and "private" not in text


def test_figures_of_an_earlier_drafter_are_not(run_folder):
    manifest = run_folder / "05_export_drafter" / "manifest.json"
    manifest.write_text(json.dumps({"fingerprint": "two", "inputs": {"upstream": {}}}))
    assert "not served yet" in rewrite_card("r").read_text()


def test_figures_of_a_drafter_that_was_named_in_its_place_are_not(run_folder):
    manifest = run_folder / "06_benchmark_serving" / "manifest.json"
    manifest.write_text(json.dumps({"inputs": {"upstream": {"01_generate_data": "x"}}}))
    assert "not served yet" in rewrite_card("r").read_text()


def test_a_run_without_an_export_is_named(run_folder):
    with pytest.raises(UserError, match="no exported drafter"):
        rewrite_card("nosuch")
