"""Engines are asked in a child process with a deadline; a stub Python stands in for slow ones."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from eagle3lib.plan.engines import SGLANG_PYTHON, _ask, ask_engines, check_engines


def fake_python(tmp_path, body):
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answering(tmp_path, **answer):
    line = json.dumps({"engine": "sglang", "version": "0.5.23"} | answer)
    return fake_python(tmp_path, f"echo noise\necho '{line}'")


def asked(monkeypatch, python, architecture, deadline_s):
    monkeypatch.setenv(SGLANG_PYTHON, python)
    return _ask("sglang", architecture, deadline_s)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ({"known": True, "eagle3": True}, "serves it with EAGLE-3"),
        ({"known": True, "eagle3": False}, "serves it, but not with EAGLE-3"),
        ({"known": False, "eagle3": False}, "does not know this architecture"),
        ({"version": None, "known": None, "eagle3": None}, "not installed"),
    ],
)
def test_what_the_engine_says_is_put_in_words(tmp_path, monkeypatch, answer, verdict):
    found = asked(monkeypatch, answering(tmp_path, **answer), "X", 20)
    assert found["verdict"] == verdict


def test_an_engine_that_hangs_is_left_at_the_deadline(tmp_path, monkeypatch):
    found = asked(monkeypatch, fake_python(tmp_path, "sleep 60"), "X", 0.5)
    assert "no answer within" in found["verdict"]


def test_an_engine_that_breaks_shows_its_last_line(tmp_path, monkeypatch):
    found = asked(
        monkeypatch, fake_python(tmp_path, "echo ImportError: libcuda >&2; exit 3"), "X", 20
    )
    assert "libcuda" in found["verdict"]


def test_an_engine_that_answers_no_json_is_quoted(tmp_path, monkeypatch):
    found = asked(monkeypatch, fake_python(tmp_path, "echo done"), "X", 20)
    assert "done" in found["verdict"] and found["eagle3"] is None


def test_an_engine_that_is_not_there_is_said_plainly(tmp_path, monkeypatch):
    assert "not installed" in asked(monkeypatch, "", "X", 5)["verdict"]
    assert "not installed" in asked(monkeypatch, str(tmp_path / "no"), "X", 5)["verdict"]


def test_findings_follow_from_what_was_said():
    yes = {"engine": "vllm", "version": "1", "eagle3": True, "verdict": "yes"}
    no = yes | {"eagle3": False, "verdict": "no"}
    absent = no | {"version": None, "eagle3": None}
    assert check_engines([yes, no], "X", here=True) == []
    assert [f.code for f in check_engines([no, absent], "X", here=True)] == ["engine-support"]
    assert [f.severity for f in check_engines([absent], "X", here=True)] == ["error"]
    assert [f.severity for f in check_engines([absent], "X", here=False)] == ["warning"]


REGISTRY = """
class Able:
    def set_eagle3_layers_to_capture(self, ids): ...
class Unable: ...
class ModelRegistry:
    models = {"A": Able, "B": Unable}
    get_supported_archs = staticmethod(models.keys)
    resolve_model_cls = staticmethod(lambda names: (ModelRegistry.models[names[0]], names[0]))
"""


@pytest.mark.parametrize(
    ("architecture", "verdict"),
    [
        ("A", "serves it with EAGLE-3"),
        ("B", "serves it, but not with EAGLE-3"),
        ("C", "does not know this architecture"),
    ],
)
def test_sglang_is_asked_by_duck_typing(tmp_path, monkeypatch, architecture, verdict):
    """A stand-in with the registry's two calls as SGLang has them; SGLang itself is not here."""
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text(REGISTRY)
    info = tmp_path / "sglang-0.5.23.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = asked(monkeypatch, sys.executable, architecture, 30)
    assert (found["version"], found["verdict"]) == ("0.5.23", verdict)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_itself_says_that_it_serves_kimi(monkeypatch):
    monkeypatch.delenv(SGLANG_PYTHON, raising=False)
    vllm, sglang = ask_engines("KimiK25ForConditionalGeneration")
    assert vllm["known"] and vllm["eagle3"] and vllm["version"]
    assert "not installed" in sglang["verdict"]
