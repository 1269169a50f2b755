"""Phase 04: training runs as a child process; the notebook watches its metrics."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

from eagle3lib.drafter.model import Drafter
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.machine import free_cores
from eagle3lib.lab.params import PHASES, TrainParams
from eagle3lib.lab.run import Phase
from eagle3lib.target.folder import Target
from eagle3lib.training.checkpoints import Folders, has_checkpoint
from eagle3lib.training.start import trained_drafter

Rows = list[dict[str, Any]]
_POLL_S = 1.0


def job_folders(phase: Phase) -> Folders:
    return Folders(
        phase=phase.folder,
        states=phase.of("02_capture_hidden_states") / "states",
        vocab=phase.of("03_build_vocab_map") / "vocab_map.safetensors",
        answers=phase.of("01_generate_data"),
    )


def upstream_phase(phase: Phase, name: str) -> Phase:
    """Another, finished phase of the same run, to find its files by."""
    params = PHASES[name].checked(read_json(phase.of(name) / "inputs.json")["params"], name)
    return Phase(params=params.model_copy(update={"run": phase.params.run}), inputs={})


def run_training(
    phase: Phase, cfg: TrainParams, watch: Callable[..., None] = lambda rows, last=False: None
) -> Rows:
    """Train by ``torchrun -m eagle3lib.training`` and return all rows of ``metrics.jsonl``.

    ``watch(rows)`` is called whenever there are new rows, ``watch(rows, last=True)`` at the end. A
    run that was interrupted continues from its last checkpoint. Raises ``UserError`` with the end
    of the log when it fails.
    """
    folders = job_folders(phase)
    threads = max(1, free_cores() // cfg.processes)
    job = {
        "params": cfg.model_dump(mode="json"),
        "threads": threads,
        "phase": str(folders.phase),
        "states": str(folders.states),
        "vocab": str(folders.vocab),
        "answers": str(folders.answers),
    }
    write_json(phase.folder / "job.json", job)
    command = torchrun(cfg, 0, str(phase.folder / "job.json"))
    for node in range(1, cfg.nodes):
        other = torchrun(cfg, node, str((phase.folder / "job.json").resolve()))
        print(f"on node {node}, with the same folders: {' '.join(['python', *other[1:]])}")
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    print(f"training: {cfg.processes} process(es) of {threads} threads", flush=True)
    with (
        Child(command, log=phase.log_file("training"), env=env) as child,
        phase.progress(cfg.epochs, "epochs", "training") as bar,
    ):
        shown, seen = 0.0, 0
        while child.exit_code() is None:
            time.sleep(_POLL_S)
            rows = _read_growing(folders)
            done = _epochs_done(rows, cfg.epochs)
            bar.update(done - shown)  # fractions of an epoch count
            shown = done
            if len(rows) > seen:
                watch(rows)
                seen = len(rows)
        if child.exit_code() != 0:
            raise UserError(
                _failure(child),
                where=child.log,
                next="mend it and run the phase again: it continues from its checkpoint",
            )
    rows = _read_growing(folders)
    watch(rows, last=True)
    _check_finished(rows, cfg, folders)
    return rows


def _check_finished(rows: Rows, cfg: TrainParams, folders: Folders) -> None:
    last = [row for row in rows if row["kind"] == "train"][-1]
    if last["update"] < last["updates"]:
        raise UserError(
            f"training stopped at update {last['update']} of {last['updates']}, "
            f"after max_minutes: {cfg.max_minutes:g}",
            where=folders.last,
            next="run the phase again: it continues from this checkpoint",
        )


def torchrun(cfg: TrainParams, node: int, job: str) -> list[str]:
    """The command that starts this node's processes."""
    if cfg.nodes == 1:
        meeting = ["--standalone"]
    else:
        host, port = cfg.rendezvous.rsplit(":", 1)
        meeting = ["--nnodes", str(cfg.nodes), "--node-rank", str(node)]
        meeting += ["--master-addr", host, "--master-port", port]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        "--nproc-per-node",
        str(cfg.processes),
        "-m",
        "eagle3lib.training",
        job,
    ]


def _read_growing(folders: Folders) -> Rows:
    """Whole lines of the metrics that another process is appending to (never truncate them
    here)."""
    if not folders.metrics.exists():
        return []
    text = folders.metrics.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in whole.split("\n") if line]


def _epochs_done(rows: Rows, epochs: int) -> float:
    updates = [row for row in rows if row["kind"] == "train"]
    return epochs * updates[-1]["update"] / updates[-1]["updates"] if updates else 0.0


def _failure(child: Child) -> str:
    """The child's own message for a user's mistake, else the end of its log."""
    text = child.last_lines(60)
    marked = text.split("USER ERROR\n")
    if len(marked) > 1:
        return "training stopped: " + marked[1].split("\nE1")[0].split("\n[")[0].strip()
    return f"training died (exit code {child.exit_code()}); its last lines:\n" + child.last_lines()


def training_summary(rows: Rows, cfg: TrainParams) -> dict[str, Any]:
    """The numbers of a finished training, for ``metrics.json``."""
    updates = [r for r in rows if r["kind"] == "train"]
    evaluations = [r for r in rows if r["kind"] == "evaluation"]
    best = max(evaluations, key=lambda r: _length(r))
    first, last = evaluations[0], updates[-1]
    return {
        "updates": len(updates),
        "epochs": cfg.epochs,
        "trained_tokens": first["tokens"]["train"],
        "seconds": last["seconds"],
        "tokens_per_s": round(sum(r["tokens"] for r in updates) / last["seconds"], 1),
        "final_steps": last["steps"],
        "best_epoch": best["epoch"],
        "heldout": best["sets"],
        "untrained": first["sets"],
        "baselines": first["baselines"],
        "estimates": best["estimates"],
        "verdict": first["verdict"],
        "skipped_rows": first["skipped_rows"],
        "cut_rows": first["cut_rows"],
        "cut_tokens": first["cut_tokens"],
        "num_speculative_tokens": cfg.num_speculative_tokens,
    }


def _length(row: dict[str, Any]) -> float:
    return row["sets"].get("workload", {}).get("acceptance_length") or 0.0


def best_drafter(phase_04: Folders, target: Target) -> tuple[Drafter, dict[str, Any]]:
    """The best checkpoint of a training, fp32, and its state (epoch, acceptance length)."""
    if not has_checkpoint(phase_04.best):
        raise UserError(
            "there is no trained drafter", where=phase_04.best, next="eagle3 run PROFILE 04"
        )
    return trained_drafter(phase_04.best, target), read_json(phase_04.best / "state.json")
