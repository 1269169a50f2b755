"""Starting an engine: ready, or a ``UserError`` that explains, and never a process left over."""

import json
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from eagle3lib.engine import vllm
from eagle3lib.engine.client import Client, parse_speculation_counters
from eagle3lib.engine.vllm import EngineConfig, VllmServer, free_port, startup_phase
from eagle3lib.lab import child
from eagle3lib.lab.errors import UserError

# Stands in for ``python -m vllm.entrypoints.openai.api_server``. What it does is the target's name;
# it writes its process id first, and a helper's, as an engine's workers are processes of their own.
FAKE_ENGINE = """
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
flags = dict(zip(sys.argv, sys.argv[1:]))
target = Path(flags["--model"])
helper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
target.with_name("pids").write_text(f"{os.getpid()} {helper.pid}")
print("Initializing a V1 LLM engine (v0.32.0) with config: ...", flush=True)
if target.name == "dies":
    print("Starting to load model ...", flush=True)
    print("ValueError: architecture FooForCausalLM is not supported", file=sys.stderr, flush=True)
    sys.exit(3)
if target.name == "hangs":
    time.sleep(1000)
class Handler(BaseHTTPRequestHandler):
    asked = 0
    def log_message(self, *_):
        pass
    def do_GET(self):  # 503 once: a port that is open is not yet an engine that is ready
        Handler.asked += 1
        self.send_response(200 if Handler.asked > 1 else 503)
        self.end_headers()
HTTPServer((flags["--host"], int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start the fake engine on a target of that name."""
    script, python = tmp_path / "engine.py", tmp_path / "python"
    script.write_text(FAKE_ENGINE)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    # The engine's module alone: the supervisor must still run under the real interpreter.
    stub = SimpleNamespace(executable=str(python), prefix=str(tmp_path))
    monkeypatch.setattr(vllm, "sys", stub)
    monkeypatch.setattr(vllm, "check_installed", lambda: None)
    monkeypatch.setattr(vllm, "_metadata_shim", lambda: "")
    monkeypatch.setattr(child, "STOP_DEADLINE_S", 4.0)

    def start(name, **options):
        config = EngineConfig(tmp_path / name, threads=1)
        return VllmServer(config, log=tmp_path / "logs" / "vllm.log", **options)

    return start


def gone(folder):
    """Whether the fake engine and its helper have ended; zombies that nobody reaped have."""
    for pid in (folder / "pids").read_text().split():
        try:
            if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            continue
    return True


def test_a_server_is_ready_once_it_says_so_and_gone_after_the_block(start, tmp_path, capsys):
    with start("works") as server:
        assert server.url.endswith(str(server.port)) and server.port > 0
        assert vllm._healthy(server.url) and not gone(tmp_path)
    assert gone(tmp_path) and not vllm._healthy(server.url)
    shown = capsys.readouterr().out
    assert "starting the engine" in shown and "ready after" in shown


def test_an_engine_that_dies_while_loading_is_explained_by_its_last_lines(start, tmp_path):
    with pytest.raises(UserError) as caught:
        start("dies").start()
    text = str(caught.value)
    assert "exit code 3" in text and "loading weights" in text
    assert "ValueError: architecture FooForCausalLM is not supported" in text
    assert "vllm.log" in text and "next:" in text
    assert gone(tmp_path)


def test_an_engine_that_never_gets_ready_is_stopped_at_the_deadline(start, tmp_path):
    before = time.monotonic()
    server = start("hangs", deadline_s=1.5)
    with pytest.raises(UserError, match=r"not ready in time(?s:.)*Initializing a V1"):
        server.start()
    assert 1.5 <= time.monotonic() - before < 20
    assert gone(tmp_path)
    server.stop()  # again: nothing to do, no error


def test_an_interrupted_start_leaves_no_process(start, tmp_path, monkeypatch):
    """Ctrl-C, or the notebook's stop button, while the weights load."""
    sleep = time.sleep

    def interrupt(seconds):
        if (tmp_path / "pids").exists():
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(vllm, "time", SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    with pytest.raises(KeyboardInterrupt):
        start("hangs").start()
    assert gone(tmp_path)


def test_the_log_of_the_start_before_is_not_taken_for_this_one(start, tmp_path):
    log = tmp_path / "logs" / "vllm.log"
    log.parent.mkdir()
    log.write_text("Application startup complete\nold error\n")
    with pytest.raises(UserError) as caught:
        start("dies").start()
    assert "old error" not in str(caught.value) and "loading weights" in str(caught.value)


def test_a_taken_port_is_a_user_error_that_names_it(start, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port} (?s:.)*next:"):
            start("works", port=port).start()
    assert not (tmp_path / "pids").exists()  # nothing was started
    assert free_port(port) == port
    assert free_port() > 0


def test_a_missing_vllm_is_a_user_error_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm.importlib.util, "find_spec", lambda name: None)
    server = VllmServer(EngineConfig(tmp_path), log=tmp_path / "log")
    with pytest.raises(UserError, match=r"vLLM is not installed(?s:.)*next:"):
        server.start()
    assert not (tmp_path / "log").exists()


LOG = [
    ("", "importing"),
    ("INFO 01-01 [core.py:134] Initializing a V1 LLM engine (v0.32.0) with config: model='x'",
     "starting the engine"),
    ("INFO [cpu_model_runner.py:68] Starting to load model /x...", "loading weights"),
    ("Loading safetensors checkpoint shards: 100% Completed | 1/1", "loading weights"),
    ("INFO [cpu_model_runner.py:75] Loading drafter model...", "loading weights"),
    ("INFO [default_loader.py:502] Loading weights took 0.25 seconds", "weights loaded"),
    ("INFO [kv_cache_utils.py:2328] GPU KV cache size: 23,296 tokens", "warming up"),
    ("INFO [core.py:403] init engine (profile, create kv cache, warmup model) took 4.05 s",
     "warming up"),
    ("INFO [launcher.py:38] Available routes are:", "opening the port"),
    ("INFO:     Application startup complete.", "ready"),
]  # fmt: skip


def test_the_phase_of_a_start_is_read_from_the_log_and_only_moves_forward(tmp_path):
    log = tmp_path / "vllm.log"
    assert startup_phase(log) == "importing"
    text = ""
    for line, phase in LOG:
        text += line + "\n"
        log.write_text(text)
        assert startup_phase(log) == phase
    log.write_text(text + "Starting to load model again, in a worker that came late \xff\n")
    assert startup_phase(log) == "ready"
    log.write_bytes(b"\xff\xfe broken bytes\n" + LOG[1][0].encode())
    assert startup_phase(log) == "starting the engine"


def test_two_arms_differ_in_the_flags_of_speculation_alone():
    plain = EngineConfig(Path("/t"), max_model_len=77, extra_flags=("--swap-space", "0"))
    arms = [
        EngineConfig(Path("/t"), max_model_len=77, extra_flags=("--swap-space", "0"),
                     drafter=Path(name), num_speculative_tokens=k)
        for name, k in (("/a", 3), ("/b", 5))
    ]  # fmt: skip
    speculation = ("--speculative-config", "--per-request-spec-decode-metrics")
    for arm in arms:
        flags = arm.flags()
        config = json.loads(flags[flags.index("--speculative-config") + 1])
        assert config == {
            "method": "eagle3",
            "model": str(arm.drafter),
            "num_speculative_tokens": arm.num_speculative_tokens,
        }
        for flag in speculation:
            at = flags.index(flag)
            del flags[at : at + 2]
        assert flags == plain.flags()
    assert not set(speculation) & set(plain.flags())


def test_the_fair_conditions_of_a_measurement_are_in_the_flags():
    flags = EngineConfig(Path("/t")).flags()
    assert "--no-enable-prefix-caching" in flags and "--enforce-eager" in flags
    assert flags[flags.index("--generation-config") + 1] == "vllm"
    assert "--enforce-eager" not in EngineConfig(Path("/t"), compile=True).flags()


def test_an_engines_environment_adds_to_ours_and_local_targets_need_no_network(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    env = vllm.engine_env(2, EngineConfig(tmp_path))
    assert env["OMP_NUM_THREADS"] == "2" and env["HF_HUB_OFFLINE"] == "1"
    assert env["PYTHONPATH"].split(":")[-1] == "/ours"
    assert "HF_HUB_OFFLINE" not in vllm.engine_env(2, EngineConfig(Path("org/model")))


# As vLLM writes it: every counter has a `_created` twin, a gauge that holds a time, and every
# engine (data parallelism) has its own samples.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="target"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="target"} 5.0
# HELP vllm:spec_decode_num_drafts_created Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="target"} 1.7e+09
vllm:spec_decode_num_drafts_created{engine="1",model_name="target"} 1.7e+09
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="target"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="target"} 10.0
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="target"} 9.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="target"} 4.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="target",position="1"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="0"} 3.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="target",position="1"} 1.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_created Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_created gauge
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",position="0"} 1.7e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="target"} 3.0
"""


def test_counters_are_summed_over_engines_and_their_created_twins_left_out(httpserver):
    counts = parse_speculation_counters(METRICS)
    assert counts == {
        "drafts": 15, "draft_tokens": 30, "accepted_tokens": 13,
        "accepted_at_0": 9, "accepted_at_1": 4,
    }  # fmt: skip
    at = [counts[f"accepted_at_{i}"] for i in range(2)]
    assert sum(at) == counts["accepted_tokens"] and at == sorted(at, reverse=True)
    httpserver.expect_request("/metrics").respond_with_data(METRICS)
    assert Client(httpserver.url_for("/")).speculation_counters() == counts


def test_an_engine_without_speculation_has_no_counters():
    assert parse_speculation_counters("") == {}
    only = METRICS[METRICS.index("# HELP vllm:num_requests") :]
    assert parse_speculation_counters(only) == {}


def reply(**more):
    choice = {"index": 0, "finish_reason": "stop", "token_ids": [7, 8, 9],
              "message": {"role": "assistant", "content": "x"}}  # fmt: skip
    return {"id": "1", "object": "chat.completion", "created": 0, "model": "target",
            "choices": [choice], "prompt_token_ids": [1, 2], **more}  # fmt: skip


@pytest.mark.parametrize("metrics", [None, {}, {"speculative_decoding": None}])
def test_an_answer_without_an_engines_record_has_no_rounds(httpserver, metrics):
    httpserver.expect_request("/v1/chat/completions").respond_with_json(reply(metrics=metrics))
    answer = Client(httpserver.url_for("/")).chat([], max_tokens=3, temperature=0)
    assert answer.rounds is None
    assert (answer.prompt_token_ids, answer.answer_token_ids) == ([1, 2], [7, 8, 9])


def test_an_engines_record_of_rounds_is_read(httpserver):
    record = {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 3, 2]}
    body = reply(metrics={"speculative_decoding": record})
    httpserver.expect_request("/v1/chat/completions").respond_with_json(body)
    answer = Client(httpserver.url_for("/")).chat([], max_tokens=3, temperature=0)
    assert (answer.rounds.accepted, answer.rounds.drafted) == ([2, 0, 1], [3, 3, 2])


@pytest.mark.parametrize(("served", "used"), [(["target"], "target"), (["a", "b"], "a"),
                                              (["a", "target"], "target")])  # fmt: skip
def test_our_own_name_is_asked_for_when_it_is_served_else_the_first(httpserver, served, used):
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in served]
    httpserver.expect_request("/v1/models").respond_with_json({"object": "list", "data": data})
    assert Client(httpserver.url_for("/")).model() == used


@pytest.mark.parametrize("status", [404, 500])
def test_an_address_that_serves_no_models_is_a_user_error(httpserver, status):
    httpserver.expect_request("/v1/models").respond_with_data("no", status=status)
    with pytest.raises(UserError, match="next:"):
        Client(httpserver.url_for("/"), retries=0).model()
