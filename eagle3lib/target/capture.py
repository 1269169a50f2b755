"""Capture hidden states in this process: length-sorted batches, hooks, checks, shards.

Rows are padded on the right, after sorting by length: under a causal mask padding changes nothing
before it, and neighbours in length waste little. Measured share of padding is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead, load_target, record_states
from eagle3lib.target.states import (
    StateEntry,
    StateRow,
    captured_row,
    entry_of,
    finished_shard,
    state_problem,
    write_index,
    write_shard,
)
from eagle3lib.target.storage import check_format


@dataclass(frozen=True)
class CaptureResult:
    conversations: int
    tokens: int
    padding_share: float
    captured_tokens: int  # in this call; the rest was there already
    seconds: float

    @property
    def tokens_per_s(self) -> float | None:
        return round(self.captured_tokens / self.seconds, 1) if self.captured_tokens else None


def length_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches of neighbouring length whose padded size stays within ``batch_tokens``."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        padded = lengths[index] * (len(batches[-1]) + 1) if batches else batch_tokens + 1
        if padded > batch_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


@torch.no_grad()
def forward_states(model: Any, rows: list[list[int]], slots: tuple[int, ...]) -> list[Tensor]:
    """States [T, S + 1, H] of each row of token ids, run as one right-padded batch."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    device = next(model.parameters()).device
    with record_states(model, slots) as recorded:
        # The decoder alone: the head's logits over the whole vocabulary are not wanted here.
        model.model(input_ids=ids.to(device), use_cache=False)
        stacked = torch.stack(recorded, dim=2).cpu()  # [B, T, S + 1, H]
    return [stacked[i, : len(row)].clone() for i, row in enumerate(rows)]


def capture(
    target: Target,
    rows: list[AnswerRow],
    folder: Path,
    *,
    slots: tuple[int, ...],
    dtype: str,
    batch_tokens: int,
    shard_rows: int,
    state_format: str = "full",
    on_tokens: Callable[[int], None] = lambda n: None,
) -> CaptureResult:
    """Capture every row's states into ``folder``; finished shards of an interrupted run are kept.

    Raises ``UserError`` when a row's states are not finite, all zero, or stuck, and for a format
    that can't hold them.
    """
    check_format(state_format, target.hidden_size)
    folder.mkdir(parents=True, exist_ok=True)
    started, padded, tokens = time.perf_counter(), 0, 0
    model: Any = None
    entries: list[StateEntry] = []
    by_length = sorted(rows, key=lambda r: (_length(r), r.id))
    for number, start in enumerate(range(0, len(by_length), shard_rows)):
        part = by_length[start : start + shard_rows]
        name = f"shard-{number:05d}"
        done = finished_shard(folder, name, [entry_of(row) for row in part], state_format)
        if done is None:
            model = model or load_target(target, dtype)
            states, cells = _forward_rows(model, part, folder, slots, batch_tokens)
            done = write_shard(folder, name, states, state_format)
            padded += cells
            tokens += sum(_length(r) for r in part)
        entries += done
        on_tokens(sum(_length(r) for r in part))
    write_index(
        folder,
        entries,
        slots=slots,
        dtype=dtype,
        fingerprint=target.fingerprint,
        state_format=state_format,
    )
    seconds = time.perf_counter() - started
    waste = 1 - tokens / padded if padded else 0.0
    return CaptureResult(len(rows), sum(e.tokens for e in entries), waste, tokens, seconds)


def _length(row: AnswerRow) -> int:
    return len(row.prompt_token_ids) + len(row.answer_token_ids)


def _forward_rows(
    model: Any, part: list[AnswerRow], folder: Path, slots: tuple[int, ...], batch_tokens: int
) -> tuple[list[StateRow], int]:
    """The rows' checked states in their order, and the tokens computed, padding included."""
    ids = [row.prompt_token_ids + row.answer_token_ids for row in part]
    made: dict[int, StateRow] = {}
    cells = 0
    for batch in length_batches([len(row) for row in ids], batch_tokens):
        cells += len(batch) * max(len(ids[i]) for i in batch)
        states = forward_states(model, [ids[i] for i in batch], slots)
        for i, own in zip(batch, states, strict=True):
            problem = state_problem(own, torch.tensor(ids[i]))
            if problem:
                raise UserError(
                    f"conversation {part[i].id}: {problem}",
                    where=folder,
                    expected="finite, distinct hidden states",
                    next="capture with dtype=float32; if that fails too, check the weights",
                )
            made[i] = captured_row(entry_of(part[i]), ids[i], own)
    return [made[i] for i in range(len(part))], cells


def teacher_agreement(
    head: TargetHead, token_ids: Tensor, last: Tensor, prompt_tokens: int
) -> tuple[int, int]:
    """(answer tokens that the states' own greedy next token equals, answer tokens).

    The state after x[i] predicts x[i + 1]; the first answer token is predicted by the last of the
    prompt. Near 100 % for greedy answers; a wrong layer or a second norm gives about a third.
    """
    predicted = head.greedy(last[prompt_tokens - 1 : -1].to(head.norm.dtype))
    return int((predicted == token_ids[prompt_tokens:]).sum()), len(token_ids) - prompt_tokens
