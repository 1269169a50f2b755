"""Servers on file: shown and ended are those that this project started, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from eagle3lib import cli
from eagle3lib.engine.health import LoadWatch, canary, check_serving, counters
from eagle3lib.engine.servers import (
    ServerState,
    process_start,
    running_servers,
    servers_folder,
    stop_server,
    write_state,
)
from eagle3lib.lab.errors import UserError

DETACH = """
import sys
from pathlib import Path
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
folder = Path(sys.argv[1])
config = EngineConfig(folder / sys.argv[2], threads=1)
EngineServer(config, log=folder / "log", detached=sys.argv[3] == "detached").start()
"""


@pytest.fixture
def start(stub, tmp_path):
    """Start a server in a process of its own that ends at once."""

    def start(kind, name="works"):
        subprocess.run([sys.executable, "-c", DETACH, str(tmp_path), name, kind], check=True)

    return start


def eventually(law, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not law() and time.monotonic() < end:
        time.sleep(0.1)
    return law()


def test_a_detached_server_outlives_its_owner_and_an_attached_one_does_not(start, gone):
    start("detached")
    (state,) = running_servers()
    assert not gone() and state.condition() == "ready" and check_serving(state.address, "x") == []
    assert state.detached and state.engine_version == "9.9" and "serve" in state.command
    stop_server(state)
    assert gone() and running_servers() == []
    start("attached")
    assert eventually(gone) and eventually(lambda: running_servers() == [])


@pytest.mark.parametrize("name", ["works", "stubborn"])
def test_an_engine_whose_supervisor_was_killed_is_still_found_and_ended(start, gone, name):
    start("detached", name)
    (state,) = running_servers()
    state.supervisor().kill()
    assert eventually(lambda: state.supervisor() is None) and not gone()
    assert [s.id for s in running_servers()] == [state.id]
    if name == "stubborn":  # shorter than its patience with an engine that ignores SIGTERM
        monkey = pytest.MonkeyPatch()
        monkey.setattr("eagle3lib.engine.servers.STOP_DEADLINE_S", 2.0)
    stop_server(state)
    assert gone()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A state file that names this very process."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    return ServerState(
        "vllm-1", "vllm", "9.9", os.getpid(), process_start(os.getpid()), "http://127.0.0.1:1",
        ["x"], "/t", None, str(tmp_path / "log"), True, "target",
    )  # fmt: skip


def test_a_process_that_took_over_an_id_is_neither_shown_nor_ended(mine):
    write_state(mine)
    assert running_servers() == [mine]
    reused = replace(mine, start_time=mine.start_time - 60, pgid=os.getpid(), pgid_start_time=1.0)
    write_state(reused)
    assert running_servers() == [] and not (servers_folder() / "vllm-1.json").exists()
    stop_server(reused)  # would have ended these tests
    assert psutil.Process().is_running()


def test_a_state_file_that_is_none_is_named(mine):
    write_state(mine)
    (servers_folder() / "vllm-1.json").write_text('{"id": 1}')
    with pytest.raises(UserError, match=r"vllm-1\.json"):
        running_servers()


def test_state_is_written_whole(mine):
    write_state(mine)
    (path,) = servers_folder().iterdir()  # no temporary file is left
    assert ServerState(**json.loads(path.read_text())) == mine


@pytest.fixture
def eagle3(monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eagle3", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out + err

    return run


def test_serve_ps_and_stop_from_the_command_line(stub, gone, eagle3, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3lib.cli_serve._folder", lambda name: tmp_path / name)
    stub("works")
    code, shown = eagle3("serve", "works", "max_model_len=77", "--detach", "--", "--swap-space=0")
    assert code == 0 and "serves 'target' at http://127.0.0.1:" in shown
    (state,) = running_servers()
    assert {"77", "--swap-space=0"} <= set(state.command)
    code, shown = eagle3("ps")
    assert state.id in shown and "ready" in shown and "detached" in shown
    assert eagle3("stop", "vllm-0")[0] == 2 and not gone()
    code, shown = eagle3("stop", "--all")
    assert code == 0 and f"{state.id} stopped" in shown and gone()
    assert "no server" in eagle3("ps")[1]


ATTACHED = """
import sys
from pathlib import Path
from eagle3lib import cli, cli_serve
folder = Path(sys.argv[1])
cli_serve._folder = lambda name: folder / name
sys.argv = ["eagle3", "serve", *sys.argv[2:]]
cli.main()
"""


@pytest.mark.parametrize(("words", "ends"), [(["works"], True),
                         (["silent", "--detach"], False)], ids=str)  # fmt: skip
def test_ctrl_c_ends_an_attached_server_and_leaves_a_detached_one_loading(
    stub, gone, tmp_path, words, ends
):
    stub(words[0])
    command = [sys.executable, "-c", ATTACHED, str(tmp_path), *words, "--no-preflight"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as owner:  # fmt: skip
        wanted = "ready" if words == ["works"] else "starting the engine"
        assert eventually(lambda: [s for s in running_servers() if s.pgid
                                   and s.condition() == wanted], 60)  # fmt: skip
        time.sleep(0.5)  # the owner looks twice a second
        owner.send_signal(signal.SIGINT)
        shown, _ = owner.communicate(timeout=60)
    assert "Traceback" not in shown
    assert gone() == ends and bool(running_servers()) == (not ends)
    if not ends:
        (state,) = running_servers()
        assert f"{state.id} goes on loading" in shown
        stop_server(state)
        assert gone()


MISTAKES = [
    (["serve", "works", "tensor_paralel=2"], "tensor_paralel"),
    (["serve", "works", "fast"], "'fast' is not NAME=VALUE"),
    (["serve", "works", "max_model_len=0"], "max_model_len"),
    (["serve", "works", "host=0.0.0.0"], "without an API key"),
    (["serve", "works", "topk=4", "drafter=/d"], "vLLM drafts chains"),
    (["serve", "works", "engine=sglang"], "EAGLE3_SGLANG_PYTHON"),
    (["serve", "/no/such/target"], "no target"),
    (["stop"], "which server?"),
    (["stop", "vllm-7"], "no server 'vllm-7'"),
]


@pytest.mark.parametrize(("words", "told"), MISTAKES, ids=lambda v: " ".join(v)[:40])
def test_a_mistake_is_one_message_and_starts_nothing(
    stub, eagle3, tmp_path, monkeypatch, words, told
):
    stub("works")
    monkeypatch.delenv("EAGLE3_SGLANG_PYTHON")
    if words[1:2] == ["works"]:
        monkeypatch.setattr("eagle3lib.cli_serve._folder", lambda name: tmp_path / name)
    code, shown = eagle3(*words)
    assert code == 2 and told in shown and "Traceback" not in shown
    assert not (tmp_path / "pids").exists()


METRICS = """\
# TYPE {0}:generation_tokens_total counter
{0}:generation_tokens_total{{engine="0"}} {1}
# TYPE {2} gauge
{2}{{engine="0"}} {3}
"""


@pytest.mark.parametrize(("engine", "gauge"), [("vllm", "vllm:num_requests_running"),
                                              ("sglang", "sglang:num_running_reqs")])  # fmt: skip
def test_requests_that_run_without_a_token_are_a_stall(httpserver, engine, gauge):
    def tell(tokens, running):
        httpserver.clear()
        text = METRICS.format(engine, tokens, gauge, running)
        httpserver.expect_request("/metrics").respond_with_data(text)

    tell(10, 2)
    url = httpserver.url_for("").rstrip("/")
    watch = LoadWatch(url, stall_s=0.0)
    assert counters(url) == {"tokens": 10, "running": 2}
    assert watch.check() == []  # the first look only remembers
    (finding,) = watch.check()
    assert finding.code == "server_stalled" and "2 requests" in finding.title
    tell(11, 2)
    assert watch.check() == []
    tell(11, 0)
    assert watch.check() == []  # nobody waits for a token


def test_a_server_is_told_apart_by_what_it_does(httpserver):
    url = httpserver.url_for("").rstrip("/")
    assert check_serving("http://127.0.0.1:1", "x")[0].code == "server_unreachable"
    httpserver.expect_request("/health").respond_with_data("")
    body = {"usage": {"completion_tokens": 0}}
    httpserver.expect_request("/v1/completions").respond_with_json(body)
    (finding,) = check_serving(url, "x")
    assert finding.code == "server_mute" and "without tokens" in finding.evidence
    httpserver.clear()
    httpserver.expect_request("/v1/completions").respond_with_data("<html>")
    assert "not a completion" in canary(url, "x")
    httpserver.clear()
    httpserver.expect_request("/v1/completions").respond_with_data("busy", status=503)
    assert canary(url, "x") == "HTTP 503: busy"
