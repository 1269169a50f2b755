"""The training loop: one process or many, exact resume, checkpoints judged by simulated acceptance.

    checkpoints/last/   weights (fp32), optimizer, step: what a resumed run starts from
    checkpoints/best/   weights with the best acceptance length on held-out answers of the workload
    metrics.jsonl       one line an update and one an evaluation

The order of rows depends on (seed, epoch) alone and checkpoints fall on epoch ends, so a run that
was killed repeats at most ``checkpoint_every`` epochs and then continues on the same curve.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from eagle3lib.drafter.checkpoint import drafter_tensors, set_vocab
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, replace_folder, write_json
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.training.data import Batch, conversations, epoch_batches, load_batch, trainable
from eagle3lib.training.evaluate import NgramBaseline, evaluate
from eagle3lib.training.loss import (
    StepCounts,
    StepLabels,
    Teacher,
    draft_ids,
    label_steps,
    step_counts,
    step_scale,
    ttt_loss,
)

_WEIGHTS, _OPTIMIZER = "drafter.safetensors", "optimizer.pt"


@dataclass(frozen=True)
class Folders:
    """Where a training job reads and writes."""

    phase: Path
    states: Path
    vocab: Path

    @property
    def last(self) -> Path:
        return self.phase / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        return self.phase / "checkpoints" / "best"

    @property
    def metrics(self) -> Path:
        return self.phase / "metrics.jsonl"


def new_drafter(
    target: Target, head: TargetHead, vocab: VocabMap, slots: tuple[int, ...], seed: int
) -> Drafter:
    """A fresh drafter: embedding, head rows and final norm start as the target's, the rest random.

    The embedding stays the target's (SGLang serves with the target's whatever a checkpoint holds).
    """
    config = DrafterConfig.for_target(target.config, len(vocab.d2t))
    if config.slots != slots:
        raise UserError(
            f"states were captured at slots {list(slots)}",
            expected=str(list(config.slots)),
            next="eagle3 run PROFILE 02",
        )
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and not name.startswith("embed_tokens"):
                parameter.normal_(0.0, 0.02, generator=generator)
        drafter.embed_tokens.weight.copy_(head.embedding)
        drafter.lm_head.weight.copy_(head.head[vocab.target_ids])
        drafter.norm.weight.copy_(head.norm)
    drafter.embed_tokens.weight.requires_grad_(False)
    set_vocab(drafter, vocab)
    return drafter


class Trainer:
    """One rank of a training job. Cost: one ``unroll`` and its backward per batch."""

    def __init__(self, cfg: TrainParams, target: Target, folders: Folders):
        self.cfg, self.folders = cfg, folders
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.store = StateStore(folders.states)
        if self.store.target_fingerprint != target.fingerprint:
            raise UserError(
                f"the states are of another target ({self.store.target_fingerprint})",
                expected=target.fingerprint,
                where=folders.states,
                next="eagle3 run PROFILE 02",
            )
        self.vocab = VocabMap.load(folders.vocab)
        self.head = TargetHead(target)
        self.drafter = new_drafter(target, self.head, self.vocab, self.store.slots, cfg.seed)
        self.draft_head = self.head.head[self.vocab.target_ids]
        self.train_rows, self.skipped_rows = trainable(self.store.select(split="train"))
        if not self.train_rows:
            raise UserError(
                "no conversation has a token to train on",
                where=folders.states,
                expected="answers of at least two tokens",
            )
        self.draft_of = draft_ids(self.drafter.t2d)
        self.greedy, self.full_logsumexp = self._teacher_tokens()
        self.heldout = {
            name: conversations(
                self.store, trainable(self.store.select(split="heldout", set=name))[0]
            )
            for name in ("workload", "general")
        }
        self.heldout = {name: items for name, items in self.heldout.items() if items}
        per_epoch = len(
            epoch_batches(self.train_rows, cfg.batch_rows, seed=0, epoch=0, world=self.world)
        )
        self.total_updates = per_epoch * cfg.epochs
        self.optimizer, self.schedule = self._optimizer()
        self.step, self.epoch, self.best_length, self.seconds = 0, 0, 0.0, 0.0

    def _teacher_tokens(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The target's greedy next token after each state of every training conversation, and the
        logsumexp of its logits, made once: the full head over every epoch would cost more than the
        drafter's own."""
        tokens, sums = {}, {}
        for row in self.store.rows(self.train_rows):
            start = row.entry.prompt_tokens - 1
            greedy, total = self.head.greedy_and_logsumexp(
                row.last[start:].float(), self.cfg.loss_temperature
            )
            tokens[row.entry.id] = torch.nn.functional.pad(greedy, (start, 0), value=-1)
            sums[row.entry.id] = torch.nn.functional.pad(total, (start, 0))
        return tokens, sums

    def _optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        """AdamW, no decay on norms; linear warm-up, then cosine to zero."""
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": self.cfg.weight_decay},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.cfg.learning_rate, betas=(0.9, 0.95))
        warmup = math.ceil(self.cfg.warmup_share * self.total_updates)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, warmup, self.total_updates)

    def run(self) -> None:
        """Train to the last epoch, from the last checkpoint if there is one."""
        self._resume()
        if self.epoch == 0 and self.rank == 0:
            self._log(self._evaluation() | self._baselines())
        for epoch in range(self.epoch, self.cfg.epochs):
            batches = epoch_batches(
                self.train_rows,
                self.cfg.batch_rows,
                seed=self.cfg.seed,
                epoch=epoch,
                rank=self.rank,
                world=self.world,
            )
            for entries in batches:
                self._log(self._update(entries, epoch))
            self.epoch = epoch + 1
            if self.epoch % self.cfg.checkpoint_every == 0 or self.epoch == self.cfg.epochs:
                self._checkpoint()

    def _update(self, entries: list[Any], epoch: int) -> dict[str, Any]:
        started = time.perf_counter()
        self.drafter.train()
        counts = self._gradients(load_batch(self.store, entries) if entries else None)
        tokens = int(self._sum_over_ranks([float(sum(e.tokens for e in entries))])[0])
        norm = self._reduce_and_clip()
        self.optimizer.step()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self.step += 1
        elapsed_s = time.perf_counter() - started
        self.seconds += elapsed_s
        return {
            "kind": "train",
            "update": self.step,
            "updates": self.total_updates,
            "epoch": epoch,
            "learning_rate": rate,
            "grad_norm": round(norm, 4),
            "seconds": round(self.seconds, 2),
            "tokens": tokens,
            "tokens_per_s": round(tokens / elapsed_s, 1),
            "steps": [_shown(c) for c in counts],
        }

    def _gradients(self, batch: Batch | None) -> list[StepCounts]:
        """Gradients of this rank's share of the loss, and the counts of all ranks."""
        steps, labels = self.cfg.steps, None
        if batch is not None:
            greedy = torch.cat([self.greedy[i] for i in batch.ids])
            labels = label_steps(batch.rows, greedy, self.draft_of, steps)
        # The mean is over all ranks' positions; who counts is known before the forward.
        inside = self._sum_over_ranks(
            [float(n) for n in (labels.inside if labels else [0] * steps)]
        )
        weights = [self.cfg.step_weight**k for k in range(steps)]
        scale = step_scale([int(n) for n in inside], weights)
        self.optimizer.zero_grad(set_to_none=True)
        counts = [StepCounts(0, 0, 0, 0.0, 0.0)] * steps
        if batch is not None and labels is not None:
            loss, sums = self._loss(batch, labels, scale)
            if not torch.isfinite(loss):
                raise UserError(
                    f"the loss is {float(loss)} at update {self.step}",
                    where=self.folders.metrics,
                    next="lower learning_rate; the last good checkpoint is kept",
                )
            loss.backward()
            counts = step_counts(labels, sums)
        return [self._over_ranks(c) for c in counts]

    def _loss(self, batch: Batch, labels: StepLabels, scale: list[float]) -> tuple[Tensor, Tensor]:
        whole = torch.cat([self.full_logsumexp[i] for i in batch.ids])
        teacher = Teacher(self.head.normed(batch.last.float()), self.draft_head, whole)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cfg.precision == "bfloat16"):
            made = unroll(
                self.drafter, batch.rows, batch.states.float(), self.cfg.steps, feed="truth"
            )
            return ttt_loss(
                self.drafter,
                made,
                labels,
                teacher,
                scale,
                kind=self.cfg.loss,
                temperature=self.cfg.loss_temperature,
            )

    def _over_ranks(self, own: StepCounts) -> StepCounts:
        positions, inside, right, *sums = self._sum_over_ranks(
            [float(n) for n in dataclasses.astuple(own)]
        )
        return StepCounts(int(positions), int(inside), int(right), *sums)

    def _sum_over_ranks(self, values: list[float]) -> list[float]:
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _reduce_and_clip(self) -> float:
        """Sum gradients over ranks (each holds its share of the global mean), then clip."""
        trained = [p for p in self.drafter.parameters() if p.requires_grad]
        if self.world > 1:
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        return float(torch.nn.utils.clip_grad_norm_(trained, self.cfg.max_grad_norm))

    def _evaluation(self) -> dict[str, Any]:
        self.drafter.eval()
        started = time.perf_counter()
        sets = evaluate(self.drafter, self.heldout, self.cfg.num_speculative_tokens)
        return {
            "kind": "evaluation",
            "epoch": self.epoch,
            "update": self.step,
            "sets": sets,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _baselines(self) -> dict[str, Any]:
        answers = [
            row.token_ids[row.entry.prompt_tokens :].tolist()
            for row in self.store.rows(self.train_rows)
        ]
        ngrams = NgramBaseline(answers)
        return {
            "baselines": ngrams.evaluate(self.heldout, self.cfg.num_speculative_tokens),
            "skipped_rows": self.skipped_rows,
            "tokens": dict(Counter(train=sum(map(len, answers)))),
        }

    def _log(self, row: dict[str, Any]) -> None:
        if self.rank == 0:
            with self.folders.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _checkpoint(self) -> None:
        if self.rank == 0:
            result = self._evaluation()
            self._log(result)
            length = result["sets"].get("workload", {}).get("acceptance_length") or 0.0
            if length >= self.best_length:
                self.best_length = length
                replace_folder(self.folders.best, self._write_weights)
            replace_folder(self.folders.last, self._write_all)
        if self.world > 1:
            dist.barrier()

    def _write_weights(self, folder: Path) -> None:
        save_file(drafter_tensors(self.drafter, torch.float32, embeddings=False), folder / _WEIGHTS)
        write_json(
            folder / "state.json",
            {
                "epoch": self.epoch,
                "update": self.step,
                "best_length": self.best_length,
                "seconds": self.seconds,
            },
        )

    def _write_all(self, folder: Path) -> None:
        self._write_weights(folder)
        state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
        torch.save(state, folder / _OPTIMIZER)

    def _resume(self) -> None:
        rows = read_jsonl(self.folders.metrics)
        if (self.folders.last / "state.json").exists():
            state = read_json(self.folders.last / "state.json")
            self.epoch, self.step = state["epoch"], state["update"]
            self.best_length, self.seconds = state["best_length"], state["seconds"]
            load_weights(self.drafter, self.folders.last)
            saved = torch.load(self.folders.last / _OPTIMIZER, weights_only=True)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.schedule.load_state_dict(saved["schedule"])
        if self.rank == 0:  # updates after the checkpoint are made again
            kept = [row for row in rows if row["update"] <= self.step and self.epoch > 0]
            text = "".join(json.dumps(row) + "\n" for row in kept)
            self.folders.metrics.write_text(text, encoding="utf-8")


def load_weights(drafter: Drafter, checkpoint: Path) -> None:
    """Weights of a training checkpoint; the embedding stays as it is (the target's)."""
    tensors = load_file(checkpoint / _WEIGHTS)
    missing = drafter.load_state_dict(tensors, strict=False).missing_keys
    assert all(name.startswith("embed_tokens") for name in missing), missing


def _shown(count: StepCounts) -> dict[str, Any]:
    return {
        "positions": count.positions,
        "inside": count.inside,
        "right": count.right,
        "loss": round(count.loss_sum / max(count.inside, 1), 4),
        "overlap": round(count.overlap_sum / max(count.inside, 1), 4),
    }
