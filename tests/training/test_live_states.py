"""Training on states that the target makes as they are needed is training on stored ones."""

import json
import shutil

import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import CaptureParams
from eagle3lib.lab.run import Phase
from eagle3lib.target.capture import capture
from eagle3lib.target.phase import capture_answers
from eagle3lib.training import bench_live
from eagle3lib.training.job import _check_finished, run_training, training_summary
from eagle3lib.training.loop import Trainer

# One conversation a forward and an update: both make the very same products.
ALONE = {"batch_tokens": 1, "target_batch_tokens": 1, "epochs": 2}


@pytest.fixture
def captured(tiny_target, tiny_rows, tmp_path):
    def make(rows=tiny_rows, **options):
        folder = tmp_path / f"states-of-{len(rows)}"
        capture(tiny_target, rows, folder, slots=(2, 5, 7), dtype="float32", batch_tokens=1,
                shard_rows=5, **options)  # fmt: skip
        return folder

    return make


def test_live_is_disk_to_the_last_bit(params, folders, captured, tiny_target, tiny_rows, on):
    """Every logged number (held-out rounds among them), weight and moment, though all that phase 02
    left is a sample of two conversations."""
    disk = folders("disk", states=captured())
    Trainer(params(**ALONE), tiny_target, disk).run()
    live = folders("live", states=captured(tiny_rows[:2], sample_of=len(tiny_rows)))
    Trainer(params(**ALONE, states="live"), tiny_target, live).run()
    assert len(on.rows_of(live, "train")) == 16
    on.same_outcome(disk, live)


def test_packs_differ_by_rounding_alone(train, on):
    one = train("one", epochs=1, learning_rate=1e-5)
    two = train("two", epochs=1, learning_rate=1e-5, states="live")
    for a, b in zip(on.rows_of(one, "train"), on.rows_of(two, "train"), strict=True):
        assert [s["inside"] for s in a["steps"]] == [s["inside"] for s in b["steps"]]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_stopped_by_the_clock_and_run_again_is_uninterrupted(
    train, params, folders, tiny_target, updates, monkeypatch, on
):
    """Live states in bfloat16 products, stopped within an epoch and at its end: the rates too are
    those of the whole plan."""
    changes = {"states": "live", "precision": "bfloat16", "epochs": 2}
    whole, where = train("whole", **changes), folders("cut")

    class Clock(Trainer):
        def _over_ranks(self, own):
            if self.at.update + 1 >= updates:
                self._started_s -= 3600
            return super()._over_ranks(own)

    assert not Clock(params(**changes, max_minutes=59), tiny_target, where).run()
    assert read_json(where.last / "state.json")["update"] == updates
    with pytest.raises(UserError, match=rf"at update {updates} of 4, after max_minutes: 59"):
        _check_finished(on.rows_of(where), params(max_minutes=59), where)
    assert Trainer(params(**changes, max_minutes=59), tiny_target, where).run()
    _check_finished(on.rows_of(where), params(), where)
    on.same_outcome(whole, where)


def test_two_processes_with_a_target_each_are_one(train, folders, params, tiny_target, on):
    small = {"epochs": 1, "learning_rate": 1e-5, "states": "live"}
    one, two = train("one", **small), folders("two")
    on.run_ranks(params(**small, sharding="fsdp"), tiny_target, two, 2)
    for a, b in zip(on.rows_of(one, "train"), on.rows_of(two, "train"), strict=True):
        assert [s["inside"] for s in a["steps"]] == [s["inside"] for s in b["steps"]]
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], abs=2e-4)


def test_phases_02_and_04_of_a_run(params, tiny_target, tiny_answers, tiny_vocab, tmp_path,
                                   monkeypatch, on):  # fmt: skip
    """From the answers to a trained drafter, with no states on the disk but the sample's."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    monkeypatch.setattr("eagle3lib.target.phase.PROOF_ROWS", 1)
    shutil.copytree(tiny_answers, tmp_path / "r" / "01_generate_data")
    (tmp_path / "r" / "03_build_vocab_map").mkdir()
    shutil.copy(tiny_vocab, tmp_path / "r" / "03_build_vocab_map" / "vocab_map.safetensors")
    capturing = CaptureParams(run="r", target=str(tiny_target.folder), dtype="float32",
                              device="cpu", states="live")  # fmt: skip
    capture_answers(Phase(capturing, {}), capturing, tiny_target, (2, 5, 7))
    cfg = params(run="r", states="live", epochs=1)
    phase = Phase(cfg, {})
    phase.folder.mkdir()
    summary = training_summary(run_training(phase, cfg), cfg)
    assert (summary["updates"], summary["trained_tokens"]) == (2, 135)
    assert summary["heldout"].keys() == {"workload", "general"}


def test_a_sample_is_not_trained_on(params, folders, captured, tiny_target, tiny_rows):
    where = folders(states=captured(tiny_rows[:4], sample_of=len(tiny_rows)))
    with pytest.raises(UserError, match=r"(?s)states of 4 of 12 answers.*states: live here too"):
        Trainer(params(), tiny_target, where)


def test_the_benchmark_measures_whole_updates(tiny_target, capsys):
    arguments = ["--tokens=20", "--update-tokens=60", "--updates=2", "--steps=2", "--repeats=1",
                 "--draft-vocab=100", "--precision=float32", "--device=cpu"]  # fmt: skip
    assert bench_live.main([str(tiny_target.folder), *arguments]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 30 < found["tokens_per_update"] <= 60
    assert found["tokens_per_s"] == pytest.approx(
        found["tokens_per_update"] / found["update_s"], rel=0.01
    )
    assert min(found["pieces_s"].values()) > 0 and found["host_wait_s"] < found["update_s"]
