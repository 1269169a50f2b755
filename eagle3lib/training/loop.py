"""The training loop: one process or many, exact resume, checkpoints judged by simulated acceptance.

An update is a set of conversations that depends on (seed, epoch) alone. Every process computes its
parts of it, gradients and counts are sums over all, and the optimizer steps once. A run that was
killed repeats the updates since its last checkpoint and then continues on the same curve, to the
last bit with as many processes and threads. ``metrics.jsonl`` has a line an update and one an
evaluation.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import astuple, fields
from typing import Any

from eagle3lib.data.rows import read_answers
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.capture import sampled_from
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.target.stream import LiveStates
from eagle3lib.training.checkpoints import (
    Folders,
    Position,
    has_checkpoint,
    read_optimizer,
    read_position,
    read_weights,
    save_checkpoint,
)
from eagle3lib.training.data import (
    Entries,
    States,
    epoch_updates,
    share_out,
    trainable,
)
from eagle3lib.training.evaluate import NgramBaseline, verdict
from eagle3lib.training.feed import Feed, Part
from eagle3lib.training.heldout import Heldout
from eagle3lib.training.loss import StepCounts
from eagle3lib.training.memory import available_bytes, check_memory, estimate
from eagle3lib.training.objective import FullHead, Objective, recompute_mlp, step_scales
from eagle3lib.training.optim import (
    load_state,
    make_optimizers,
    rate_share,
    set_rate,
    state_tensors,
)
from eagle3lib.training.parallel import Counts, Place, Replicated, Sharded
from eagle3lib.training.start import new_drafter, warm_drafter
from eagle3lib.training.tracker import Tracker

_COUNTS = len(fields(StepCounts))
_BASELINE_TOKENS = 2_000_000  # counts change little beyond; reading on would delay the start


class Trainer:
    """One rank of a training job. Cost of an update: one ``unroll`` and its backward a part."""

    def __init__(
        self, cfg: TrainParams, target: Target, folders: Folders, states: States | None = None
    ):
        """``states``: in place of those of the folder."""
        self.cfg, self.folders = cfg, folders
        self._started_s, self._stopping = time.monotonic(), False
        self.place = Place.open(cfg.device)
        self.store = states or open_states(cfg, folders, target, str(self.place.device))
        self.vocab = VocabMap.load(folders.vocab)
        self.selection = trainable(self.store.select(split="train"), cfg.max_tokens_per_row)
        if not self.selection.entries:
            raise UserError(
                "no conversation has a token to train on",
                where=folders.states,
                expected="answers of at least two tokens (within max_tokens_per_row)",
            )
        self.plan = [
            epoch_updates(self.selection.entries, cfg.batch_tokens, seed=cfg.seed, epoch=epoch)
            for epoch in range(cfg.epochs)
        ]
        self.first = [0, *itertools.accumulate(len(updates) for updates in self.plan)]
        self.replica = self._weights(target)
        self.heldout = Heldout(self.store, self._full_head(self.head.head))
        self.optimizers = make_optimizers(self.replica.named, cfg)
        self.at = Position(updates=self.first[-1])
        self.tracker = Tracker(cfg, folders.metrics, writes=self.place.rank == 0)
        self._saved_s = time.monotonic()

    def _weights(self, target: Target) -> Replicated | Sharded:
        cfg, head = self.cfg, TargetHead(target)
        if cfg.warm_start:
            drafter = warm_drafter(cfg, target, head, self.vocab, self.store.slots)
        else:
            drafter = new_drafter(cfg, target, head, self.vocab, self.store.slots)
        free = available_bytes(self.place.device, min(self.place.world, cfg.processes))
        numbers = head.head.numel() + head.embedding.numel()
        need = estimate(drafter, cfg, self.plan[0], self.place.world, numbers, self.place.device)
        check_memory(need, free, cfg, self.place.device)
        self.head = self._full_head(head, cfg.loss_temperature)
        self.draft_head = self.head.rows(self.vocab.target_ids)

        def objective(computing: Any) -> Objective:
            if cfg.recompute:
                recompute_mlp(computing)
            return Objective(computing, self.draft_head, cfg)

        kind = Sharded if cfg.sharding == "fsdp" else Replicated
        return kind(drafter.to(self.place.device), objective, DTYPES[cfg.precision], self.place)

    def run(self) -> bool:
        """Train to the last epoch, from the last checkpoint if there is one. Returns whether it is
        finished: after ``max_minutes`` it stops at a checkpoint."""
        self._resume()
        if self.at.update == 0:
            self._log(self._evaluation() | self._baselines())
        while self.at.epoch < self.cfg.epochs:
            epoch = self.at.epoch
            updates = self.plan[epoch][self.at.update - self.first[epoch] :]
            parts = self._parts(updates)
            due = False
            for update in updates:
                if due:
                    self._save()
                if self._stopping:
                    break
                due = self._update(update, parts)
            parts.close()
            if self.at.update < self.first[epoch + 1]:
                break
            self.at.epoch = epoch + 1
            if self.at.epoch % self.cfg.checkpoint_every == 0 or self.at.epoch == self.cfg.epochs:
                self._judge()
            elif due:
                self._save()
            if self._stopping:
                break
        self.tracker.close()
        return self.at.epoch == self.cfg.epochs

    def _full_head(self, head: TargetHead, temperature: float = 1.0) -> FullHead:
        stored = not isinstance(self.store, LiveStates)
        dtype = DTYPES[self.cfg.precision]
        return FullHead(head, self.place.device, temperature, keep=stored, dtype=dtype)

    def _parts(self, updates: list[Entries]) -> Feed:
        """This rank's parts of the updates, in order."""
        rank, world, each = self.place.rank, self.place.world, self.cfg.accumulate
        mine = itertools.chain.from_iterable(
            share_out(update, world * each, self.cfg.steps)[rank::world] for update in updates
        )
        return Feed(self.store, self.head, mine)

    def _update(self, update: Entries, parts: Feed) -> bool:
        """One optimizer update; returns whether a checkpoint is due."""
        started, cfg = time.perf_counter(), self.cfg
        scales = step_scales(update, cfg.steps, cfg.step_weight)
        self.replica.start()
        begun = []
        for index in range(cfg.accumulate):
            last = index == cfg.accumulate - 1
            begun.append(self._backward(next(parts), scales, last=last))
            parts.ahead()  # while the device is at work
        counts, due, bad = self._over_ranks([count() for count in begun])
        norm = self.replica.clip(cfg.max_grad_norm)
        self._check_finite(update, bad, norm)
        rate = cfg.learning_rate * rate_share(self.at.update, self.at.updates, cfg.warmup_share)
        set_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
        self.at.update += 1
        elapsed_s, tokens = time.perf_counter() - started, sum(e.tokens for e in update)
        self.at.seconds += elapsed_s
        self._log(
            {
                "kind": "train",
                "update": self.at.update,
                "updates": self.at.updates,
                "epoch": self.at.epoch,
                "learning_rate": rate,
                "grad_norm": round(norm, 4),
                "seconds": round(self.at.seconds, 2),
                "tokens": tokens,
                "tokens_per_s": round(tokens / elapsed_s, 1),
                "steps": [_shown(c) for c in counts],
            }
        )
        return due

    def _backward(self, part: Part, scales: list[float], *, last: bool) -> Counts:
        return self.replica.backward(*(part or (None, None)), scales, last=last)

    def _over_ranks(self, own: list[list[StepCounts]]) -> tuple[list[StepCounts], bool, list[bool]]:
        """(counts of every step, whether a checkpoint is due, which parts were not finite), over
        all parts of all ranks, in one message."""
        rank, world, steps = self.place.rank, self.place.world, self.cfg.steps
        numbers = [0.0] * (_COUNTS * steps)
        bad = [0.0] * (world * len(own))
        for index, part in enumerate(own):
            for k, c in enumerate(part):
                for i, n in enumerate(astuple(c)):
                    numbers[_COUNTS * k + i] += n
                if c.loss_sum - c.loss_sum != 0:  # infinity or NaN
                    bad[index * world + rank] = 1.0
        now, most_s = time.monotonic(), 60 * self.cfg.max_minutes
        stop = rank == 0 and 0 < most_s <= now - self._started_s
        due = rank == 0 and (stop or now - self._saved_s >= self.cfg.checkpoint_every_s)
        message = [*numbers, *bad, float(due), float(stop)]  # rank 0's clock is everybody's
        numbers, rest = _split(self.place.sum(message), len(numbers))
        bad, due, self._stopping = rest[:-2], bool(rest[-2]), bool(rest[-1])
        of_steps = (numbers[i : i + _COUNTS] for i in range(0, len(numbers), _COUNTS))
        counts = [StepCounts(int(a), int(b), int(c), d, e) for a, b, c, d, e in of_steps]
        return counts, due, [bool(flag) for flag in bad]

    def _check_finite(self, update: Entries, bad: list[bool], norm: float) -> None:
        """Stop before the optimizer takes over what is not finite: weights are still good."""
        if not any(bad) and norm - norm == 0:
            return
        shares = share_out(update, len(bad), self.cfg.steps)
        named = [e.id for share, flag in zip(shares, bad, strict=True) if flag for e in share]
        what = "loss" if any(bad) else "gradient"
        ids = list(dict.fromkeys(named)) or [e.id for e in update]  # a long one has several parts
        raise UserError(
            f"the {what} is not finite at update {self.at.update + 1}, in conversations "
            + ", ".join(ids[:8])
            + (f" and {len(ids) - 8} more" if len(ids) > 8 else ""),
            where=self.folders.metrics,
            next="look at these conversations' states, or lower learning_rate and run again: "
            "checkpoints/last is from before",
        )

    def _evaluation(self) -> dict[str, Any]:
        """Every rank must ask; rank 0 judges."""
        started = time.perf_counter()
        drafter = self.replica.whole_drafter()
        found: dict[str, Any] = {"sets": {}}
        if self.place.rank == 0:
            drafter.eval()
            found = self.heldout.judge(drafter, self.draft_head, self.cfg.num_speculative_tokens)
            drafter.train()
        return {
            "kind": "evaluation",
            "epoch": self.at.epoch,
            "update": self.at.update,
            **found,
            "seconds": round(time.perf_counter() - started, 2),
        }

    def _baselines(self) -> dict[str, Any]:
        chosen = self.selection
        facts = {
            "skipped_rows": chosen.skipped_rows,
            "cut_rows": chosen.cut_rows,
            "cut_tokens": chosen.cut_tokens,
            "tokens": {"train": chosen.answer_tokens},
            "precision": self.cfg.precision,
            "verdict": verdict(chosen.answer_tokens),
        }
        if self.place.rank > 0:
            return facts
        answers, tokens = [], 0
        for entry in chosen.entries:
            if tokens < _BASELINE_TOKENS:
                answers.append(self.store.token_ids(entry)[entry.prompt_tokens :].tolist())
                tokens += len(answers[-1])
        steps = self.cfg.num_speculative_tokens
        return facts | {"baselines": NgramBaseline(answers).evaluate(self.heldout.tokens(), steps)}

    def _log(self, row: dict[str, Any]) -> None:
        self.tracker.log(row)

    def _judge(self) -> None:
        """Evaluate, keep the best, and checkpoint."""
        result = self._evaluation()
        self._log(result)
        length = result["sets"].get("workload", {}).get("acceptance_length") or 0.0
        drafter = self.replica.whole_drafter()
        if self.place.rank == 0 and length >= self.at.best_length:
            self.at.best_length = length
            save_checkpoint(self.folders.best, drafter, self.at)
        self._save()

    def _save(self) -> None:
        """``checkpoints/last``; every rank must ask, rank 0 writes."""
        drafter = self.replica.whole_drafter()
        state = state_tensors(self.optimizers, self.replica.named)
        if self.place.rank == 0:
            save_checkpoint(self.folders.last, drafter, self.at, state)
        self._saved_s = time.monotonic()

    def _resume(self) -> None:
        resumes = has_checkpoint(self.folders.last)
        if resumes:
            self.at = read_position(self.folders.last, self.at.updates)
            self.replica.load(read_weights(self.folders.last))
            state = read_optimizer(self.folders.last)
            load_state(self.optimizers, self.replica.named, state, self.folders.last)
        self.tracker.truncate(self.at.update, keep=resumes)


def open_states(cfg: TrainParams, folders: Folders, target: Target, device: str) -> States:
    """The stored states, or those that the target on ``device`` makes of all answers, at the slots
    and in the dtype that phase 02 proved."""
    store = StateStore(folders.states)
    if store.target_fingerprint != target.fingerprint:
        raise UserError(
            f"the states are of another target ({store.target_fingerprint})",
            expected=target.fingerprint,
            where=folders.states,
            next="eagle3 run PROFILE 02",
        )
    if cfg.states == "disk":
        answers = sampled_from(folders.states)
        if answers:
            raise UserError(
                f"the states of {len(store.entries)} of {answers} answers are stored, as a proof",
                expected="states: live here too, as in phase 02, or states: disk in both",
                where=folders.states,
            )
        return store
    assert folders.answers is not None, "live states need the answers' folder"
    return LiveStates(
        target,
        read_answers(folders.answers),
        slots=store.slots,
        dtype=store.dtype,
        batch_tokens=cfg.target_batch_tokens,
        device=device,
    )


def _split(values: list[float], at: int) -> tuple[list[float], list[float]]:
    return values[:at], values[at:]


def _shown(count: StepCounts) -> dict[str, Any]:
    return {
        "positions": count.positions,
        "inside": count.inside,
        "right": count.right,
        "loss": round(count.loss_sum / max(count.inside, 1), 4),
        "overlap": round(count.overlap_sum / max(count.inside, 1), 4),
    }
