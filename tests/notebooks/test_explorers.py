"""Every explorer over the tiny run, as ``eagle3 explore`` makes it: one page each, in silence."""

from __future__ import annotations

import json
import shutil

import pytest
from load_records import crossed_rows, metrics_of, write_records

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import EXPLORERS, explorer, finished_run
from eagle3lib.report.explore import run_explorer

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]
# Cheap: no forward of the target for a layer that is not stored, a few answers.
PARAMETERS = {
    "acceptance_curves": {"more_runs": "twin"},
    "compare_runs": {"runs": "twin"},
    "drafter_predictions": {"answers": 2},
    "hidden_states": {"layers": "stored", "conversations": 2, "positions": 32},
}
SHOWN = {
    "acceptance_curves": ["Acceptance per step", "by context length", "No expected speed-up"],
    "compare_runs": ["too few prompts", "paired, 4 prompts"],
    "drafter_predictions": ["2 of 6", "class=\"tv\""],
    "hidden_states": ["Size of the states", "The trained drafter without a slot"],
}  # fmt: skip


@pytest.fixture(scope="module")
def outputs(tiny_run, tmp_path_factory):
    """The tiny run, and a twin that the benchmark measured and nothing else: its copy."""
    assert all(code == 0 for code, _ in tiny_run.results.values())
    folder = tmp_path_factory.mktemp("explored") / "outputs"
    folder.mkdir()
    shutil.copytree(tiny_run.folder, folder / "tiny", symlinks=True)
    for name in ("manifest.json", "06_benchmark_serving"):
        source, there = tiny_run.folder / name, folder / "twin" / name
        there.parent.mkdir(exist_ok=True)
        shutil.copytree(source, there) if source.is_dir() else shutil.copy(source, there)
    return folder


@pytest.mark.parametrize("name", sorted(EXPLORERS))
def test_an_explorer_makes_its_page(outputs, monkeypatch, name):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(outputs))
    params = explorer(name).checked({"run": "tiny", **PARAMETERS[name]}, "a test")
    page = run_explorer(params.told(dict.fromkeys(PARAMETERS[name], "a test")))
    assert page == outputs / "tiny" / "explore" / f"{name}.html"
    text = page.read_text(encoding="utf-8")
    for words in SHOWN[name]:
        assert words in text, words
    assert f"{len(PARAMETERS[name])} set" in text
    assert 'src="http' not in text


def test_a_run_measured_at_two_loads_has_its_surface(outputs, tiny_run, monkeypatch):
    """The tiny run asks one request at a time, and too few prompts for any expected speed-up."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(outputs))
    shutil.copytree(tiny_run.folder, outputs / "loaded", symlinks=True)
    rows = crossed_rows([f"p{n}" for n in range(8)])
    write_records(outputs / "loaded" / "06_benchmark_serving", rows, metrics_of(rows))
    params = explorer("acceptance_curves").checked({"run": "loaded"}, "a test")
    text = run_explorer(params).read_text(encoding="utf-8")
    for words in ("what was measured is framed", "Speed-up over the load, by K", "own drafter"):
        assert words in text, words
    assert "No expected speed-up" not in text and "fitted, concurrency 1, 8" in text


def test_a_run_that_is_not_there_or_not_finished_says_what_to_run(outputs, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(outputs))
    with pytest.raises(UserError, match="there is no run 'none'"):
        finished_run("none")
    with pytest.raises(UserError) as raised:
        finished_run("twin", "04_train_drafter", "06_benchmark_serving")
    assert "has not finished 04_train_drafter" in str(raised.value)
    assert "run=twin 04" in str(raised.value)
    assert json.loads((outputs / "twin" / "manifest.json").read_text())["phases"]
