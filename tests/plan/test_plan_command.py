"""``eagle3 plan`` as a person meets it."""

from __future__ import annotations

import json
import sys

import pytest
from public_shapes import QWEN3_8B

from eagle3lib import cli


@pytest.fixture
def plan(monkeypatch, capsys):
    """Run ``eagle3 plan WORDS`` without asking engines; (exit code, output, errors)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eagle3", "plan", *map(str, words), "--no-engines"])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_8B))
    return path


def test_a_bare_config_is_planned(plan, config):
    code, out, _ = plan(config, "gpu=h200", "disk_free_gb=500")
    assert code == 0
    assert out.startswith("answer")
    assert "8,190,735,360" in out


def test_json_is_json_with_the_same_numbers(plan, config):
    code, out, _ = plan(config, "gpu=h200", "disk_free_gb=500", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["target"]["parameters"] == 8_190_735_360
    assert found["findings"] == []
    assert {line["batch"] for line in found["round_costs"]} == {1, 8, 32}


def test_a_plan_that_cannot_fit_is_shown_and_exits_with_2(plan, config):
    code, out, err = plan(config, "gpu=l4", "answer_tokens=100000000", "disk_free_gb=50")
    assert code == 2
    assert "does it fit" in out
    assert "answer_tokens=" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["/no/such/target"], "no target"),
        (["demo", "epochz=3"], "epochz"),
        (["demo", "04"], "no phases"),
        (["demo", "gpu=abacus"], "abacus"),
        (["nosuch.yaml"], "nosuch.yaml"),
    ],
)
def test_a_mistake_is_one_message(plan, words, named):
    code, _, err = plan(*words)
    assert code == 2
    assert named in err
    assert "Traceback" not in err


def test_the_values_of_a_profile_hold_and_the_words_stand_above_them(plan):
    code, out, _ = plan("kimi-k2.5-int4", "--json", "num_speculative_tokens=5")
    found = json.loads(out)
    assert code == 0
    assert found["device"]["device"] == "8 x rtx-pro-6000"
    assert found["step_parts"][1]["what"] == "round, K=5"
