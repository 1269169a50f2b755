"""One forward of the target over rows of token ids, and the states that it makes.

Rows are packed end to end where the target's attention allows, each attending to itself alone
(packing.py), what all begin with laid down once; otherwise padded on the right.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from eagle3lib.target.folder import Target
from eagle3lib.target.images import embedded
from eagle3lib.target.model import decoder_of, record_states
from eagle3lib.target.packing import can_pack, packed
from eagle3lib.target.transfer import upload


def length_batches(lengths: list[int], batch_tokens: int, *, pads: bool = True) -> list[list[int]]:
    """Indices in batches of neighbouring length whose size (padded to the longest, where rows are
    padded) stays within ``batch_tokens``."""
    batches: list[list[int]] = []
    total = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        total += lengths[index]
        size = lengths[index] * (len(batches[-1]) + 1) if pads and batches else total
        if not batches or size > batch_tokens:
            batches.append([])
            total = lengths[index]
        batches[-1].append(index)
    return batches


@torch.no_grad()
def forward_states(
    model: Any,
    rows: list[list[int]],
    slots: tuple[int, ...],
    target: Target | None = None,
    pictures: list[list[str]] | None = None,
) -> list[Tensor]:
    """States [T, S + 1, H] of each row of token ids, run as one batch, packed where possible.
    ``pictures``: those of each row, shown to a ``target`` whose vision tower is loaded."""
    decoder = decoder_of(model)
    lengths = [len(row) for row in rows]
    if can_pack(decoder):
        if target is not None and pictures and any(pictures):
            each = [torch.tensor(row) for row in rows]
            shown = [embedded(model, target, *one) for one in zip(each, pictures, strict=True)]
            recorded = forward_packed(model, torch.cat(each), lengths, slots, torch.cat(shown))
            return list(torch.stack(recorded, dim=1).cpu().split(lengths))  # [N, S + 1, H]
        ids, own, shared = laid_out(rows, share=not next(model.parameters()).is_cuda)
        recorded = forward_packed(model, ids, own, slots, shared=shared)
        first, *parts = torch.stack(recorded, dim=1).cpu().split([shared, *own])
        return [torch.cat((first, part)) for part in parts] if shared else parts
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    positions = torch.arange(max(lengths)).expand_as(ids)
    device = next(model.parameters()).device
    with record_states(model, slots) as recorded:
        # The decoder alone: the head's logits over the whole vocabulary are not wanted here.
        decoder(input_ids=ids.to(device), position_ids=positions.to(device), use_cache=False)
        stacked = torch.stack(recorded, dim=2).cpu()  # [B, T, S + 1, H]
    return [stacked[i, :n].clone() for i, n in enumerate(lengths)]


def common_beginning(rows: list[list[int]]) -> int:
    """How many tokens several rows begin with together; each keeps at least one of its own."""
    if len(rows) < 2:
        return 0
    least, most = min(rows), max(rows)  # what these two share, all between them share
    same = (i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b)
    return min(next(same, len(least)), min(map(len, rows)) - 1)


def laid_out(rows: list[list[int]], *, share: bool) -> tuple[Int64[Tensor, " N"], list[int], int]:
    """Rows end to end: the ids, how many of each row's follow, and how many that all rows begin
    with were laid down once, first."""
    shared = common_beginning(rows) if share else 0
    ids = rows[0][:shared] + [token for row in rows for token in row[shared:]]
    return torch.tensor(ids), [len(row) - shared for row in rows], shared


@torch.no_grad()
def forward_packed(
    model: Any,
    ids: Int64[Tensor, " N"],
    lengths: list[int],
    slots: tuple[int, ...],
    shown: Float[Tensor, "N H"] | None = None,
    *,
    shared: int = 0,
) -> list[Float[Tensor, "N H"]]:
    """States of rows laid end to end, one tensor a slot and, last, the pre-norm final one, on the
    model's device: begun there, not waited for. The decoder must be one that ``can_pack``.
    ``shown``: embeddings in the place of those of ``ids``. ``shared``: the first so many ids begin
    every row (not on a GPU); ``lengths`` are then those of what follows."""
    decoder, device = decoder_of(model), next(model.parameters()).device
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    own = torch.arange(len(ids) - shared) - starts.repeat_interleave(torch.tensor(lengths))
    positions = torch.cat((torch.arange(shared), own + shared))
    with record_states(model, slots) as recorded, packed(decoder, lengths, shared):
        entered = (
            {"input_ids": upload(ids[None], device)}
            if shown is None
            else {"inputs_embeds": shown[None]}
        )
        decoder(
            **entered,
            position_ids=upload(positions[None], device),
            use_cache=False,
        )
    return [states[0] for states in recorded]
