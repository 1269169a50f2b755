"""The command line: what a mistake looks like to the person who made it."""

from __future__ import annotations

import json
import sys

import pytest

from eagle3lib import cli
from eagle3lib.lab.params import PHASES


@pytest.fixture
def eagle3(monkeypatch, capsys, tmp_path):
    """Run ``eagle3 WORDS``; returns (exit code, standard output, standard error)."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eagle3", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


def write_target(folder, **changes):
    """A folder that looks like a target until something is taken out of it."""
    folder.mkdir()
    config = {"num_hidden_layers": 12, "hidden_size": 8, "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


MISTAKES = [
    (["run", "nosuch"], "no profile 'nosuch'"),
    (["run", "demo", "nosuch_phase"], "unknown phase 'nosuch_phase'"),
    (["run", "demo", "epochz=3"], "unknown parameter 'epochz'"),
    (["run", "demo", "04_train_drafter.epochz=3"], "epochz"),
    (["run", "demo", "epochs=many"], "'many'"),
    (["run", "demo", "epochs=0"], "epochs"),
    (["run", "demo", "run=../elsewhere"], "run"),
    (["run", "demo", "target=/nowhere/at/all"], "no target '/nowhere/at/all'"),
    (["run", "demo", "01", "workload=/no/prompts.jsonl"], "workload"),
    (["report", "never-run"], "no run 'never-run'"),
    (["status", "never-run"], "no run 'never-run'"),
    (["params", "nosuch"], "unknown phase 'nosuch'"),
    (["nosuch"], "nosuch"),
]


@pytest.mark.parametrize(("words", "named"), MISTAKES, ids=lambda v: " ".join(v)[:50])
def test_a_mistake_is_one_message_and_exit_code_2(eagle3, tmp_path, words, named):
    code, _, err = eagle3(*words)
    assert code == 2
    assert named in err
    assert "Traceback" not in err
    assert not (tmp_path / "outputs").exists(), "nothing may start or be written"


def test_a_target_without_tokenizer_or_weights_is_named(eagle3, tmp_path):
    folder = write_target(tmp_path / "target")
    code, _, err = eagle3("run", "demo", f"target={folder}")
    assert code == 2
    assert "no tokenizer" in err
    assert "no weights" in err
    assert str(folder) in err


def test_a_broken_profile_is_named_with_its_file(eagle3, tmp_path):
    profile = tmp_path / "mine.yaml"
    profile.write_text("common: [1, 2\n")
    code, _, err = eagle3("run", str(profile))
    assert code == 2
    assert str(profile) in err


def test_a_phase_without_its_upstream_says_what_to_run(eagle3, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3lib.report.runner.open_target", lambda name: FakeTarget)
    code, _, err = eagle3("run", "demo", "04")
    assert code == 2
    assert "needs 01_generate_data" in err


class FakeTarget:
    name = "smollm2-135m-instruct"
    fingerprint = "0123456789abcdef"


def test_params_lists_every_parameter_with_its_help(eagle3):
    code, out, _ = eagle3("params")
    assert code == 0
    for model in PHASES.values():
        for name, field in model.model_fields.items():
            assert name in out
            assert field.description in out


def test_interruption_exits_130_and_says_how_to_go_on(eagle3, monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle3lib.report.runner.open_target", interrupted)
    code, _, err = eagle3("run", "demo")
    assert code == 130
    assert "again to continue" in err
