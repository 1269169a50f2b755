"""An engine's profiler over HTTP: what each engine is told, whole traces, refusals."""

from __future__ import annotations

import json
import threading
import time

import pytest

from eagle3lib.engine import profiler, vllm
from eagle3lib.engine.command import command, environment
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.profiler import start_profiler, stop_profiler
from eagle3lib.lab.errors import UserError


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(profiler, "_POLL_S", 0.02)


@pytest.fixture
def url(httpserver):
    return httpserver.url_for("").rstrip("/")


def test_vllm_is_told_the_folder_and_marks_its_scopes(tmp_path):
    config = EngineConfig(tmp_path, trace_folder=tmp_path / "traces")
    argv = command(config, 1)
    told = json.loads(argv[argv.index("--profiler-config") + 1])
    assert told == {
        "profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces"),
        "torch_profiler_with_stack": False, "ignore_frontend": True,
    }  # fmt: skip
    assert environment(1, config)["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] == "1"
    plain = EngineConfig(tmp_path)
    assert "--profiler-config" not in command(plain, 1)
    assert "VLLM_CUSTOM_SCOPES_FOR_PROFILING" not in environment(1, plain)


def test_the_installed_vllm_takes_what_it_is_told(tmp_path):
    """Its own parser of the flag: another name would end its start after a minute."""
    ProfilerConfig = pytest.importorskip("vllm.config.profiler").ProfilerConfig
    config = EngineConfig(tmp_path, trace_folder=tmp_path / "traces", trace_stacks=True)
    argv = command(config, 1)
    taken = ProfilerConfig(**json.loads(argv[argv.index("--profiler-config") + 1]))
    assert taken.torch_profiler_with_stack and not taken.should_profile_frontend


def test_a_vllm_without_the_flag_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "_knows_argument", lambda python, name: False)
    with pytest.raises(UserError, match="no --profiler-config"):
        command(EngineConfig(tmp_path, trace_folder=tmp_path), 1)


def test_sglang_is_told_with_the_request_and_may_still_write(httpserver, url, tmp_path):
    asked = []

    def keep(request):
        asked.append(request.get_json())

    httpserver.expect_request("/start_profile", method="POST").respond_with_handler(keep)
    httpserver.expect_request("/stop_profile", method="POST").respond_with_data("some time")
    config = EngineConfig(tmp_path, engine="sglang", trace_folder=tmp_path / "traces")
    assert environment(1, config)["SGLANG_TORCH_PROFILER_DIR"] == str(tmp_path / "traces")
    start_profiler(url, config)
    assert asked == [{
        "output_dir": str(tmp_path / "traces"), "activities": ["CPU", "GPU"], "with_stack": False,
        "record_shapes": False,
    }]  # fmt: skip

    def write():
        time.sleep(0.1)
        for rank in (1, 0):
            path = tmp_path / "traces" / f"17-TP-{rank}.trace.json.gz"
            path.parent.mkdir(exist_ok=True)
            for _ in range(4):  # grows while it is looked at
                with path.open("ab") as file:
                    file.write(b"x" * 100)
                time.sleep(0.015)

    writer = threading.Thread(target=write)
    writer.start()
    found = stop_profiler(url, config, 20.0)
    writer.join()
    assert [p.name for p in found] == ["17-TP-0.trace.json.gz", "17-TP-1.trace.json.gz"]
    assert [p.stat().st_size for p in found] == [400, 400]


def test_a_server_without_a_profiler_is_one_message(httpserver, url, tmp_path):
    config = EngineConfig(tmp_path, trace_folder=tmp_path)
    httpserver.expect_request("/start_profile").respond_with_data("Not Found", status=404)
    with pytest.raises(UserError, match="no profiler") as error:
        start_profiler(url, config)
    assert "--profiler-config" in error.value.next


def test_what_its_profiler_says_is_told(httpserver, url, tmp_path):
    config = EngineConfig(tmp_path, trace_folder=tmp_path)
    httpserver.expect_request("/start_profile").respond_with_data("CUPTI in use", status=500)
    with pytest.raises(UserError, match="CUPTI in use"):
        start_profiler(url, config)
    with pytest.raises(UserError, match="does not answer"):
        start_profiler("http://127.0.0.1:1", config)


def test_a_profiler_that_writes_nothing_is_one_message(httpserver, url, tmp_path):
    config = EngineConfig(tmp_path, trace_folder=tmp_path / "traces")
    httpserver.expect_request("/stop_profile").respond_with_data("")
    with pytest.raises(UserError, match="wrote no trace") as error:
        stop_profiler(url, config, 0.2)
    assert str(tmp_path / "traces") in str(error.value)
