"""A benchmark of a drafter from elsewhere (parameter drafter) is diagnosed and viewed by it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
import torch

from eagle3lib.diagnose.material import read_material
from eagle3lib.diagnose.predictions import summary
from eagle3lib.diagnose.predictions_run import view_run
from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.measure.arms import OWN, REFERENCE, RequestRow


@pytest.fixture
def run(tiny_target, tiny_rows, random_drafter, tmp_path, monkeypatch):
    """A run with answers, a training and an export of its own, whose benchmark named another."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    folder, named = tmp_path / "r", tmp_path / "named"
    for seed, place in enumerate((folder / "05_export_drafter" / "drafter", named)):
        place.mkdir(parents=True)
        write_drafter(place, random_drafter(seed), torch.float32)
    served = folder / "06_benchmark_serving"
    write_json(served / "inputs.json", {"params": {"drafter": str(named)}})
    write_json(served / "metrics.json", {"num_speculative_tokens": 3, "dtype": "float32"})
    rows = [
        RequestRow(OWN, "workload", r.id, 0, r.prompt_token_ids, r.answer_token_ids, "stop", 1.0,
                   None, None)
        for r in tiny_rows[:2]
    ]  # fmt: skip
    (served / "requests.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    data = folder / "01_generate_data"
    data.mkdir()
    (data / "answers.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in tiny_rows))
    write_json(folder / "04_train_drafter" / "inputs.json", {"params": {"steps": 5}})
    for name in ("manifest.json", "06_benchmark_serving/manifest.json"):
        write_json(folder / name, {})
    return folder, named


def test_it_is_read_for_the_runs_own_and_the_runs_training_is_not(run, tiny_target):
    folder, named = run
    m = read_material(folder, tiny_target)
    assert (m.export, m.answers, m.training_params) == (named, [], {})
    write_json(folder / "06_benchmark_serving" / "inputs.json", {"params": {}})
    m = read_material(folder, tiny_target)
    assert m.export == folder / "05_export_drafter" / "drafter"
    assert m.answers and m.training_params["steps"] == 5


def test_it_is_viewed_in_a_run_that_exported_none(run, tiny_target):
    folder, _ = run
    shutil.rmtree(folder / "05_export_drafter")
    found = view_run("r", tiny_target, "served")
    assert (len(found.views), found.of, found.steps) == (2, 2, 3)
    write_json(folder / "06_benchmark_serving" / "inputs.json", {"params": {}})
    with pytest.raises(UserError, match="has not finished 05_export_drafter"):
        view_run("r", tiny_target, "served")


def test_answers_to_images_are_not_viewed_and_counted(run, tiny_target, tiny_rows):
    """The first row's third prompt token made one of an image; then that of both rows."""
    shown = [row.prompt_token_ids[2] for row in tiny_rows[:2]]
    assert shown[0] not in tiny_rows[1].prompt_token_ids

    def seeing(**ids):
        return replace(tiny_target, config=tiny_target.config | ids, wrapper="Some")

    found = view_run("r", seeing(image_token_id=shown[0]), "served")
    assert ([v.id for v in found.views], found.of, found.images) == ([tiny_rows[1].id], 2, 1)
    told = summary(found.views, found.of, found.steps, found.dtype, found.images)
    assert told["answers viewed"] == "1 of 2, 1 left out: their prompts show images"
    with pytest.raises(UserError, match="prompts of all 2 served answers of run 'r' show images"):
        view_run("r", seeing(image_token_id=shown[0], video_token_id=shown[1]), "served")


def test_an_arm_that_there_is_not_is_said_before_its_answers_are_missed(run, tiny_target):
    with pytest.raises(UserError, match="has no arm 'reference drafter'"):
        view_run("r", tiny_target, "served", arm=REFERENCE)
