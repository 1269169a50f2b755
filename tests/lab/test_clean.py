"""What is freed, what is kept, and that nobody takes a freed run for a damaged one."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.lab import run
from eagle3lib.lab.clean import clean, survey
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.journal import read_journal
from eagle3lib.lab.large import LARGE
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.phase_params import SHIPPED
from eagle3lib.lab.run import begin, gather_inputs, phase_state, run_folder
from eagle3lib.lab.words import size_text

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


def duration(whole, phase, seconds):
    path = whole / phase / "manifest.json"
    write_json(path, read_json(path) | {"duration_s": seconds})


def test_what_it_takes_to_make_again_is_what_it_took_with_all_that_it_reads(whole):
    duration(whole, STATES, 3600.0)
    duration(whole, TRAIN, 600.0)
    times = {k.name: k.again_s for k in survey("r")}
    assert times == {"states": 3600.0, "checkpoints": 600.0, "previous": None}
    clean("r", ["states"])
    told = {k.name: (k.again_s, k.after) for k in survey("r")}
    assert told["checkpoints"] == (4200.0, (STATES,)), "training reads states, which are gone"
    assert told["states"] == (3600.0, ())


def test_a_folder_that_is_a_link_is_left_alone(whole, tmp_path):
    """On a larger disk, and maybe of two runs: rmtree refuses links, after the manifest said so."""
    real = tmp_path / "large_disk"
    (whole / STATES / "states").rename(real)
    (whole / STATES / "states").symlink_to(real)
    with pytest.raises(UserError, match="a link to"):
        clean("r", ["states", "checkpoints"])
    assert (real / "data.bin").exists() and (whole / TRAIN / "checkpoints").exists()
    assert state(STATES)[0] == "done"


@pytest.mark.parametrize("held", [STATES, TRAIN])
def test_nothing_is_freed_while_the_phase_that_makes_or_reads_it_runs(whole, held):
    lock = whole / f".{held}.lock"
    hold = f"import filelock\nlock = filelock.FileLock({str(lock)!r})\nlock.acquire()\n"
    hold += "print(1, flush=True)\ninput()"
    other = subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1)
    try:
        other.stdout.readline()
        with pytest.raises(UserError, match=f"{held} .* is running in another process"):
            clean("r", ["states"], force=True)
    finally:
        other.kill()
        other.communicate()
    assert (whole / STATES / "states" / "data.bin").exists()
    assert clean("r", ["states"])


def test_the_command_tells_size_time_and_readers_and_frees_nothing_unasked(whole):
    duration(whole, STATES, 3661.0)
    shown = CliRunner().invoke(app, ["clean", "r"]).stdout
    assert "states          1.0 kB  no phase needs it now" in shown
    assert "made again in 1:01:01" in shown and "eagle3 explore hidden_states" in shown
    assert "free 2.0 kB: eagle3 clean r --what states,checkpoints --yes" in shown
    rest = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file()) - 2000
    assert f"the rest     {size_text(rest):>9}" in shown
    assert (whole / STATES / "states" / "data.bin").exists()
    assert CliRunner().invoke(app, ["clean", "r", "--what", "states", "--yes"]).exit_code == 0
    assert not (whole / STATES / "states").exists() and (whole / TRAIN / "checkpoints").exists()


def test_every_notebook_that_opens_large_files_is_told():
    """By the names that notebooks reach them by."""
    reach = {"states": "StateStore(", "checkpoints": "best_drafter("}
    for kind, call in reach.items():
        told = " ".join((LARGE[kind].phase, *LARGE[kind].readers, *LARGE[kind].also))
        notebooks = [p for p in (ROOT / "notebooks").rglob("*.ipynb") if call in p.read_text()]
        assert len(notebooks) > 1 and [p.stem for p in notebooks if p.stem not in told] == []


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
