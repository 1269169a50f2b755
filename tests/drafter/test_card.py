"""The model card: what was measured of this very drafter, and nothing of another one."""

import json

import pytest
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.drafter.card import CardFacts, model_card, rewrite_card
from eagle3lib.drafter.card_facts import TargetFacts, target_facts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.target import smollm2

BENCHMARK = {
    "engine": {"engine": "vllm", "version": "9.9"}, "dtype": "bfloat16",
    "num_speculative_tokens": 3, "concurrency": 1, "temperature": 0.0,
    "arms": [
        {"arm": "engine alone", "set": "workload", "tokens_per_s": 20.0},
        {"arm": "own drafter", "set": "workload", "tokens_per_s": 25.0,
         "acceptance": {"acceptance_length": 1.748, "rounds": 1506, "per_step": [0.5, 0.25]},
         "speedup": {"value": 1.25, "low": 1.2, "high": 1.3}},
        {"arm": "own drafter", "set": "general", "tokens_per_s": 20.0, "acceptance": None,
         "speedup": {"value": 1.0, "low": None, "high": None}},
    ],
}  # fmt: skip


@pytest.fixture
def run_folder(make_folder, tmp_path, monkeypatch):
    """A run with an export and a benchmark that used it."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    phase = tmp_path / "r" / "05_export_drafter"
    phase.mkdir(parents=True)
    make_folder().path.rename(phase / "drafter")
    write_json(tmp_path / "r" / "manifest.json", {})
    params = {"target": "/models/t", "base_model": "org/T", "licence": "apache-2.0"}
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
    about = CardFacts("target", "f00d", "Trained.", "org/T", licence="mit", datasets=("org/chats",))
    card = ModelCard(model_card(random_drafter().config, about))
    assert (card.data.base_model, card.data.license) == ("org/T", "mit")
    assert card.data.datasets == ["org/chats"]
    assert "eagle3" in card.data.tags and "not served yet" in card.text
    bare = ModelCard(model_card(random_drafter().config, CardFacts("target", "f00d", "")))
    assert bare.data.base_model is None, "a name of this machine is no id of the Hub"
    assert bare.data.license is None and "`target`, no Hub id told" in bare.text


def test_the_benchmarks_figures_are_written_into_it(run_folder):
    text = rewrite_card("r").read_text()
    assert (
        "| own drafter | workload | 1.75 | 1,506 | 0.50, 0.25 | 25.0 | 1.25 (1.20 to 1.30) |"
        in text
    )
    assert "| own drafter | general |  |  |  | 20.0 | 1.00 (too few prompts) |" in text
    assert "Engine vllm 9.9, bfloat16, K = 3" in text
    assert "license: apache-2.0" in text and "Trained for 2 epochs." in text
    assert "/models" not in text


def generated(run_folder, **params):
    phase = run_folder / "01_generate_data"
    write_json(phase / "inputs.json", {"params": {"temperature": 0.7} | params})
    return phase


def test_data_and_licences_are_told_and_what_is_not_known_is_said(run_folder, tmp_path):
    assert "Its data is not told here." in rewrite_card("r").read_text()
    private = tmp_path / "private" / "tasks.jsonl"
    private.parent.mkdir()
    rows = [{"source": "codeio", "licence": "MIT"}] * 2 + [{"prompt": "x"}, {"license": "CC0"}]
    private.write_text("\n".join(map(json.dumps, rows)) + "\n")
    phase = generated(run_folder, workload=str(private), general="hub:org/chats", answers="")
    write_json(phase / "metrics.json", {"trained_answers": 1200, "trained_tokens": 90000})
    text = rewrite_card("r").read_text()
    assert (
        "its target's own answers (1,200 answers, 90,000 tokens), sampled at temperature 0.7"
        in text
    )
    used = "prompts, four fifths trained on, one fifth measured on"
    assert f"| `tasks.jsonl` | {used} | 2 | codeio | MIT |" in text
    assert f"| `tasks.jsonl` | {used} | 1 | not stated | not stated |" in text
    assert f"| `tasks.jsonl` | {used} | 1 | not stated | CC0 |" in text
    assert (
        "[org/chats](https://huggingface.co/datasets/org/chats) | prompts, measured on alone"
        in text
    )
    assert ModelCard(text).data.datasets == ["org/chats"]
    assert "Licence of this drafter: apache-2.0." in text and "private" not in text


def test_a_file_that_is_gone_and_many_sources_are_told_in_few_lines(run_folder, tmp_path):
    many = tmp_path / "many.jsonl"
    many.write_text(
        "".join(json.dumps({"source": f"s{i}", "licence": "MIT"}) + "\n" for i in range(40))
    )
    generated(run_folder, workload=str(many), general=str(tmp_path / "gone.jsonl"), answers="")
    text = rewrite_card("r").read_text()
    assert text.count("| `many.jsonl` |") == 13 and "| 28 | 28 more | MIT |" in text
    assert "| `gone.jsonl` | prompts, measured on alone | | not stated | not stated |" in text


def test_the_targets_id_and_licence_come_from_where_they_lie(tmp_path):
    assert target_facts(smollm2.NAME) == TargetFacts(smollm2.HUB_ID, "apache-2.0")
    folder = tmp_path / "Llama"
    folder.mkdir()
    assert target_facts(str(folder), "org/T") == TargetFacts("org/T", "not stated")
    (folder / "README.md").write_text("---\nlicense: other\nlicense_name: llama3.1\n---\n# Llama\n")
    assert target_facts(str(folder)) == TargetFacts("", "llama3.1")
    assert target_facts("nobody/is-cached").hub == "nobody/is-cached"


def test_the_command_says_what_is_lacking_and_how_to_upload_under_ones_own_name(run_folder):
    cli = CliRunner()
    done = cli.invoke(app, ["card", "r", "--repo", "ada/eagle3-t"]).stdout
    drafter = run_folder / "05_export_drafter" / "drafter"
    assert f"hf upload ada/eagle3-t {drafter} . --repo-type model" in done
    assert "before you publish" not in done
    assert '"model": "ada/eagle3-t"' in (drafter / "README.md").read_text()
    inputs = json.loads((drafter.parent / "inputs.json").read_text())
    inputs["params"] |= {"licence": "", "base_model": ""}
    write_json(drafter.parent / "inputs.json", inputs)
    done = cli.invoke(app, ["card", "r"]).stdout
    assert "hf upload YOUR_NAME/eagle3-t " in done
    assert "05 licence=apache-2.0" in done and "05 base_model=ORG/NAME" in done


@pytest.mark.parametrize("repo", ["ada", "ada/a/b", "ada/na me", "ada/.."])
def test_an_id_that_the_hub_would_refuse_is_refused_here(run_folder, repo):
    with pytest.raises(UserError, match="can't be a model's id"):
        rewrite_card("r", repo)


def test_figures_of_an_earlier_drafter_are_not(run_folder):
    manifest = run_folder / "05_export_drafter" / "manifest.json"
    manifest.write_text(json.dumps({"fingerprint": "two", "inputs": {"upstream": {}}}))
    assert "not served yet" in rewrite_card("r").read_text()


def test_figures_of_a_drafter_that_was_named_in_its_place_are_not(run_folder):
    manifest = run_folder / "06_benchmark_serving" / "manifest.json"
    manifest.write_text(json.dumps({"inputs": {"upstream": {"01_generate_data": "x"}}}))
    assert "not served yet" in rewrite_card("r").read_text()


def test_a_run_without_an_export_is_named(run_folder):
    with pytest.raises(UserError, match="there is no run"):
        rewrite_card("nosuch")
    (run_folder / "05_export_drafter" / "manifest.json").unlink()
    with pytest.raises(UserError, match="no exported drafter"):
        rewrite_card("r")
