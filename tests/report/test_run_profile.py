"""What `eagle3 run` makes, skips and makes again; what a failure leaves for the next person."""

import threading
from types import SimpleNamespace

import pytest

from eagle3lib.lab import run
from eagle3lib.lab.clean import clean
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.journal import read_journal, record
from eagle3lib.lab.large import LARGE
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import begin, run_folder
from eagle3lib.report import runner

TARGET = "0123456789abcdef"
STATES, TRAIN = "02_capture_hidden_states", "04_train_drafter"


@pytest.fixture(autouse=True)
def made(tmp_path, monkeypatch):
    """Names of the phases whose notebook was run, in their order; a notebook makes what it must."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(run, "ROOT", tmp_path)
    names = []

    def execute(cfg, output):
        phase = begin(cfg, TARGET)
        names.append(cfg.PHASE)
        try:
            if cfg.run == "broken":
                raise UserError("no prompts at all", next="mend it")
            places = [kind.path for kind in LARGE.values() if kind.phase == cfg.PHASE]
            files = [phase.folder / place / "data.bin" for place in places]
            for file in files:
                file.parent.mkdir()
                file.write_text("same")
            phase.finish({}, files)
        finally:
            phase.lock.release(force=True)

    monkeypatch.setattr(runner, "execute", execute)
    monkeypatch.setattr(
        runner, "open_target", lambda name: SimpleNamespace(name=name, fingerprint=TARGET)
    )
    monkeypatch.setattr(runner, "build_page", lambda run: run_folder(run) / "index.html")
    monkeypatch.setattr(runner, "refresh_page", lambda run: None)
    monkeypatch.setattr(runner, "phase_metrics", lambda folder: {})
    return names


def profile(name="r", **training):
    params = {phase: model(run=name) for phase, model in PHASES.items()}
    return params | {TRAIN: PHASES[TRAIN](run=name, **training)}


def test_freed_files_stay_away_until_a_phase_needs_them(made):
    runner.run_profile(profile(), list(PHASES))
    clean("r", ["states", "checkpoints"])
    made.clear()
    runner.run_profile(profile(), list(PHASES))
    assert made == []
    runner.run_profile(profile(epochs=2), [TRAIN])
    assert made == [STATES, TRAIN]
    assert (run_folder("r") / STATES / "states" / "data.bin").exists()


def test_a_freed_phase_that_is_named_is_made_again(made):
    runner.run_profile(profile(), list(PHASES))
    clean("r", ["states"])
    made.clear()
    runner.run_profile(profile(), [STATES])
    assert made == [STATES]


def test_a_failure_is_in_the_journal_with_its_first_line(made):
    with pytest.raises(UserError):
        runner.run_profile(profile("broken"), list(PHASES))
    event = read_journal(run_folder("broken"))[-1]
    assert (event["what"], event["phase"], event["error"]) == (
        "failed", "00_plan", "no prompts at all",
    )  # fmt: skip


def test_the_page_is_written_when_a_phase_begins_and_again_while_it_runs(made, monkeypatch):
    monkeypatch.setattr(runner, "_LOOK_S", 0.02)
    shown, enough = [], threading.Event()

    def refresh(name):
        shown.append(read_journal(run_folder(name))[-1]["what"])
        if len(shown) == 1:
            monkeypatch.setattr(runner, "_REFRESH_S", 0.02)
        if len(shown) == 3:
            enough.set()
            raise OSError("no space left on device")

    execute = runner.execute

    def slow(cfg, output):
        execute(cfg, output)
        record(run_folder("r"), "started", phase=cfg.PHASE, why="", state="resume", earlier_s=0)
        assert enough.wait(20)

    monkeypatch.setattr(runner, "execute", slow)
    monkeypatch.setattr(runner, "refresh_campaign", refresh)
    runner.run_profile(profile(), ["00_plan"])
    assert shown[0] in ("started", "finished") and shown[2] == "started"
    assert made == ["00_plan"], "a page that can't be written stops nothing"


@pytest.mark.parametrize("error", [UserError("no prompts"), KeyboardInterrupt()])
def test_the_page_is_written_after_a_failure_and_an_interruption(made, monkeypatch, error):
    def fail(cfg, output):
        raise error

    pages = []
    monkeypatch.setattr(runner, "execute", fail)
    monkeypatch.setattr(runner, "refresh_page", pages.append)
    with pytest.raises(type(error)):
        runner.run_profile(profile(), ["00_plan"])
    assert pages == ["r"]
