"""What an engine would draft with a drafter, under any reading of it: the ground of all proofs.

A ``Setting`` is a drafter and the ways in which an engine, or an export, can go wrong with it. Its
drafts at every base position follow from the target's states of the engine's own answers. They
depend on the true tokens alone, so each recorded round is compared at the very position where the
engine started it, also after rounds that differ. Cost: one unroll over all answers a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from eagle3lib.drafter.attention import Attend, chain_attention
from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.drafter.rows import PackedRows
from eagle3lib.drafter.simulate import Replay, replay_rounds

_BLOCK = 16  # tokens in a cache block of vLLM: prefixes are cached in whole blocks


@dataclass(frozen=True)
class Answered:
    """One answer that the engine gave, its record of rounds, and the target's states of it."""

    id: str
    set: str
    token_ids: Int64[Tensor, " T"]
    prompt_tokens: int
    states: Float[Tensor, "T L H"]  # of the layers ``layers``
    layers: tuple[int, ...]
    accepted: list[int] | None
    drafted: list[int] | None

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.prompt_tokens :].tolist()

    def slots(self, wanted: Sequence[int]) -> Float[Tensor, "T SH"]:
        return self.states[:, [self.layers.index(s) for s in wanted]].flatten(1)


@dataclass(frozen=True)
class Setting:
    """A drafter and how it is served. ``chain`` is added to the rotary position, step by step."""

    drafter: Drafter
    slots: tuple[int, ...]
    steps: int
    token_shift: int = 0  # 1: x[p] enters where x[p + 1] should
    state_shift: int = 0  # 1: the state of p - 1 is handed over for p; -1: of p + 1
    zero_states: bool = False
    chain: tuple[int, ...] = ()
    lost_prefix: bool = False  # draft keys of whole cached blocks of the prompt are zeros


@torch.no_grad()
def drafts_of(setting: Setting, answers: Sequence[Answered], batch: int = 8) -> list[Tensor]:
    """Drafts [P, K] at the base positions of every answer (row r: proposals for answer tokens
    r + 1, r + 2, ...); empty where an answer has none."""
    order = sorted(range(len(answers)), key=lambda i: len(answers[i].token_ids))
    out: dict[int, Tensor] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        part = [answers[i] for i in chosen if len(answers[i].answer) > 1]
        made = iter(_unrolled(setting, part)) if part else iter(())
        for i in chosen:
            empty = torch.empty(0, setting.steps, dtype=torch.int64)
            out[i] = next(made) if len(answers[i].answer) > 1 else empty
    return [out[i] for i in range(len(answers))]


def _unrolled(setting: Setting, part: list[Answered]) -> tuple[Tensor, ...]:
    drafter = setting.drafter
    tokens = [_shifted(a.token_ids, setting.token_shift) for a in part]
    rows = PackedRows.pack(tokens, [a.prompt_tokens for a in part])
    states = torch.cat([_shifted(a.slots(setting.slots), setting.state_shift) for a in part])
    states = states.to(drafter.fc.weight.dtype) * (0.0 if setting.zero_states else 1.0)
    attention = _without_prefix if setting.lost_prefix else chain_attention
    with _chain_positions(drafter, setting.chain):
        made = unroll(drafter, rows, states, setting.steps, feed="draft", attention=attention)
    drafts = torch.stack([step.drafts for step in made if step.drafts is not None], dim=1)
    return drafts.split([len(a.answer) - 1 for a in part])


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x[i - by]`` at i, its ends repeated."""
    index = (torch.arange(len(x)) - by).clamp(0, len(x) - 1)
    return x[index]


def _without_prefix(scale: float, rows: PackedRows, keys: Tensor, values: Tensor) -> Attend:
    """Keys and values of whole blocks of each prompt are zeros, as memory that nobody filled."""
    keys, values = keys.clone(), values.clone()
    for start, base in dict(
        zip(reversed(rows.row_start.tolist()), reversed(rows.base.tolist()), strict=True)
    ).items():
        cached = base // _BLOCK * _BLOCK
        keys[start : start + cached], values[start : start + cached] = 0, 0
    return chain_attention(scale, rows, keys, values)


@contextmanager
def _chain_positions(drafter: Drafter, offsets: tuple[int, ...]) -> Iterator[None]:
    """Turn step k by ``offsets[k]`` more; the target-made keys, which come first, stay."""
    if not offsets:
        yield
        return
    plain, pending = drafter._rotary, [0, *offsets]

    class Late(nn.Module):
        calls = 0

        def turn(self, positions: Tensor, dtype: torch.dtype) -> Any:
            by = pending[self.calls % len(pending)]
            self.calls += 1
            return plain.turn((positions + by).clamp(min=0), dtype)

    drafter._rotary = Late()  # type: ignore[assignment]
    try:
        yield
    finally:
        drafter._rotary = plain


def replays(drafts: Sequence[Tensor], answers: Sequence[Answered], steps: int) -> list[Replay]:
    """Rounds as an engine with these drafts would walk them."""
    return [replay_rounds(d, a.answer, steps) for d, a in zip(drafts, answers, strict=True)]


def accepted_at(drafts: Tensor, answer: list[int]) -> list[int]:
    """Drafts that would be accepted at every base position, [P]."""
    out = []
    for at, row in enumerate(drafts.tolist()):
        count = 0
        while count < len(row) and at + 1 + count < len(answer):
            if row[count] != answer[at + 1 + count]:
                break
            count += 1
        out.append(count)
    return out


def round_starts(accepted: Sequence[int]) -> list[int]:
    """Base position, counted from the first, at which each recorded round started."""
    starts = [0]
    for count in accepted:
        starts.append(starts[-1] + count + 1)
    return starts[:-1]


def rounds_equal(drafts: Tensor, answered: Answered) -> tuple[int, int]:
    """(rounds of the engine's record that these drafts give too, rounds compared).

    A round that reaches the answer's end is left out: what the target would have said next is not
    known. Rounds that the record places beyond the answer count as unequal. Steps that only one
    of the two drafts are not compared: another K is a matter of its own.
    """
    assert answered.accepted is not None
    counts, answer, most = accepted_at(drafts, answered.answer), answered.answer, drafts.shape[1]
    drafted = answered.drafted or [most] * len(answered.accepted)
    starts = round_starts(answered.accepted)
    equal = total = 0
    for at, theirs, width in zip(starts, answered.accepted, drafted, strict=True):
        mine = min(counts[at], width) if at < len(counts) else -1
        if mine >= 0 and at + 1 + max(theirs, mine) >= len(answer):
            continue
        total += 1
        equal += mine == min(theirs, most)
    return equal, total
