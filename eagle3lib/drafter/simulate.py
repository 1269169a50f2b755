"""The greedy simulator: what an engine would accept, replayed along the answer that it produced.

Every base position's drafts come from one batched ``unroll`` (they depend on target states and on
their own chain alone); rounds are then a walk over them. Equal to vLLM round by round in fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.model import Drafter, PackedRows, unroll


@dataclass(frozen=True)
class Conversation:
    """What the simulator needs of one answered prompt."""

    token_ids: Tensor  # [T] prompt and answer
    prompt_tokens: int
    states: Tensor  # [T, slots * Ht], the slots concatenated


@dataclass(frozen=True)
class Replay:
    """Accepted drafts of each round. ``cut`` tells that the answer ended within the last round's
    accepted drafts: what the target would have said next is unknown, so an engine, which checked
    its drafts before it stopped, may count more there."""

    accepted: list[int]
    cut: bool


def replay_rounds(drafts: Tensor, answer: Sequence[int], steps: int) -> Replay:
    """Walk the rounds of one answer.

    ``drafts`` [P, K]: row r holds the drafts made at the r-th base position, i.e. proposals for
    answer tokens r + 1, r + 2, ... (answer token 0 comes from the prefill).
    """
    proposals = drafts.tolist()
    accepted, at, cut = [], 0, False
    while at < len(answer) - 1:  # answer[at] is known, answer[at + 1] is wanted
        count = 0
        while count < steps and at + 1 + count < len(answer):
            if proposals[at][count] != answer[at + 1 + count]:
                break
            count += 1
        cut = count < steps and at + 1 + count == len(answer)
        accepted.append(count)
        at += count + 1
    return Replay(accepted, cut)


@torch.no_grad()
def simulate(
    drafter: Drafter, conversations: Iterable[Conversation], steps: int, batch_rows: int = 8
) -> list[Replay]:
    """Replay greedy speculation with K = ``steps`` over each conversation, in the given order."""
    items = list(conversations)
    order = sorted(range(len(items)), key=lambda i: len(items[i].token_ids))
    replays: dict[int, Replay] = {}
    weight = drafter.fc.weight
    for start in range(0, len(order), batch_rows):
        chosen = [i for i in order[start : start + batch_rows] if _bases(items[i]) > 0]
        replays |= {i: Replay([], False) for i in order[start : start + batch_rows]}
        if not chosen:
            continue
        rows = PackedRows.pack(
            [items[i].token_ids for i in chosen], [items[i].prompt_tokens for i in chosen]
        )
        states = torch.cat([items[i].states for i in chosen]).to(weight.device, weight.dtype)
        made = unroll(drafter, rows, states, steps, feed="draft")
        drafts = torch.stack([step.drafts for step in made if step.drafts is not None], dim=1)
        for i, part in zip(chosen, drafts.split([_bases(items[i]) for i in chosen]), strict=True):
            answer = items[i].token_ids[items[i].prompt_tokens :].tolist()
            replays[i] = replay_rounds(part, answer, steps)
    return [replays[i] for i in range(len(items))]


def _bases(item: Conversation) -> int:
    return base_span(item.prompt_tokens, len(item.token_ids)).count


def histogram(replays: Iterable[Sequence[int]], steps: int) -> list[int]:
    """Rounds that accepted 0, 1, ..., K drafts."""
    counts = [0] * (steps + 1)
    for accepted in replays:
        for count in accepted:
            counts[count] += 1
    return counts
