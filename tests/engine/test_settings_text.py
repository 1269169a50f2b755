"""The engine's settings as a phase takes them: one text, the words of ``eagle3 serve``."""

import contextlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lib.data.phase import target_server
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.settings import ServeParams, with_settings
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import BenchmarkParams, GenerateParams
from eagle3lib.measure.ask import engine_config

BASE = EngineConfig(Path("target"), compile=True, extra_flags=("--a",))


def test_an_empty_text_changes_nothing():
    assert with_settings(BASE, "", "here") == BASE


def test_only_what_is_named_changes_and_flags_come_after_those_there():
    found = with_settings(BASE, "memory_share=0.4 compile=false -- --b 'x y'", "here")
    assert (found.memory_share, found.compile) == (0.4, False)
    assert found.extra_flags == ("--a", "--b", "x y")
    others = {f.name for f in fields(BASE)} - {"memory_share", "compile", "extra_flags"}
    assert all(getattr(found, name) == getattr(BASE, name) for name in others)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("drafter=x", "drafter among"),
        ("port=80 memory_share=0.1", "port among"),
        ("memory_share=2", "less than or equal to 1"),
        ("memory=1", "memory"),
        ("fast", "NAME=VALUE"),
        ("memory_share='0.4", "No closing quotation"),
    ],
)
def test_what_serve_refuses_is_refused_and_named(text, said):
    with pytest.raises(UserError) as error:
        with_settings(BASE, text, "06.vllm_settings")
    assert said in str(error.value) and "06.vllm_settings" in str(error.value)


def test_each_engine_takes_its_own_text():
    cfg = BenchmarkParams(vllm_settings="tensor_parallel=2", sglang_settings="memory_share=0.3")
    vllm, sglang = (engine_config(cfg, Path("t"), e, 3, None) for e in ("vllm", "sglang"))
    assert (vllm.tensor_parallel, sglang.tensor_parallel) == (2, 1)
    assert (vllm.memory_share, sglang.memory_share) == (None, 0.3)


def test_every_setting_of_serve_is_the_servers_the_phases_or_the_engines():
    known = {f.name for f in fields(EngineConfig)}
    server = {"host", "port", "deadline_s", "stall_s", "log"}
    assert set(ServeParams.model_fields) - server <= known


@pytest.mark.parametrize("trusted", [True, False])
def test_a_targets_own_python_files_run_where_the_phase_trusts_them(trusted, monkeypatch):
    """Kimi's tokenizer is such a file; ``engine_settings`` refuses to say so a second time."""
    started = []

    @contextlib.contextmanager
    def server(config, **_):
        started.append(config)
        yield SimpleNamespace(url="http://127.0.0.1:1")

    monkeypatch.setattr("eagle3lib.data.phase.EngineServer", server)
    with target_server(GenerateParams(trust_remote_code=trusted), Path("t"), Path("log")):
        pass
    cfg = BenchmarkParams(trust_remote_code=trusted)
    started.append(engine_config(cfg, Path("t"), "vllm", 3, None))
    assert [config.trust_remote_code for config in started] == [trusted, trusted]
