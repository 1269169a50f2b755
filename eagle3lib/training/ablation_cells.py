"""One cell of an ablation: a drafter trained with a loss and a seed, judged and exported.

Cells of a process share the target's states in memory, the vocabulary map and the held-out answers.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from tqdm import tqdm

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.phase import export_drafter
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map, count_tokens
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_file, hash_json, read_json, read_jsonl, write_json
from eagle3lib.lab.params import ExportParams, TrainParams
from eagle3lib.lab.profile import parse_arguments
from eagle3lib.target.folder import open_target
from eagle3lib.target.model import TargetHead, best_device
from eagle3lib.target.states import StateEntry, StateRow, StateStore
from eagle3lib.target.stream import LiveStates
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.heldout import Heldout, Judged
from eagle3lib.training.job import best_drafter
from eagle3lib.training.loop import Trainer
from eagle3lib.training.objective import FullHead
from eagle3lib.training.peer import BenchRows, choose_rows

_CPU_TOKENS, _GPU_TOKENS = 2048, 32_768  # of one forward of the target


@dataclass(frozen=True)
class Cell:
    variant: str
    seed: int

    def params(self, common: dict[str, Any]) -> TrainParams:
        """Raises ``UserError`` for a variant that names no loss or no parameter of phase 04."""
        loss, *more = self.variant.split("+")
        if any(":" not in word for word in more):
            raise UserError(
                f"variant {self.variant!r}", expected="a loss, or LOSS+name:value+name:value"
            )
        words = [word.replace(":", "=", 1) for word in more]
        own = {"loss": loss, "seed": self.seed} | parse_arguments(words)[1]
        return TrainParams.checked(common | own, f"variant {self.variant}")

    def folder(self, out: Path) -> Path:
        return out / "cells" / f"{self.variant}-{self.seed}".replace("/", "_")


@dataclass(frozen=True)
class Ablation:
    """What all cells share. ``tokens`` are those that each cell sees, prompts included, in
    ``epochs`` passes over as many conversations as hold ``tokens / epochs``."""

    target: str
    rows: Path
    out: Path
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    tokens: int
    epochs: int = 1
    heldout: int = 48
    draft_vocab_size: int = 8192
    num_speculative_tokens: int = 5
    device: str = "auto"
    settings: tuple[str, ...] = ()  # more parameters of phase 04, name=value

    def cells(self) -> list[Cell]:
        return [Cell(variant, seed) for variant in self.variants for seed in self.seeds]

    @cached_property
    def inputs(self) -> str:
        """Fingerprint of what all cells read."""
        shared = [self.tokens, self.heldout, self.draft_vocab_size]
        return hash_json([shared, open_target(self.target).fingerprint, hash_file(self.rows)])

    def fingerprint(self, cell: Cell) -> str:
        """Of all that the cell's result depends on."""
        params = self.params(cell).model_dump(mode="json", exclude={"device", "target", "run"})
        return hash_json([params, self.inputs])

    def finished(self, cell: Cell) -> dict[str, Any] | None:
        """The cell's result where it is there and of these settings."""
        path = cell.folder(self.out) / "result.json"
        result = read_json(path) if path.exists() else None
        return result if result and result["fingerprint"] == self.fingerprint(cell) else None

    def params(self, cell: Cell) -> TrainParams:
        common: dict[str, Any] = {
            "target": self.target,
            "epochs": self.epochs,
            "num_speculative_tokens": self.num_speculative_tokens,
            "device": self.device,
            "checkpoint_every": self.epochs,  # equal tokens: the last weights are judged
        }
        return cell.params(common | parse_arguments(list(self.settings))[1])


class KeptStates(StateStore):
    """A store in memory: what ``keep`` has had the target make of some of its conversations."""

    def __init__(self, live: LiveStates):
        self.slots, self.dtype, self.folder = live.slots, live.dtype, live.folder
        self.target_fingerprint, self.entries = live.target_fingerprint, live.entries
        self._rows: dict[str, StateRow] = {}

    def keep(self, live: LiveStates, entries: list[StateEntry], device: str) -> None:
        """Of these conversations, and forget the others."""
        made = tqdm(live.rows(entries, device), "states", len(entries), mininterval=5)
        self.entries, self._rows = entries, {row.entry.id: row for row in made}

    def token_ids(self, entry: StateEntry) -> Int64[Tensor, " T"]:
        return self._rows[entry.id].token_ids[: entry.tokens]

    def rows(
        self, entries: Iterable[StateEntry], device: torch.device | str = "cpu"
    ) -> Iterator[StateRow]:
        for entry in entries:
            row, n = self._rows[entry.id], entry.tokens
            slots, last = row.slots[:n].to(device), row.last[:n].to(device)
            yield StateRow(entry, row.token_ids[:n], slots, last)


def read_rows(path: Path) -> list[AnswerRow]:
    """The answers of a file that phase 01 wrote, or of its gzip."""
    if not path.exists():
        raise UserError("there are no answers", where=path, next="eagle3 run PROFILE 01")
    rows = []
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(AnswerRow(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"line {number} is no answer: {error}",
                    expected="the columns of phase 01's answers.jsonl",
                    where=path,
                ) from None
    return rows


class Workbench:
    """What the cells of one process share: states in memory, vocabulary map, held-out answers."""

    def __init__(self, job: Ablation):
        self.job, self.device = job, best_device(job.device)
        self.target = open_target(job.target)
        rows = read_rows(job.rows)
        live = LiveStates(
            self.target,
            rows,
            slots=default_slots(self.target.num_layers),
            dtype="bfloat16",
            batch_tokens=_CPU_TOKENS if self.device == "cpu" else _GPU_TOKENS,
            device=self.device,
        )
        self.states = KeptStates(live)
        self.chosen = _equal_rows(self.states, job)
        self.vocab = self._vocab(rows)
        self.states.keep(live, [*self.chosen.train, *self.chosen.heldout], self.device)
        device = torch.device(self.device)
        full = FullHead(TargetHead(self.target), device)
        self.draft_head = full.rows(self.vocab.target_ids)
        self.heldout = Heldout(self.states, full)

    def _vocab(self, rows: list[AnswerRow]) -> VocabMap:
        chosen = {entry.id for entry in self.chosen.train}
        counts = count_tokens(row.answer_token_ids for row in rows if row.id in chosen)
        size, stops = self.job.draft_vocab_size, self.target.stop_ids()
        vocab = build_vocab_map(counts, self.target.vocab_size, size, stops)
        vocab.save(self.job.out / "vocab_map.safetensors")
        return vocab

    def run(self, cell: Cell) -> dict[str, Any]:
        """Train, judge and export a cell; an interrupted training goes on."""
        cfg, where = self.job.params(cell), cell.folder(self.job.out)
        folders = Folders(where, self.states.folder, self.job.out / "vocab_map.safetensors")
        where.mkdir(parents=True, exist_ok=True)
        Trainer(cfg, self.target, folders, self.states).run()
        drafter = best_drafter(folders, self.target)[0]
        export_drafter(
            drafter, where / "drafter", ExportParams(), self.target, "Trained for a benchmark."
        )
        steps = self.job.num_speculative_tokens
        judged = self.heldout.each(drafter.to(self.device), self.draft_head, steps)
        updates = [r for r in read_jsonl(folders.metrics) if r["kind"] == "train"]
        first = next(r for r in read_jsonl(folders.metrics) if r["kind"] == "evaluation")
        result = asdict(cell) | {
            "fingerprint": self.job.fingerprint(cell),
            "tokens": sum(r["tokens"] for r in updates),
            "updates": len(updates),
            "seconds": updates[-1]["seconds"],
            "steps": updates[-1]["steps"],
            "num_speculative_tokens": steps,
            "conversations": [_line(one) for items in judged.values() for one in items],
            "untrained": {"sets": first["sets"], "estimates": first["estimates"]},
            "baselines": first["baselines"],
            "drafter": str((where / "drafter").relative_to(self.job.out)),
        }
        write_json(where / "result.json", result)
        shutil.rmtree(where / "checkpoints")  # three times what the drafter's folder takes
        return result


def _equal_rows(states: KeptStates, job: Ablation) -> BenchRows:
    rows = choose_rows(states, job.tokens // job.epochs, job.heldout)
    if rows.tokens < job.tokens // job.epochs:
        raise UserError(
            f"the answers hold {rows.tokens:,} tokens to train on",
            expected=f"{job.tokens // job.epochs:,} an epoch, {job.tokens:,} in all",
            where=job.rows,
            next=f"fewer tokens, or at least {-(-job.tokens // rows.tokens)} epochs",
        )
    return rows


def _line(one: Judged) -> dict[str, Any]:
    """A held-out conversation: rounds and accepted drafts (T = 0); labels, first choices that are
    right and overlaps of every step (T = 1)."""
    labels, right, overlap = one.sums.T.tolist()
    rounds = {"rounds": len(one.replay.accepted), "accepted": sum(one.replay.accepted)}
    return {"id": one.id, **rounds, "labels": labels, "right": right, "overlap": overlap}
