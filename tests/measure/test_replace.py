"""May a new drafter replace a deployed one: decided by the interval, not by the value."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.run import run_folder
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE, RequestRow
from eagle3lib.measure.replace import KEEP, REPLACE, UNDECIDED, PairedRounds, decide


def pairs(gain, n=40, noise=0.1, seed=0):
    """Prompts of 20 rounds at about 1 accepted draft a round, the new drafter by ``gain`` more."""
    rng = np.random.default_rng(seed)
    out = []
    for level in rng.normal(1.0, 0.3, n):
        new = 20 * (level + gain + rng.normal(0, noise))
        out.append(PairedRounds(20, round(20 * level), 20, max(0, round(new))))
    return out


@pytest.mark.parametrize(("gain", "decision"), [(0.3, REPLACE), (-0.3, KEEP), (0.0, UNDECIDED)])
def test_the_interval_decides(gain, decision):
    result = decide(pairs(gain))
    assert result.decision == decision
    assert result.low < result.difference < result.high
    assert result.difference == pytest.approx(result.new_length - result.old_length, abs=2e-4)


def test_equal_drafters_replace_each_other_only_where_a_loss_is_allowed():
    assert decide(pairs(0.0)).decision == UNDECIDED
    assert decide(pairs(0.0), allowed_loss=0.2).decision == REPLACE


def test_pairing_by_prompt_sees_what_the_spread_of_prompts_hides():
    """Prompts differ by 0.3, the drafters by 0.1: paired it is certain."""
    result = decide(pairs(0.1, noise=0.03))
    assert result.decision == REPLACE


def test_lengths_are_pooled_over_rounds():
    """vLLM issue 42508: 10 tokens in 10 rounds and 300 in 100; the unweighted mean says 2.0."""
    long, short = PairedRounds(100, 200, 100, 200), PairedRounds(10, 0, 10, 0)
    assert decide([long, short] * 3).old_length == pytest.approx(2.818, abs=1e-3)


def test_few_prompts_decide_nothing():
    with pytest.raises(UserError, match="4 prompts"):
        decide(pairs(0.3, n=4))


def test_prompts_without_rounds_are_not_counted():
    with pytest.raises(UserError, match="0 prompts"):
        decide([PairedRounds(0, 0, 3, 1)] * 9)


def bound(target):
    """The manifest of a run of ``target``."""
    return {"target": {"name": str(target.folder), "fingerprint": target.fingerprint}}


@pytest.fixture
def gate(tmp_path, tiny_target, monkeypatch):
    """``gate(old, new, *words)`` on a run whose benchmark served ``old`` (1 of 3 accepted in each
    round) and the run's own drafter (2 of 3), in 8 prompts twice; the sixteen rows of a ninth, of
    another set, are no part of it."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    phase = run_folder("r") / "06_benchmark_serving"
    inputs = {"params": {"reference_drafter": str(tmp_path)}}
    write_json(run_folder("r") / "manifest.json", bound(tiny_target))
    write_json(phase / "inputs.json", inputs)
    write_json(phase / "metrics.json", {"num_speculative_tokens": 3})

    def row(arm, prompt, repeat, accepted, set_name="workload"):
        rounds = 4 + prompt
        ids = list(range(rounds * (1 + accepted) + 1))
        return RequestRow(arm, set_name, f"p{prompt}", repeat, [1], ids, "length", 1.0,
                          [accepted] * rounds, [3] * rounds)  # fmt: skip

    rows = [row(arm, prompt, repeat, accepted) for prompt in range(8) for repeat in range(2)
            for arm, accepted in ((PLAIN, 0), (REFERENCE, 1), (OWN, 2))]  # fmt: skip
    rows += [row(REFERENCE, 8, i, 3, "general") for i in range(16)]
    (phase / "requests.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))

    def run(old, new, *words):
        target = ["--target", str(tiny_target.folder), "--run", "r"]
        return CliRunner().invoke(app, ["gate", str(old), str(new), "--served", *target, *words])

    run.phase, run.inputs = phase, inputs
    run.own = run_folder("r") / "05_export_drafter" / "drafter"
    return run


def test_served_the_two_arms_of_the_benchmark_decide(gate, tmp_path):
    told = gate(tmp_path, gate.own, "--json")
    result = json.loads(told.stdout)
    assert (told.exit_code, result["decision"], result["prompts"]) == (0, REPLACE, 8)
    assert (result["old_length"], result["new_length"]) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"params": {}}, "had no reference drafter"),
        ({"params": {"reference_drafter": "/other"}}, "did not serve these two"),
    ],
)
def test_a_benchmark_of_something_else_decides_nothing(gate, tmp_path, changes, told):
    write_json(gate.phase / "inputs.json", gate.inputs | changes)
    error = gate(tmp_path, gate.own).exception
    assert isinstance(error, UserError) and told in str(error) and "next:" in str(error)


def test_a_run_of_another_target_decides_nothing(gate, tmp_path):
    write_json(run_folder("r") / "manifest.json", {"target": {"name": "other", "fingerprint": "1"}})
    error = gate(tmp_path, gate.own).exception
    assert isinstance(error, UserError) and "run 'r' belongs to target 'other'" in str(error)
    (run_folder("r") / "manifest.json").unlink()
    assert "there is no run 'r'" in str(gate(tmp_path, gate.own).exception)


def test_served_the_order_of_old_and_new_matters(gate, tmp_path):
    error = gate(gate.own, tmp_path).exception
    assert isinstance(error, UserError) and "did not serve these two" in str(error)


def test_a_drafter_that_was_made_again_is_not_the_one_that_was_served(gate, tmp_path):
    served = {"inputs": {"upstream": {"05_export_drafter": "1"}}}
    write_json(gate.phase / "manifest.json", served)
    export = {"fingerprint": "1", "inputs": {"upstream": {}}}
    write_json(gate.own.parent / "manifest.json", export)
    assert gate(tmp_path, gate.own).exit_code == 0
    write_json(gate.own.parent / "manifest.json", export | {"fingerprint": "2"})
    error = gate(tmp_path, gate.own).exception
    assert isinstance(error, UserError) and "05_export_drafter" in str(error)


@pytest.fixture
def offline(tmp_path, tiny_target, make_row, monkeypatch):
    """``offline(prompts)``: the gate on a run whose held-out answers have these prompts, of a
    target whose token 300 stands for images; ``offline.replayed``: ids of the rows it took."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    config = tiny_target.config | {"image_token_id": 300}
    wrapped = replace(tiny_target, config=config, wrapper="SomethingForConditionalGeneration")
    monkeypatch.setattr("eagle3lib.target.folder.open_target", lambda name: wrapped)

    def replayed(rows, *_, **__):
        run.replayed = [row.id for row in rows]
        return pairs(0.3)[: len(rows)]

    monkeypatch.setattr("eagle3lib.measure.replace_offline.offline_pairs", replayed)

    def run(prompts):
        rows = [make_row(i, ids, [4, 5, 6], split="heldout") for i, ids in enumerate(prompts)]
        phase = run_folder("r") / "01_generate_data"
        phase.mkdir(parents=True)
        write_json(run_folder("r") / "manifest.json", bound(tiny_target))
        (phase / "answers.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
        return CliRunner().invoke(app, ["gate", str(tmp_path), str(tmp_path), "--run", "r",
                                        "--json"])  # fmt: skip

    return run


def test_offline_answers_to_images_are_left_out_and_counted(offline):
    told = offline([[1, 300, 300, 7], *([1, 7 + i] for i in range(5)), [1, 300]])
    assert offline.replayed == [f"row-{i:02d}" for i in range(1, 6)]
    assert json.loads(told.stdout)["prompts"] == 5
    assert "left out: 2 of 7 answers, whose prompts show images" in told.stderr


def test_offline_answers_to_images_alone_decide_nothing(offline):
    error = offline([[1, 300], [1, 300, 9]]).exception
    assert isinstance(error, UserError)
    assert "no held-out answers to text alone" in str(error)
