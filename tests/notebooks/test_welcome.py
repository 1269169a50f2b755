"""The welcome notebook: from any working directory, with runs in any state."""

from __future__ import annotations

import re

import papermill
import pytest

from eagle3lib.lab.files import write_json
from eagle3lib.lab.notebooks import NOTEBOOKS
from eagle3lib.report.welcome import WELCOME, notebooks_table, runs_table


@pytest.fixture
def outputs(tmp_path, monkeypatch):
    """A run that has planned and begun to generate, and one whose manifest was torn."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    folder = tmp_path / "outputs" / "begun"
    write_json(folder / "manifest.json", {"target": {"name": "<my> target"}, "phases": {}})
    plan = {"inputs": {"upstream": {}, "params": {}}, "fingerprint": "x", "artefacts": {},
            "finished": "2026-12-01T03:04:05+00:00", "duration_s": 1.0}  # fmt: skip
    write_json(folder / "00_plan" / "manifest.json", plan)
    write_json(folder / "00_plan" / "metrics.json", {})
    write_json(folder / "01_generate_data" / "inputs.json", {})
    torn = tmp_path / "outputs" / "torn" / "manifest.json"
    torn.parent.mkdir()
    torn.write_text('{"target": ')
    return tmp_path / "outputs"


def test_every_notebook_is_linked_and_says_what_it_does():
    rows = notebooks_table().rows
    links = [re.search(r'href="([^"]+)"', link)[1] for link, _, _ in rows]
    assert all((NOTEBOOKS / link).exists() for link in links)
    assert len(links) == len([*NOTEBOOKS.rglob("*.ipynb")]) - 1
    assert all(title for _, title, _ in rows)


def test_runs_are_shown_with_their_state_and_a_torn_one_hides_no_other(outputs):
    begun, torn = runs_table().rows
    assert begun[:2] == ("begun", "&lt;my&gt; target")
    assert begun[2] == "1 of 8 done, 01_generate_data interrupted"
    assert torn[0] == "torn" and "not readable" in torn[2]


def test_it_runs_top_to_bottom_from_any_working_directory(outputs, tmp_path):
    done = papermill.execute_notebook(
        str(WELCOME), str(tmp_path / "out.ipynb"), kernel_name="python3", cwd=str(tmp_path),
        progress_bar=False,
    )  # fmt: skip
    shown = [o["data"]["text/html"] for c in done.cells for o in c.get("outputs", [])]
    assert "00_plan.ipynb" in shown[0] and "01_generate_data interrupted" in shown[1]
