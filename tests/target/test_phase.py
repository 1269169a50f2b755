"""Phase 02 from its parameters: which source is opened, and what is proven of the result."""

import json
from dataclasses import asdict

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import CaptureParams
from eagle3lib.lab.run import Phase
from eagle3lib.target import phase as phase_02
from eagle3lib.target.capture import InProcess, sampled_from
from eagle3lib.target.states import StateStore


@pytest.fixture
def run(tiny_target, tiny_rows, tmp_path, monkeypatch):
    """``run(**parameters)``: a phase 02 whose phase 01 holds the tiny rows."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    upstream = tmp_path / "r" / "01_generate_data"
    upstream.mkdir(parents=True)
    lines = [json.dumps(asdict(row)) for row in tiny_rows]
    (upstream / "answers.jsonl").write_text("\n".join(lines) + "\n")
    inputs = {"inputs": {"params": {"temperature": 0}}}
    (upstream / "manifest.json").write_text(json.dumps(inputs))

    def make(**parameters):
        cfg = CaptureParams(run="r", target=str(tiny_target.folder), dtype="float32", shard_rows=5,
                            **parameters)  # fmt: skip
        phase = Phase(params=cfg, inputs={})
        phase.folder.mkdir(exist_ok=True)
        return phase, cfg

    return make


def test_healthy_states_are_proven(run, tiny_target):
    phase, cfg = run(device="cpu")
    phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
    store = StateStore(phase.folder / "states")
    table, findings = phase_02.prove_states(store, phase, cfg, tiny_target)
    assert findings == []
    assert table.agree.sum() == table["answer tokens"].sum() > 0
    assert table.conversations.tolist() == [5, 5, 2]


def test_of_live_states_a_sample_is_proven(run, tiny_target, tiny_rows, monkeypatch):
    """Two of each split and set, the longest among them; it says what it is a sample of."""
    monkeypatch.setattr(phase_02, "PROOF_ROWS", 2)
    phase, cfg = run(device="cpu", states="live")
    result = phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
    store = StateStore(phase.folder / "states")
    assert (result.conversations, sampled_from(store.folder)) == (5, len(tiny_rows))
    for split, name in (("train", "workload"), ("heldout", "workload"), ("heldout", "general")):
        lengths = [len(r.prompt_token_ids + r.answer_token_ids) for r in tiny_rows
                   if (r.split, r.set) == (split, name)]  # fmt: skip
        stored = [e.tokens for e in store.select(split=split, set=name)]
        assert max(lengths) == max(stored) and len(stored) == min(2, len(lengths))
    table, findings = phase_02.prove_states(store, phase, cfg, tiny_target)
    assert findings == [] and table.agree.sum() == table["answer tokens"].sum() > 0


def test_wrong_layers_are_found_without_a_word_of_the_index(run, tiny_target, monkeypatch):
    class Shifted(InProcess):
        def __enter__(self):
            self.slots = tuple(slot + 1 for slot in self.slots)
            return super().__enter__()

    monkeypatch.setattr(phase_02, "InProcess", Shifted)
    phase, cfg = run(device="cpu")
    phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
    store = StateStore(phase.folder / "states")
    _, [finding] = phase_02.prove_states(store, phase, cfg, tiny_target)
    assert "output-of-layer ids, shifted by one" in finding.title


def test_a_target_larger_than_memory_leaves_the_layer_check_out(run, tiny_target, monkeypatch):
    phase, cfg = run(device="cpu")
    phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
    store = StateStore(phase.folder / "states")
    monkeypatch.setattr(phase_02, "describe_machine", lambda _: {"memory_available_bytes": 1000})
    _, [finding] = phase_02.prove_states(store, phase, cfg, tiny_target)
    assert (finding.code, finding.severity) == ("state-layers-unproven", "warning")


@pytest.mark.parametrize(("source", "opened"), [("vllm", "FromVllm"), ("sglang", "FromSglang")])
def test_an_engine_is_opened_for_its_source(
    run, tiny_target, tiny_rows, monkeypatch, source, opened
):
    class Engine(InProcess):
        """Stands in for the server: what it is asked for is what counts."""

        def __init__(self, target, slots, dtype, work, max_model_len, extra_flags, settings, say):
            longest = max(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in tiny_rows)
            assert (work.name, max_model_len) == ("logs", longest + 1)
            assert extra_flags == ("--trust-remote-code",)
            super().__init__(target, slots, dtype, 64)

    monkeypatch.setattr(phase_02, opened, Engine)
    phase, cfg = run(source=source, trust_remote_code=True)
    result = phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
    assert result.captured_tokens == result.tokens > 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one here")
def test_a_device_that_is_not_there(run, tiny_target):
    phase, cfg = run(device="cuda")
    with pytest.raises(UserError, match="no device 'cuda' here"):
        phase_02.capture_answers(phase, cfg, tiny_target, (2, 5, 7))
