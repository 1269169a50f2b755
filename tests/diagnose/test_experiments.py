"""Every cause has an experiment, and every command of one is one that can be typed."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_docs import problem, unparsed

from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.experiments import with_trials
from eagle3lib.diagnose.material import Material
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.profile import load_profile, parse_arguments
from eagle3lib.target.smollm2 import NAME

PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def catalogue():
    """(code, question) of every cause that the page lists."""
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if part[0] in "1234567":
            for cell in re.findall(r"^\| (`[^|]*) \|", part, re.MULTILINE):
                for code in re.findall(r"`([\w-]+)`", cell):
                    yield code, int(part[0])


CODES = list(catalogue())


def material(run: Path | None, **more):
    row = SimpleNamespace(
        trained=True, messages=[{"role": "user", "content": "It's 5 o'clock?\nYes"}], turn=0
    )
    target = SimpleNamespace(name=NAME)
    return Material(
        target, None, None, "bfloat16", answers=[row], folder=run,
        export=Path("/models/my drafter"), benchmark={"num_speculative_tokens": 3}, **more,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "out puts"))
    folder = tmp_path / "out puts" / "mine"
    folder.mkdir(parents=True)
    (folder / "profile.yaml").write_text("common: {run: mine}\n")
    (tmp_path / "out puts" / "reference" / "smollm2-135m-eagle3").mkdir(parents=True)
    return folder


def checked(command):
    """What is wrong with a command line; of ``eagle3 run`` also values and profile."""
    words = shlex.split(command)
    if words[0] != "eagle3":
        return "" if words[0] == "printf" else f"what is {words[0]!r}?"
    if words[1] == "run":
        phases, values = parse_arguments(words[3:])
        load_profile(words[2], phases, values)
    return problem(words[1:]) or unparsed(words[1:])


@pytest.mark.parametrize(("code", "question"), CODES, ids=[code for code, _ in CODES])
def test_every_cause_of_a_run_has_an_experiment_that_can_be_typed(run, code, question):
    served = {"engines": "vllm", "compile": True, "vllm_settings": "tensor_parallel=8 -- --x y"}
    m = material(run, served_params=served)
    m.benchmark["temperature"] = 0.7  # greedy rounds are no experiment where they were greedy
    cause = Cause(code, "error", code, question=question, command="eagle3 run PROFILE 06 07")
    (made,) = with_trials([cause], m)
    assert made.trials, "no experiment"
    commands = [made.command, *(c for t in made.trials for c in t.commands)]
    assert [(c, checked(c)) for c in commands if checked(c)] == []
    assert not any("PROFILE" in c for c in commands)
    assert all(t.what and t.tells for t in made.trials)


def test_one_gpu_keeps_the_other_settings_and_flags(run):
    served = {"vllm_settings": "tensor_parallel=8 memory_share=0.4 -- --flag x"}
    cause = Cause("engine-tensor-parallel", "error", "t", question=2)
    (made,) = with_trials([cause], material(run, served_params=served))
    words = shlex.split(made.trials[0].commands[0])
    assert "vllm_settings=tensor_parallel=1 memory_share=0.4 -- --flag x" in words


def test_what_would_change_nothing_is_left_out(run):
    """Eager already, float32 already, one GPU, reference measured: another engine and overfitting
    are left."""
    m = replace(material(run, served_params={"reference_drafter": "/d"}), dtype="float32")
    (made,) = with_trials([Cause("engine-disagrees", "error", "t", question=2)], m)
    assert [t.what.split()[0] for t in made.trials] == ["another", "overfit"]


@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_a_sampled_benchmark_that_accepts_nothing_is_asked_greedily_first(run, heat):
    m = material(run)
    m.benchmark["temperature"] = heat
    (made,) = with_trials([Cause("nothing-accepted", "error", "t", question=2)], m)
    assert ("temperatures=0" in made.trials[0].commands[0]) == bool(heat)


def test_a_drafter_from_elsewhere_is_served_and_asked_with_its_own_names():
    m = material(None, asked="my prompts.jsonl", server="http://gpu:9000")
    cause = Cause("engine-disagrees", "error", "t", question=2, command="eagle3 run PROFILE 06 07")
    (made,) = with_trials([cause], m)
    commands = [made.command, *(c for t in made.trials for c in t.commands)]
    assert [(c, checked(c)) for c in commands if checked(c)] == []
    assert "--server http://gpu:9000" in made.command and "'my prompts.jsonl'" in made.command
    cache = next(t for t in made.trials if "prefix cache" in t.what)
    assert "prefix_cache=false" in cache.commands[0]
    assert "--server http://127.0.0.1:8000" in cache.commands[1]


def test_answers_that_were_recorded_before_have_no_server_to_start_again():
    m = material(None, asked="rows.jsonl")
    (made,) = with_trials([Cause("engine-disagrees", "error", "t", question=2)], m)
    assert made.trials == () and made.command == ""
