"""The profiles of params/: each says its machine, validates, and plans without weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from eagle3lib import cli
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.settings import with_settings
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import PROFILES, load_profile

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
PROMISED = {"demo", "smollm2-gpu", "qwen3-8b-1gpu", "llama3.1-8b-8gpu", "qwen3-30b-a3b",
            "gpt-oss-120b", "deepseek-v3", "kimi-k2.5-int4"}  # fmt: skip
each_profile = pytest.mark.parametrize("name", NAMES)


def test_the_promised_profiles_are_there():
    assert set(NAMES) >= PROMISED


@each_profile
def test_it_says_at_its_top_what_machine_it_needs(name):
    top = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8").split("\ncommon:")[0]
    assert any(line.startswith("# Machine: ") for line in top.splitlines()[:4])


@each_profile
def test_it_validates_down_to_the_words_that_engines_get(name):
    phases = load_profile(name)
    assert set(phases) == set(PHASES)
    plan = phases["00_plan"]
    for phase, params in phases.items():
        for field in type(params).model_fields:
            if field.endswith("_settings"):  # no engine on fewer GPUs than the plan spreads it over
                words = getattr(params, field)
                config = with_settings(EngineConfig(Path("/t")), words, f"{phase}.{field}")
                assert config.tensor_parallel == plan.gpus, (phase, field)


@each_profile
def test_it_plans_without_weights_and_fits_its_machine(name, monkeypatch, capsys):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.setattr(sys, "argv", ["eagle3", "plan", name, "--no-engines"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code, capsys.readouterr().err


def test_kimi_is_what_its_page_says():
    """Both engines, trained on from a public drafter whose map is kept, reasoning kept."""
    phases = load_profile("kimi-k2.5-int4")
    assert phases["06_benchmark_serving"].engines == "vllm,sglang"
    assert phases["01_generate_data"].thinking == "on"
    start = phases["04_train_drafter"].warm_start
    assert start and start == phases["03_build_vocab_map"].warm_start
    assert phases["03_build_vocab_map"].draft_vocab_size == 0
    assert (ROOT / "docs/howto/kimi_k25_int4.md").exists()
