"""The storage bench runs from its first cell to its last, on a tiny run."""

import json
import shutil
from dataclasses import asdict

import papermill
import pytest

from eagle3lib.lab.machine import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_storage_bench_runs(
    tiny_target, tiny_rows, tiny_states, tiny_vocab, tmp_path, monkeypatch
):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = tmp_path / "small"
    (run / "01_generate_data").mkdir(parents=True)
    lines = [json.dumps(asdict(row)) for row in tiny_rows]
    (run / "01_generate_data" / "answers.jsonl").write_text("\n".join(lines) + "\n")
    shutil.copytree(tiny_states, run / "02_capture_hidden_states" / "states")
    (run / "03_build_vocab_map").mkdir()
    shutil.copy(tiny_vocab, run / "03_build_vocab_map" / "vocab_map.safetensors")
    values = {"run": "small", "target": str(tiny_target.folder), "threads": 1, "seeds": 1,
              "epochs": 1, "steps": 2, "rounds": 2, "capture_rounds": 2, "formats": ["compact"],
              "most_lost": 1.0, "most_bytes": 0.5}  # fmt: skip
    notebook = ROOT / "notebooks" / "bench" / "state_storage.ipynb"
    papermill.execute_notebook(
        str(notebook), str(tmp_path / "ran.ipynb"), values, kernel_name="python3"
    )
    found = json.loads((run / "bench_state_storage" / "metrics.json").read_text())
    assert [goal["wanted"] for goal in found["goals"]] == [2.5, None, 0.97, 0.9, 0.5]
    assert all(goal["found"] is not None for goal in found["goals"])
    assert len(found["capture"]) == 2 and {x["format"] for x in found["sizes"]} == {
        "full", "compact",
    }  # fmt: skip
