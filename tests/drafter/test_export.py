"""Notebook 05's own cells on a tiny target: folder, parity, the doctor's word, the card."""

import json
import shutil

import pytest

from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import ExportParams, TrainParams
from eagle3lib.training.checkpoints import Position, save_checkpoint

NAME = "05_export_drafter"


@pytest.fixture
def run_notebook(tiny_target, tiny_states, tiny_vocab, random_drafter, tmp_path, monkeypatch):
    """``run_notebook(**parameters)`` on a run whose phases 02 to 04 are there: its namespace."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    run = tmp_path / "r"
    shutil.copytree(tiny_states, run / "02_capture_hidden_states" / "states")
    (run / "03_build_vocab_map").mkdir()
    shutil.copy(tiny_vocab, run / "03_build_vocab_map" / "vocab_map.safetensors")
    vocab = VocabMap.load(tiny_vocab)
    theirs = tiny_target.config
    drafter = random_drafter(
        draft_vocab_size=len(vocab.d2t), intermediate_size=theirs["intermediate_size"],
        rope_parameters=theirs["rope_parameters"],
    )  # fmt: skip
    drafter.d2t.copy_(vocab.d2t)
    drafter.t2d.copy_(vocab.t2d)
    best = run / "04_train_drafter" / "checkpoints" / "best"
    save_checkpoint(best, drafter, Position(epoch=2, best_length=1.5))
    params = TrainParams(run="r", target=str(tiny_target.folder)).model_dump(mode="json")
    inputs = {"params": params, "upstream": {}}
    manifest = {"fingerprint": "x", "finished": "", "duration_s": 1.0, "artefacts": {}}
    written = {"inputs": inputs, "manifest": manifest | {"inputs": inputs}}
    for name, content in written.items():
        (run / "04_train_drafter" / f"{name}.json").write_text(json.dumps(content))
    cells = json.loads((ROOT / "notebooks" / f"{NAME}.ipynb").read_text())["cells"]

    def execute(**changes):
        given = {"run": "r", "target": str(tiny_target.folder), "ask_engines": False} | changes
        names = ExportParams(**given).model_dump()
        for cell in cells:
            if cell["cell_type"] == "code" and "parameters" not in cell["metadata"].get("tags", []):
                exec("".join(cell["source"]), names)
        return names

    return execute


def test_the_export_is_read_alike_by_every_reader(run_notebook, tmp_path):
    names = run_notebook(licence="mit", base_model="org/T")
    folder = tmp_path / "r" / NAME
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["parity"]["max_logit_difference"] == 0.0
    assert set(metrics["readers"]) == {"vllm-v1", "vllm-v2", "sglang"}
    assert metrics["findings"] == []
    assert "license: mit" in (folder / "drafter" / "README.md").read_text()
    artefacts = json.loads((folder / "manifest.json").read_text())["artefacts"]
    assert set(artefacts) == {"drafter/config.json", "drafter/model.safetensors"}
    assert names["found"].rows()[0][""] == "source"


def test_for_vllm_alone_sglang_is_not_looked_at(run_notebook, tmp_path):
    names = run_notebook(serve_with="vllm", max_shard_mib=1)
    assert set(names["found"].facts) == {"vllm-v1", "vllm-v2"}
    config = json.loads((tmp_path / "r" / NAME / "drafter" / "config.json").read_text())
    assert config["eagle_config"] == {"use_aux_hidden_state": True}


def test_an_export_that_an_engine_would_misread_does_not_count(run_notebook, monkeypatch):
    """The doctor's errors stop the phase before its manifest is written."""
    from eagle3lib.drafter import formats

    monkeypatch.setattr(formats, "sglang_ids", lambda slots, target: list(slots))
    with pytest.raises(UserError, match=r"sglang takes states \[3, 6, 8\]"):
        run_notebook()
