"""Starting an engine: ready, or a ``UserError`` that explains, and never a process left over."""

import json
import socket
import time
from types import SimpleNamespace

import pytest

from eagle3lib.engine import launch, servers
from eagle3lib.engine.failures import (
    CAPTURE,
    CHECKPOINT,
    COLLECTIVE,
    DIED,
    HANG,
    KERNEL,
    MEMORY,
    MUTE,
    PORT,
    EngineFailure,
)
from eagle3lib.engine.health import canary, healthy
from eagle3lib.engine.ports import free_port
from eagle3lib.lab.errors import UserError


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_is_ready_once_it_makes_tokens_and_gone_after_the_block(
    stub, gone, capsys, engine
):
    with stub("works", engine=engine) as server:
        assert server.url.endswith(str(server.port)) and server.port > 0
        assert healthy(server.url) and not gone()
        assert server.version == "9.9" and server.look() is None
        assert [s.id for s in servers.running_servers()] == [server.state.id]
    assert gone() and not healthy(server.url) and not servers.running_servers()
    shown = capsys.readouterr().out
    assert f"{engine} ready after" in shown


DEATHS = [
    ("dies-importing", DIED, "importing"),
    ("kernel", KERNEL, "importing"),
    ("collective", COLLECTIVE, "starting the engine"),
    ("checkpoint", CHECKPOINT, "loading weights"),
    ("dies-loading", DIED, "loading weights"),
    ("oom", MEMORY, "weights loaded"),
    ("killed", MEMORY, "capturing graphs"),
    ("dies-capturing", CAPTURE, "capturing graphs"),
    ("port", PORT, "capturing graphs"),
]


@pytest.mark.parametrize(("name", "kind", "phase"), DEATHS, ids=lambda v: v)
def test_a_death_in_each_phase_has_its_class_phase_and_last_lines(stub, gone, name, kind, phase):
    with pytest.raises(EngineFailure) as caught:
        stub(name, compile=True).start()
    failure, text = caught.value.failure, str(caught.value)
    assert (failure.kind, failure.phase) == (kind, phase)
    assert "died (exit code" in text and "engine.log" in text and "next:" in text
    assert failure.last_lines in text
    assert gone() and not servers.running_servers()


def test_a_slow_loader_is_no_hang_and_shows_its_count(stub, monkeypatch, capsys):
    monkeypatch.setattr(launch, "_SAY_AGAIN_S", 0.5)
    with stub("slow", stall_s=2.0) as server:
        assert server.ready_after_s > 2.5
    shown = capsys.readouterr().out
    assert "loading weights" in shown and "/4 (1.00it/s) about" in shown


def test_a_loader_that_works_without_a_word_is_no_hang(stub):
    with stub("busy", stall_s=1.5) as server:
        assert server.ready_after_s > 2


@pytest.mark.parametrize(("name", "kind"), [("silent", HANG), ("hangs-capturing", CAPTURE)])
def test_a_silent_hang_ends_early_with_what_its_processes_wait_for(stub, gone, name, kind):
    before = time.monotonic()
    with pytest.raises(EngineFailure) as caught:
        stub(name, compile=True, stall_s=1.0, deadline_s=300).start()
    assert time.monotonic() - before < 60
    failure = caught.value.failure
    assert failure.kind == kind and "no log, no CPU, no GPU and no disk" in failure.what
    # Engine and helper, each with a stack or with what it waits for.
    assert failure.stacks.count("process ") >= 2 and failure.stacks in str(caught.value)
    assert gone()


def test_ranks_that_wait_for_each_other_before_the_weights_are_a_collective(stub):
    with pytest.raises(EngineFailure) as caught:
        stub("silent", stall_s=1.0, tensor_parallel=2).start()
    assert caught.value.failure.kind == COLLECTIVE and "P2P" in str(caught.value)


def test_stacks_say_that_a_hang_is_a_collective(stub, tmp_path, monkeypatch):
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "$@"\necho "    all_reduce (torch/distributed/c10d.py:28)"\n')
    spy.chmod(0o755)
    with pytest.raises(EngineFailure) as caught:  # py-spy is looked for beside the interpreter
        stub("silent", stall_s=1.0).start()
    pid = (tmp_path / "pids").read_text().split()[0]
    assert caught.value.failure.kind == COLLECTIVE
    assert f"dump --pid {pid}" in caught.value.failure.stacks


def test_an_engine_that_never_gets_ready_is_stopped_at_the_deadline(stub, gone):
    before = time.monotonic()
    server = stub("silent", deadline_s=1.5)
    with pytest.raises(UserError, match=r"not ready in time(?s:.)*Initializing a V1"):
        server.start()
    assert 1.5 <= time.monotonic() - before < 60
    assert gone()
    server.stop()  # again: nothing to do, no error


def test_health_without_tokens_is_a_hang_too(stub, gone):
    with pytest.raises(EngineFailure, match="answers /health and makes no tokens") as caught:
        stub("mute", canary_s=1.0).start()
    assert caught.value.failure.kind == MUTE and "process" in caught.value.failure.stacks
    assert gone()


def test_a_canary_that_waits_behind_requests_that_get_on_is_no_hang(stub, monkeypatch):
    told = iter([{"tokens": 5, "running": 9}, {"tokens": 6, "running": 9}] * 2)
    with stub("works") as server:
        monkeypatch.setattr(launch, "canary", lambda *_: "no token in 1 s")
        monkeypatch.setattr(launch, "counters", lambda url: next(told))
        assert server.look() is None
        monkeypatch.setattr(launch, "counters", lambda url: {"tokens": 5, "running": 9})
        assert server.look().kind == MUTE
        monkeypatch.setattr(launch, "counters", lambda url: None)  # it tells no counters
        assert server.look().kind == MUTE


def test_an_engine_that_dies_in_service_is_told_with_its_exit_code(stub, gone):
    with stub("works") as server:
        server.state.engine_process().kill()
        server._child.wait(20)
        failure = server.look()
        assert failure.phase == "ready" and "in service" in failure.what


def test_garbage_in_the_log_is_no_progress_and_no_error(stub, gone, capsys):
    with stub("garbage"):
        pass
    assert "9/0" not in capsys.readouterr().out and gone()


def test_an_engine_that_ignores_sigterm_is_ended_all_the_same(stub, gone):
    with stub("stubborn"):
        assert not gone()
    assert gone()


def test_fallback_tries_what_the_class_suggests_and_records_what_worked(stub, gone, tmp_path):
    with stub("hangs-capturing", compile=True, stall_s=1.0, fallback=True) as server:
        tried = [(a["setting"], a["worked"], a["class"]) for a in server.attempts]
        assert tried == [("as asked", False, CAPTURE), ("eager", True, None)]
        assert not server.config.compile
        assert servers.running_servers()[0].attempts == server.attempts
        kept = json.loads((tmp_path / "logs" / "engine.attempts.json").read_text())
        assert kept == server.attempts
        # Each attempt has its log: the hang can still be read.
        assert "Capturing CUDA graphs" in (tmp_path / "logs" / "engine.log").read_text()
        assert "startup complete" in (tmp_path / "logs" / "engine-1.log").read_text()
    assert gone()


def test_fallback_gives_up_with_the_last_error_when_nothing_helps(stub, gone):
    server = stub("oom", max_num_seqs=4, fallback=True)
    with pytest.raises(EngineFailure) as caught:
        server.start()
    assert caught.value.failure.kind == MEMORY
    assert [a["setting"] for a in server.attempts] == [
        "as asked", "memory share 0.80", "half the requests at once",
    ]  # fmt: skip
    assert not any(a["worked"] for a in server.attempts) and gone()


def test_an_interrupted_start_leaves_no_process(stub, gone, tmp_path, monkeypatch):
    """Ctrl-C, or the notebook's stop button, while the weights load."""
    sleep = time.sleep

    def interrupt(seconds):
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        stub("silent").start()
    assert gone() and not servers.running_servers()


def test_the_log_of_the_start_before_is_not_taken_for_this_one(stub, tmp_path):
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text("Application startup complete\nCUDA out of memory\n")
    with pytest.raises(EngineFailure) as caught:
        stub("dies-loading").start()
    assert (caught.value.failure.kind, caught.value.failure.phase) == (DIED, "loading weights")


def test_a_taken_port_is_a_user_error_that_names_its_holder(stub, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} (?s:.)*process \d+(?s:.)*next:"):
            stub("works", port=port).start()
    assert not (tmp_path / "pids").exists()  # nothing was started
    assert free_port(port) == port
    assert free_port() > 0


def test_a_missing_engine_is_a_user_error_before_anything_starts(stub, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_SGLANG_PYTHON", "/no/python")
    with pytest.raises(UserError, match=r"EAGLE3_SGLANG_PYTHON(?s:.)*next:"):
        stub("works", engine="sglang").start()
    none = tmp_path / "none"
    none.write_text("#!/bin/sh\necho version missing\n")
    none.chmod(0o755)
    monkeypatch.setenv("EAGLE3_VLLM_PYTHON", str(none))
    with pytest.raises(UserError, match=r"vllm is not installed(?s:.)*next:"):
        stub("works").start()
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_key_is_asked_for_and_never_shown(stub, engine):
    with stub("works", engine=engine, api_key="s3cret") as server:
        assert "401" in canary(server.url, "target")
        assert "s3cret" not in str(servers.running_servers())
