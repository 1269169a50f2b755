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
from safetensors.torch import save_file
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_atomic, write_json
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead, load_target, record_states
from eagle3lib.target.states import StateEntry, state_problem, write_index


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
    on_tokens: Callable[[int], None] = lambda n: None,
) -> CaptureResult:
    """Capture every row's states into ``folder``; finished shards of an interrupted run are kept.

    Raises ``UserError`` when a row's states are not finite, all zero, or stuck.
    """
    folder.mkdir(parents=True, exist_ok=True)
    started, padded, tokens = time.perf_counter(), 0, 0
    model: Any = None
    entries: list[StateEntry] = []
    by_length = sorted(rows, key=lambda r: (_length(r), r.id))
    for number, start in enumerate(range(0, len(by_length), shard_rows)):
        part = by_length[start : start + shard_rows]
        name = f"shard-{number:05d}"
        done = _finished_shard(folder, name, part)
        if done is None:
            model = model or load_target(target, dtype)
            done, cells = _capture_shard(model, part, folder, name, slots, batch_tokens)
            padded += cells
            tokens += sum(_length(r) for r in part)
        entries += done
        on_tokens(sum(_length(r) for r in part))
    write_index(folder, entries, slots=slots, dtype=dtype, fingerprint=target.fingerprint)
    seconds = time.perf_counter() - started
    waste = 1 - tokens / padded if padded else 0.0
    return CaptureResult(len(rows), sum(e.tokens for e in entries), waste, tokens, seconds)


def _length(row: AnswerRow) -> int:
    return len(row.prompt_token_ids) + len(row.answer_token_ids)


def _finished_shard(folder: Path, name: str, part: list[AnswerRow]) -> list[StateEntry] | None:
    """The entries of a shard that an earlier, interrupted run completed for these very rows."""
    side = folder / f"{name}.json"
    if not side.exists() or not (folder / f"{name}.safetensors").exists():
        return None
    entries = [StateEntry(**entry) for entry in read_json(side)]
    same = [(e.id, e.tokens) for e in entries] == [(r.id, _length(r)) for r in part]
    return entries if same else None


def _capture_shard(
    model: Any,
    part: list[AnswerRow],
    folder: Path,
    name: str,
    slots: tuple[int, ...],
    batch_tokens: int,
) -> tuple[list[StateEntry], int]:
    ids = [row.prompt_token_ids + row.answer_token_ids for row in part]
    states: dict[int, Tensor] = {}
    cells = 0
    for batch in length_batches([len(row) for row in ids], batch_tokens):
        cells += len(batch) * max(len(ids[i]) for i in batch)
        made = forward_states(model, [ids[i] for i in batch], slots)
        states |= dict(zip(batch, made, strict=True))
    entries, start = [], 0
    for i, row in enumerate(part):
        problem = state_problem(states[i], torch.tensor(ids[i]))
        if problem:
            raise UserError(
                f"conversation {row.id}: {problem}",
                where=folder,
                expected="finite, distinct hidden states",
                next="capture with dtype=float32; if that fails too, check the weights",
            )
        entries.append(
            StateEntry(
                id=row.id,
                set=row.set,
                split=row.split if row.trained or row.split == "heldout" else "left",
                shard=f"{name}.safetensors",
                start=start,
                tokens=len(ids[i]),
                prompt_tokens=len(row.prompt_token_ids),
                mean_square=round(float(states[i].float().square().mean()), 6),
            )
        )
        start += len(ids[i])
    tensors = {
        "hidden_states": torch.cat([states[i] for i in range(len(part))]),
        "token_ids": torch.tensor([t for row in ids for t in row], dtype=torch.int64),
    }
    write_atomic(folder / f"{name}.safetensors", lambda tmp: save_file(tensors, tmp))
    write_json(folder / f"{name}.json", [entry.__dict__ for entry in entries])
    return entries, cells


def teacher_agreement(
    head: TargetHead, token_ids: Tensor, last: Tensor, prompt_tokens: int
) -> tuple[int, int]:
    """(answer tokens that the states' own greedy next token equals, answer tokens).

    The state after x[i] predicts x[i + 1]; the first answer token is predicted by the last of the
    prompt. Near 100 % for greedy answers; a wrong layer or a second norm gives about a third.
    """
    predicted = head.greedy(last[prompt_tokens - 1 : -1].to(head.norm.dtype))
    return int((predicted == token_ids[prompt_tokens:]).sum()), len(token_ids) - prompt_tokens
