"""``eagle3 serve --detach``, ``ps`` and ``stop`` with the real vLLM on the CPU."""

import os
import subprocess
import sys

import pytest
import torch

from eagle3lib.engine.client import Client
from eagle3lib.engine.health import check_serving, counters, healthy
from eagle3lib.engine.servers import running_servers
from eagle3lib.target.folder import open_target
from eagle3lib.target.model import load_target
from eagle3lib.target.smollm2 import NAME


def _greedy(prompt, most):
    """What the target itself says. In float32: near-ties of bfloat16 are decided by the order of
    sums, which is the machine's and the engine's."""
    model = load_target(open_target(NAME), "float32")
    ids = torch.tensor([prompt])
    return model.generate(ids, max_new_tokens=most, do_sample=False)[0, len(prompt) :].tolist()


@pytest.mark.engine
def test_a_detached_server_outlives_its_command_answers_and_ends_when_told(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    monkeypatch.delenv("EAGLE3_VLLM_PYTHON", raising=False)

    def eagle3(*words):
        command = [sys.executable, "-m", "eagle3lib.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    try:
        shown = eagle3(
            "serve", NAME, "compile=false", "max_model_len=512", "dtype=float32", "--detach",
            "--no-preflight",
        )  # fmt: skip
        # "loading weights" or, where that took no half second, "weights loaded".
        assert "weights" in shown and "ready" in shown and "eagle3 stop" in shown
        (state,) = running_servers()
        assert state.engine_version and state.detached and state.pgid
        listed = eagle3("ps")
        assert state.id in listed and "ready" in listed
        assert check_serving(state.address, state.model) == []
        client = Client(state.address)
        asked = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat(asked, model=client.model(), max_tokens=16, temperature=0)
        assert answer.answer_token_ids == _greedy(answer.prompt_token_ids, 16) and answer.text
        ended = answer.answer_token_ids[-1] in open_target(NAME).stop_ids()
        assert answer.finish_reason == ("stop" if ended else "length")
        # The canaries of start and check, and this answer, by the names that the watch reads.
        assert counters(state.address)["tokens"] >= len(answer.answer_token_ids) + 8
    finally:
        for left in running_servers():
            assert "stopped" in eagle3("stop", left.id)
    assert running_servers() == [] and not healthy(state.address)
