"""The journal: nothing lost, nothing half-written, and no way around the baseline."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle3lib.lab import run
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.journal import keep_profile, read_journal, record, skip_gate
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import load_profile
from eagle3lib.lab.run import begin, run_folder


def test_what_many_write_at_once_is_all_there(tmp_path):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: record(tmp_path, "note", text=f"{n}\u2028x"), range(20)))
    assert sorted(e["text"] for e in read_journal(tmp_path)) == sorted(
        f"{n}\u2028x" for n in range(20)
    )


def test_the_baseline_is_never_skipped_and_another_gate_needs_a_reason(tmp_path):
    for gate, why in (("engine alone", "no time"), ("reference drafter", "  ")):
        with pytest.raises(UserError):
            skip_gate(tmp_path, gate, "engine alone", why)
    assert read_journal(tmp_path) == []
    skip_gate(tmp_path, "reference drafter", "engine alone", "none is public", "ada")
    (event,) = read_journal(tmp_path)
    assert (event["what"], event["who"], event["why"]) == ("gate skipped", "ada", "none is public")


def values(params):
    return {phase: cfg.model_dump() for phase, cfg in params.items()}


def test_the_profile_of_a_run_gives_its_parameters_back(tmp_path):
    params = load_profile("tiny", ["04_train_drafter"], {"epochs": 3, "run": "mine"})
    keep_profile(tmp_path, params)
    assert values(load_profile(str(tmp_path / "profile.yaml"))) == values(params)
    other = params["04_train_drafter"].model_copy(update={"epochs": 4})
    keep_profile(tmp_path, {"04_train_drafter": other})
    # Nobody gave the plan its epochs: they are the training's.
    plan = params["00_plan"].model_copy(update={"epochs": 4})
    expected = params | {"04_train_drafter": other, "00_plan": plan}
    assert values(load_profile(str(tmp_path / "profile.yaml"))) == values(expected)


def test_a_phase_leaves_why_it_ran_and_how_long_all_its_sessions_took(tmp_path, monkeypatch):
    """A capture of ten hours that was killed after nine took ten hours, not one."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    plan = PHASES["00_plan"](run="r")
    first = begin(plan, "t")
    first.note("at work")
    (started,) = read_journal(run_folder("r"))
    assert (started["why"], started["earlier_s"]) == ("never run", 0)
    monkeypatch.setattr(run, "_worked_s", lambda *_: 3600.0)
    again = begin(plan, "t")
    again.finish({})
    events = read_journal(run_folder("r"))
    assert [e["what"] for e in events] == ["started", "started", "finished"]
    assert events[1]["why"] == "was interrupted" and events[2]["duration_s"] >= 3600


def test_a_killed_session_counts_up_to_its_last_sign_of_life(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    phase = begin(PHASES["00_plan"](run="r"), "t")
    phase.note("at work")
    import os

    progress = phase.folder / "progress.json"
    alive = progress.stat().st_mtime + 50
    os.utime(progress, (alive, alive))
    assert 49 <= run._worked_s(run_folder("r"), "00_plan") <= 53
