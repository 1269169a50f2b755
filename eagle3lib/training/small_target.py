"""Train a small target from nothing on other answers, within a budget of seconds.

For a bench only: a drafter of a target that says random words can't be judged, so a small target
must say something that can be foreseen. Rows are padded to neighbours of like length (attention is
causal, so padding at the end changes nothing), every token after the first is predicted. Weights
and products in bf16 on a GPU with fp32 masters, fp32 on a CPU. Experts are kept busy without a loss
of their own, by the correction bias (arXiv 2408.15664): after an update it rises for those that got
less than their share, and falls for the others.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.target.forward import length_batches

_IGNORED = -100
_BIAS_STEP = 1e-3  # arXiv 2408.15664
_WINDOW_ROWS = 4096  # so many rows are sorted by length at once
_PASSES = 1000  # the budget ends it


@dataclass(frozen=True)
class TargetTraining:
    """``seconds`` of updates (the rate falls to 0 within them); ``most_updates`` ends it before."""

    seconds: float
    batch_tokens: int = 32_768
    learning_rate: float = 1.5e-3
    warmup_share: float = 0.03
    weight_decay: float = 0.1
    most_updates: int = 1_000_000
    most_row_tokens: int = 1024
    seed: int = 0

    def rate(self, done: float) -> float:
        """Learning rate when the share ``done`` of the budget is spent: up, then down to 0."""
        return self.learning_rate * min(done / self.warmup_share, (1 - done) / 0.6, 1.0)


def train_small_target(
    model: Any,
    rows: Sequence[AnswerRow],
    how: TargetTraining,
    device: str,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train ``model`` (transformers, fp32) in place; returns what was done and the held-out figures
    (``judge``). Raises ``UserError`` without rows of either split."""
    train = [r for r in rows if r.split == "train"]
    held = [r for r in rows if r.split == "heldout" and not r.looping][:64]
    if not train or not held:
        raise UserError(
            f"{len(train)} training and {len(held)} held-out answers",
            expected="rows of phase 01 (answers.jsonl) of both splits",
        )
    model.to(device, torch.float32 if device == "cpu" else torch.bfloat16).train()
    weights = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().float().clone() for p in weights]
    optimizer = torch.optim.AdamW(
        [{"params": [m for m in masters if m.ndim > 1], "weight_decay": how.weight_decay},
         {"params": [m for m in masters if m.ndim == 1], "weight_decay": 0.0}],
        lr=how.learning_rate, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    started, tokens, updates, loss = time.monotonic(), 0, 0, torch.zeros(())
    with _Balance(model) as balance:
        for ids, labels in _batches(train, how, device):
            done = max((time.monotonic() - started) / how.seconds, updates / how.most_updates)
            if done >= 1:
                break
            loss = token_loss(model, ids, labels)
            loss.backward()
            _step(weights, masters, optimizer, how.rate(done))
            balance.update()
            tokens += int((labels != _IGNORED).sum())
            updates += 1
            if updates % 50 == 1:
                spent_s = time.monotonic() - started
                say(f"update {updates}: loss {loss.item():.3f}, {tokens / spent_s:,.0f} tokens/s")
    seconds = time.monotonic() - started
    found = judge(model.eval(), held, how, device)
    return {"updates": updates, "tokens": tokens, "seconds": round(seconds, 1),
            "tokens_per_s": round(tokens / seconds), "last_loss": round(loss.item(), 4),
            "rows": len(train), "heldout": found}  # fmt: skip


def token_loss(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of labels [B, T] that are not ignored; the head runs on those alone."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    wanted = labels != _IGNORED
    return functional.cross_entropy(model.lm_head(hidden[wanted]).float(), labels[wanted])


@torch.no_grad()
def judge(
    model: Any, rows: Sequence[AnswerRow], how: TargetTraining, device: str
) -> dict[str, Any]:
    """Loss and top-1 counts over the answer tokens of ``rows``."""
    total = {"rows": len(rows), "tokens": 0, "right": 0}
    loss = 0.0
    for row in rows:
        ids = torch.tensor(_ids(row, how), device=device)
        first = len(row.prompt_token_ids)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0, first - 1 :].float()
        total["tokens"] += len(logits)
        total["right"] += int((logits.argmax(-1) == ids[first:]).sum())
        loss += functional.cross_entropy(logits, ids[first:], reduction="sum").item()
    tokens = max(total["tokens"], 1)
    return total | {"loss": round(loss / tokens, 4), "top1": round(total["right"] / tokens, 4)}


class _Balance:
    """Counts which experts the routers chose, and moves their correction bias after an update."""

    def __init__(self, model: nn.Module):
        self._gates = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
        self._counts: dict[nn.Module, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> _Balance:
        for gate in self._gates:  # choices need more digits than bf16 has
            gate.e_score_correction_bias = gate.e_score_correction_bias.float()
        self._hooks = [gate.register_forward_hook(self._count) for gate in self._gates]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _count(self, gate: Any, _: Any, made: tuple[Tensor, Tensor, Tensor]) -> None:
        self._counts[gate] = torch.bincount(made[2].flatten(), minlength=gate.num_experts)

    def update(self) -> None:
        for gate, counts in self._counts.items():
            short = counts.float().mean() - counts
            gate.e_score_correction_bias += _BIAS_STEP * short.sign()


def _step(
    weights: list[Tensor], masters: list[Tensor], optimizer: torch.optim.Optimizer, rate: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    for weight, master in zip(weights, masters, strict=True):
        # An expert that nobody chose has no gradient.
        master.grad = None if weight.grad is None else weight.grad.float()
        weight.grad = None
    torch.nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(weights, masters)


def _batches(
    rows: list[AnswerRow], how: TargetTraining, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, labels) [B, T] without end: passes over the rows in orders of their own."""
    draw = random.Random(how.seed)
    order = list(range(len(rows)))
    for _ in range(_PASSES):
        draw.shuffle(order)
        for start in range(0, len(order), _WINDOW_ROWS):
            window = [_ids(rows[i], how) for i in order[start : start + _WINDOW_ROWS]]
            batches = length_batches([len(w) for w in window], how.batch_tokens)
            draw.shuffle(batches)
            for batch in batches:
                yield _padded([window[i] for i in batch], device)


def _ids(row: AnswerRow, how: TargetTraining) -> list[int]:
    return (row.prompt_token_ids + row.answer_token_ids)[: how.most_row_tokens]


def _padded(rows: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), _IGNORED)
    for i, row in enumerate(rows):
        ids[i, : len(row) - 1] = torch.tensor(row[:-1])
        labels[i, : len(row) - 1] = torch.tensor(row[1:])
    return ids.to(device), labels.to(device)
