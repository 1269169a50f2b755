"""What is freed, what is kept, and that nobody takes a freed run for a damaged one."""

import subprocess

import pytest

from eagle3lib.lab import run
from eagle3lib.lab.clean import clean, survey
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.journal import read_journal
from eagle3lib.lab.large import LARGE
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.phase_params import SHIPPED
from eagle3lib.lab.run import begin, gather_inputs, phase_state, run_folder

TARGET = "0123456789abcdef"
STATES, TRAIN = "02_capture_hidden_states", "04_train_drafter"


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    return tmp_path / "outputs"


def make(name, content="x"):
    """Run a phase with an artefact at every large place of its own."""
    phase = begin(PHASES[name](run="r"), TARGET)
    places = [kind.path for kind in LARGE.values() if kind.phase == name] or ["out"]
    files = [phase.folder / place / "data.bin" for place in places]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(content * 1000)
    phase.finish({}, files)
    phase.lock.release(force=True)
    return phase


@pytest.fixture
def whole():
    for name in PHASES:
        make(name)
    return run_folder("r")


def state(name):
    params = PHASES[name](run="r")
    return phase_state(params, gather_inputs(params, TARGET))


def test_freed_files_are_gone_and_every_phase_is_still_whole(whole):
    before = {name: read_json(whole / name / "manifest.json")["fingerprint"] for name in PHASES}
    freed = clean("r", ["states", "checkpoints"], who="ada")
    assert {k.name: k.bytes for k in freed} == {"states": 1000, "checkpoints": 1000}
    assert not (whole / STATES / "states").exists()
    assert state(STATES)[0] == "freed" and "states freed on" in state(STATES)[1]
    assert {n for n in PHASES if state(n)[0] == "done"} == set(PHASES) - {STATES, TRAIN}
    after = {name: read_json(whole / name / "manifest.json")["fingerprint"] for name in PHASES}
    assert before == after
    assert read_json(whole / "manifest.json")["phases"][STATES]["bytes"] == 0
    last = read_journal(whole)[-1]
    assert (last["what"], last["who"], last["kind"]) == ("freed", "ada", "checkpoints")


def test_what_a_later_phase_still_needs_is_kept_unless_forced(whole):
    (whole / TRAIN / "manifest.json").unlink()
    with pytest.raises(UserError, match=f"still needed by {TRAIN}"):
        clean("r", ["states"])
    assert (whole / STATES / "states" / "data.bin").exists()
    assert clean("r", ["states"], force=True)


def test_a_reader_whose_upstream_was_made_again_still_needs_it(whole):
    make("03_build_vocab_map", "y")
    assert TRAIN in next(k for k in survey("r") if k.name == "states").needed_by


def test_a_training_that_is_not_finished_keeps_its_checkpoints_even_when_forced(whole):
    (whole / TRAIN / "manifest.json").unlink()
    with pytest.raises(UserError, match="is not finished"):
        clean("r", ["checkpoints"], force=True)
    assert (whole / TRAIN / "checkpoints").exists()


def test_a_phase_that_reads_freed_files_asks_for_them_and_they_are_made_again(whole):
    clean("r", ["states"])
    with pytest.raises(UserError, match=f"freed of {STATES}"):
        begin(PHASES[TRAIN](run="r"), TARGET)
    assert state(TRAIN)[0] == "done"  # asking damaged nothing
    make(STATES)
    assert state(STATES)[0] == "done" and state(TRAIN)[0] == "done"
    assert begin(PHASES[TRAIN](run="r"), TARGET).folder == whole / TRAIN


def test_what_a_rerun_set_aside_is_freed_too(whole):
    (whole / f"{TRAIN}.previous").mkdir()
    (whole / f"{TRAIN}.previous" / "old").write_text("old")
    assert [k.bytes for k in clean("r", ["previous"])] == [3]
    assert not list(whole.glob("*.previous")) and not list(whole.glob(".*.freed"))


def test_an_unknown_kind_frees_nothing(whole):
    with pytest.raises(UserError, match="no kind weights"):
        clean("r", ["states", "weights"])
    assert (whole / STATES / "states").exists()


@pytest.mark.parametrize("name", [*SHIPPED, "../elsewhere", "examples/demo"])
def test_what_is_no_run_is_never_looked_into(name):
    with pytest.raises(UserError, match="is no run"):
        clean(name, ["states"])


def test_make_clean_removes_runs_and_nothing_that_is_shipped(tmp_path):
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "outputs"], capture_output=True, text=True
    ).stdout.split()
    if tracked:  # a checkout, not an unpacked archive
        assert {path.split("/")[1] for path in tracked} == set(SHIPPED)
    for name in (*SHIPPED, ".servers", "demo"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    subprocess.run(["make", "-s", "-C", str(tmp_path), "-f", str(ROOT / "Makefile"), "clean"],
                   check=True)  # fmt: skip
    assert {p.name for p in (tmp_path / "outputs").iterdir()} == {*SHIPPED, ".servers"}
