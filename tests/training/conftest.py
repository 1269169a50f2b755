"""Trainings of the tiny target: parameters, folders, and what they left behind."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.states import StateEntry
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.loop import Trainer

TIMES = ("seconds", "tokens_per_s")


@pytest.fixture
def params(tiny_target):
    """The eight rows (179 tokens, the longest 28) are two updates an epoch, in any order."""

    def make(**changes):
        values = {"target": str(tiny_target.folder), "epochs": 4, "batch_tokens": 110, "steps": 3,
                  "precision": "float32", "learning_rate": 3e-3, "device": "cpu"}  # fmt: skip
        return TrainParams(**(values | changes))

    return make


@pytest.fixture(scope="session")
def tiny_answers(tiny_rows, tmp_path_factory):
    """The tiny rows as phase 01 leaves them."""
    folder = tmp_path_factory.mktemp("answered")
    lines = [json.dumps(asdict(row)) for row in tiny_rows]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def folders(tiny_states, tiny_vocab, tiny_answers, tmp_path):
    def make(name="phase", states=tiny_states, vocab=tiny_vocab):
        (tmp_path / name).mkdir(exist_ok=True)
        return Folders(phase=tmp_path / name, states=states, vocab=vocab, answers=tiny_answers)

    return make


@pytest.fixture
def train(params, folders, tiny_target):
    """Run a training to its end and return its folders."""

    def run(name="phase", **changes):
        where = folders(name)
        Trainer(params(**changes), tiny_target, where).run()
        return where

    return run


@pytest.fixture
def command(params):
    """The command line of a training in processes of its own."""

    def make(where, **changes):
        cfg = params(**changes)
        job = {"params": cfg.model_dump(mode="json"), "threads": 1, "phase": str(where.phase),
               "states": str(where.states), "vocab": str(where.vocab),
               "answers": str(where.answers)}  # fmt: skip
        (where.phase / "job.json").write_text(json.dumps(job))
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                 str(cfg.processes)] if cfg.processes > 1 else []  # fmt: skip
        return [sys.executable, *start, "-m", "eagle3lib.training", str(where.phase / "job.json")]

    return make


def _start_ranks(cfg, target, where, world):
    """Forked processes that join over gloo, as torchrun starts them but without its imports."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        torch.set_num_threads(1)  # a fork has none of its parent's, which a test may have raised
        try:
            Trainer(cfg, target, where).run()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank,)) for rank in range(world)]
    for process in ranks:
        process.start()
    return ranks


def _run_ranks(*arguments):
    ranks = _start_ranks(*arguments)
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * len(ranks)


def _run_child(line):
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def _rows_of(where, kind=None):
    rows = read_jsonl(where.metrics)
    return [row for row in rows if kind in (None, row["kind"])]


def _without_times(rows):
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def _same_outcome(one, other):
    """Every logged number and every weight and moment, to the last bit."""
    assert _without_times(_rows_of(one)) == _without_times(_rows_of(other))
    for which, file in (("last", "drafter"), ("last", "optimizer"), ("best", "drafter")):
        a, b = (load_file(getattr(f, which) / f"{file}.safetensors") for f in (one, other))
        assert a.keys() == b.keys() and len(a) > 5
        assert not [name for name in a if not a[name].equal(b[name])]
        states = [read_json(getattr(f, which) / "state.json") for f in (one, other)]
        assert _without_times(states)[0] == _without_times(states)[1]


def _weights(where, which="last"):
    return load_file(getattr(where, which) / "drafter.safetensors")


def _change_index(states, folder, **changes):
    shutil.copytree(states, folder)
    index = read_json(folder / "index.json")
    (folder / "index.json").write_text(json.dumps(index | changes))
    return folder


def _entry(index, tokens=9, prompt_tokens=4):
    return StateEntry(f"row-{index}", "workload", "train", "shard", 0, tokens, prompt_tokens, 1.0)


@pytest.fixture
def on():
    """What the tests ask of a training's folders."""
    return SimpleNamespace(
        run_child=_run_child, run_ranks=_run_ranks, start_ranks=_start_ranks,
        rows_of=_rows_of, without_times=_without_times,
        same_outcome=_same_outcome, change_index=_change_index, entry=_entry,
        weights=_weights,
    )  # fmt: skip
