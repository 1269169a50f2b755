"""Our trainer and a peer's on the same rows: the files of both, their child processes, their logs.

The peer is ``speculators`` 0.9.0 in its own environment (``make peer``), used as a program with its
defaults. What a CPU forces on it, and nothing else, is set: plain attention and an unfused loss
(its defaults are kernels for a GPU), no loader processes, ``peer_shim.py`` for the device, and
the dtype of products that ours takes (float32 where a CPU has none of bfloat16). Its
batches are packed to a fixed length; 8,192 tokens, its default, need 17 GB for the attention of
seven steps, and of 512, 1,024 and 2,048 the shortest trained fastest on two cores.

Layout of the peer's data folder, rows in the order of ``BenchRows``, the held-out ones last::

    data-*.arrow                     input_ids, loss_mask (1 on answers), seq_len, by datasets
    hidden_states/hs_0.safetensors   hidden_states [T, slots + 1, H], token_ids [T]
    d2t-8192.npy, t2d-8192.npy       our vocabulary map, the same law

Both trainers are timed by their own record of each update; what is around it (imports, first and
last evaluation, checkpoints) is in ``wall_s``. A training that is killed goes on when it is asked
for again, each trainer from its own last checkpoint (the peer's are at the ends of epochs); what
was done twice counts once in the updates' seconds, and twice in ``wall_s``.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from safetensors.torch import save_file

from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, write_json
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.folder import Target
from eagle3lib.target.states import StateEntry, StateStore

OWN, PEER = "ours", "speculators 0.9.0"
_SHIM = Path(__file__).with_name("peer_shim.py")
_POLL_S, _WRITE_S = 0.2, 5.0
# Its log goes through rich, which wraps at a terminal's width, and colours all that a notebook's
# kernel starts.
_PLAIN_LOG = {"COLUMNS": "2000", "FORCE_COLOR": "", "NO_COLOR": "1"}
_UPDATE = re.compile(
    r"train/loss=\S+ .*?profile/step_ms=([\d.e+]+), profile/tokens_per_s=([\d.e+]+),"
    r".*? epoch=(\d+),.*?global_step=(\d+)"
)


@dataclass(frozen=True)
class BenchRows:
    """The conversations of a benchmark; ``heldout`` is what the trainers evaluate on."""

    train: list[StateEntry]
    heldout: list[StateEntry]

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, prompts included."""
        return sum(e.tokens for e in self.train)


def choose_rows(store: StateStore, tokens: int, heldout: int = 4, seed: int = 0) -> BenchRows:
    """Training conversations in a fixed random order until they hold ``tokens`` tokens (or all).

    A smaller choice of the same seed is the beginning of a larger one.
    """
    usable = sorted(_trainable(store.select(split="train")), key=lambda e: e.id)
    random.Random(seed).shuffle(usable)
    chosen: list[StateEntry] = []
    while usable and sum(e.tokens for e in chosen) < tokens:
        chosen.append(usable.pop(0))
    aside = _trainable(store.select(split="heldout", set="workload"))[:heldout]
    if not chosen or not aside:
        raise UserError(
            f"{len(chosen)} training and {len(aside)} held-out conversations",
            expected="at least one of each",
            where=store.folder,
            next="eagle3 run PROFILE 01 02",
        )
    return BenchRows(chosen, aside)


def _trainable(entries: list[StateEntry]) -> list[StateEntry]:
    return [e for e in entries if base_span(e.prompt_tokens, e.tokens).count > 0]


def write_own_rows(store: StateStore, rows: BenchRows, vocab: VocabMap, folder: Path) -> None:
    """An index of these rows over the run's own shards, and the vocabulary map."""
    index = read_json(store.folder / "index.json")
    by_id = {c["id"]: c for c in index["conversations"]}
    index["conversations"] = [
        {**by_id[e.id], "shard": str((store.folder / e.shard).resolve())}
        for e in (*rows.train, *rows.heldout)
    ]
    write_json(folder / "states" / "index.json", index)
    vocab.save(folder / "vocab_map.safetensors")


def write_peer_rows(
    store: StateStore, rows: BenchRows, vocab: VocabMap, folder: Path
) -> list[dict[str, Any]]:
    """Write the peer's states and maps; returns the rows that ``datasets`` is to save there."""
    states = folder / "hidden_states"
    states.mkdir(parents=True, exist_ok=True)
    table = []
    for number, entry in enumerate((*rows.train, *rows.heldout)):
        row = store.row(entry)
        slots = row.slots.unflatten(1, (len(store.slots), -1))  # [T, S, H]
        stacked = torch.cat((slots, row.last.unsqueeze(1)), dim=1).contiguous()
        ids = row.token_ids.contiguous()
        save_file({"hidden_states": stacked, "token_ids": ids}, states / f"hs_{number}.safetensors")
        mask = [int(i >= entry.prompt_tokens) for i in range(entry.tokens)]
        table.append({"input_ids": ids.tolist(), "loss_mask": mask, "seq_len": entry.tokens})
    size = len(vocab.d2t)
    np.save(folder / f"d2t-{size}.npy", vocab.d2t.numpy())
    np.save(folder / f"t2d-{size}.npy", vocab.t2d.numpy())
    return table


@dataclass(frozen=True)
class Trained:
    """One finished training. ``tokens`` are those of the conversations, as often as they were seen.

    ``seconds`` are those of the updates alone, ``wall_s`` and ``cpu_s`` those of all processes that
    it took, ``pieces``.
    """

    trainer: str
    epochs: int
    tokens: int
    updates: int
    seconds: float
    wall_s: float
    cpu_s: float
    peak_rss_bytes: int | None
    threads: int
    pieces: int = 1

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def train_own(folder: Path, data: Path, rows: BenchRows, cfg: TrainParams, threads: int) -> Trained:
    """Our trainer over the files of :func:`write_own_rows`; a finished one is not made again.

    Raises ``UserError`` with the end of its log when it dies or saw other tokens than asked.
    """

    def run() -> Trained:
        job = {"params": cfg.model_dump(mode="json"), "threads": threads, "phase": str(folder)}
        job |= {"states": str(data / "states"), "vocab": str(data / "vocab_map.safetensors")}
        write_json(folder / "job.json", job)
        command = [sys.executable, "-m", "eagle3lib.training", str(folder / "job.json")]
        spent = _run(command, folder / "train.log", _env(threads), cwd=ROOT)
        updates = [r for r in read_jsonl(folder / "metrics.jsonl") if r["kind"] == "train"]
        tokens = sum(r["tokens"] for r in updates)
        _check_tokens(OWN, tokens, cfg.epochs * rows.tokens, folder / "metrics.jsonl")
        return Trained(
            OWN, cfg.epochs, tokens, len(updates), updates[-1]["seconds"], threads=threads, **spent
        )

    settings = {"params": cfg.model_dump(mode="json"), "rows": _fingerprint(rows)}
    return _once(folder, settings | {"threads": threads}, run)


@dataclass(frozen=True)
class PeerSettings:
    """What is said to the peer's command line; everything else stays its default."""

    python: Path
    target: Target
    draft_vocab_size: int
    steps: int
    epochs: int
    seq_len: int = 512
    precision: str = "bfloat16"  # its default
    more: tuple[str, ...] = ()

    def options(self, data: Path, rows: BenchRows, save: Path) -> list[str]:
        """Rows are split by position, at int(rows * ratio): the half keeps it off a rounding."""
        split = (len(rows.train) + 0.5) / (len(rows.train) + len(rows.heldout))
        named = {
            "speculator-type": "eagle3",
            "verifier-name-or-path": self.target.folder,
            "data-path": data,
            "save-path": save,
            "train-data-ratio": split,
            "draft-vocab-size": self.draft_vocab_size,
            "ttt-steps": self.steps,
            "epochs": self.epochs,
            "checkpoint-freq": 1,
            "total-seq-len": self.seq_len,
            "draft-attn-impl": "sdpa",
            "loss-implementation": "eager",
            "hidden-states-dtype": self.precision,
            "num-workers": 0,
            "on-missing": "raise",
        }
        return [word for k, v in named.items() for word in (f"--{k}", str(v))] + list(self.more)


def train_peer(
    folder: Path, data: Path, rows: BenchRows, peer: PeerSettings, threads: int
) -> Trained:
    """The peer's trainer over the files of :func:`write_peer_rows`, as :func:`train_own`."""
    options = peer.options(data, rows, folder / "checkpoints")

    def run() -> Trained:
        log = folder / "train.log"
        env = _env(threads) | _PLAIN_LOG | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        spent = _run([str(peer.python), str(_SHIM), "train", *options], log, env, cwd=folder)
        updates = read_peer_log(log.read_text(encoding="utf-8"))
        # It drops the first token of every conversation before it counts.
        expected = peer.epochs * sum(e.tokens - 1 for e in rows.train)
        _check_tokens(PEER, round(sum(u.tokens for u in updates)), expected, log)
        return Trained(
            PEER, peer.epochs, peer.epochs * rows.tokens, len(updates),
            round(sum(u.seconds for u in updates), 2), threads=threads, **spent,
        )  # fmt: skip

    settings = {"options": options, "rows": _fingerprint(rows), "threads": threads}
    return _once(folder, settings, run)


def peer_checkpoint(folder: Path, epochs: int) -> Path:
    """The folder of the last epoch, which vLLM reads as it is."""
    path = folder / "checkpoints" / str(epochs - 1)
    if not (path / "model.safetensors").exists():
        raise UserError("the peer left no checkpoint", where=path, next="read train.log beside it")
    return path


def find_peer(python: Path) -> Path:
    if not python.exists():
        raise UserError("the peer's environment is not there", where=python, next="make peer")
    return python


@dataclass(frozen=True)
class PeerUpdate:
    step: int
    epoch: int
    tokens: float  # from three or four digits of seconds: exact within half a percent
    seconds: float


def read_peer_log(text: str) -> list[PeerUpdate]:
    """Updates in their order, at whatever width rich has wrapped the log. Of an update that was
    made again after a kill the last one."""
    found = {
        int(step): PeerUpdate(int(step), int(epoch), float(rate) * float(ms) / 1e3, float(ms) / 1e3)
        for ms, rate, epoch, step in _UPDATE.findall(re.sub(r"\s+", " ", text))
    }
    return [found[step] for step in sorted(found)]


def _check_tokens(trainer: str, seen: int, expected: int, where: Path) -> None:
    if abs(seen - expected) > 0.01 * expected:
        raise UserError(
            f"{trainer} trained on {seen:,} tokens",
            expected=f"{expected:,}, so that both see the same",
            where=where,
            next="conversations longer than peer_seq_len are cut: raise it, or read the log",
        )


def _env(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def _run(command: list[str], log: Path, env: dict[str, str], cwd: Path) -> dict[str, Any]:
    """Run to the end; what this process and those before it took, as ``Trained`` names it.

    Written down while it runs: whoever is killed with it leaves what was spent.
    """
    file = log.with_name("pieces.json")
    before = read_json(file) if file.exists() else []
    started, written, cpu_s, peak = time.monotonic(), 0.0, 0.0, None
    with Child(command, log=log, env=env, cwd=cwd) as child:
        while child.exit_code() is None:
            time.sleep(_POLL_S)
            cpu_s, peak = _usage(child.pid) or (cpu_s, peak)
            wall_s = time.monotonic() - started
            if wall_s > written + _WRITE_S:
                write_json(file, [*before, [wall_s, cpu_s, peak]])
                written = wall_s
        pieces = [*before, [time.monotonic() - started, cpu_s, peak]]
        write_json(file, pieces)
        if child.exit_code() != 0:
            raise UserError(
                f"{command[1:3]} died (exit code {child.exit_code()}):\n{child.last_lines(12)}",
                where=log,
                next="mend it and run the notebook again: what is finished stays",
            )
    walls, cpus, peaks = zip(*pieces, strict=True)
    return {
        "wall_s": round(sum(walls), 2),
        "cpu_s": round(sum(cpus), 2),
        "peak_rss_bytes": max((p for p in peaks if p is not None), default=None),
        "pieces": len(pieces),
    }


def _usage(supervisor: int) -> tuple[float, int | None] | None:
    """CPU seconds and peak of the supervised process; None when it is just gone."""
    try:
        process = psutil.Process(supervisor).children()[0]
        times = process.cpu_times()
        status = Path(f"/proc/{process.pid}/status")  # its high-water mark: no peak is missed
        marks = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    except (psutil.NoSuchProcess, IndexError, OSError):
        return None
    return (times.user + times.system, 1024 * int(marks[1])) if marks else None


def _fingerprint(rows: BenchRows) -> list[str]:
    return [f"{e.id}/{e.tokens}" for e in (*rows.train, *rows.heldout)]


def _once(folder: Path, settings: dict[str, Any], run: Callable[[], Trained]) -> Trained:
    """The recorded result when it was made with these settings; else a run, on top of what one of
    the same settings has left."""
    path, settings = folder / "result.json", json.loads(json.dumps(settings))
    if path.exists() and read_json(path)["settings"] == settings:
        return Trained(**read_json(path)["result"])
    begun = folder / "settings.json"
    if path.exists() or not begun.exists() or read_json(begun) != settings:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(begun, settings)
    result = run()
    print(
        f"{result.trainer}: {result.tokens:,} tokens in {result.seconds:.1f} s of updates "
        f"({result.tokens_per_s:.0f} tokens/s), {result.wall_s:.0f} s in all",
        flush=True,
    )
    write_json(path, {"settings": settings, "result": asdict(result)})
    return result
