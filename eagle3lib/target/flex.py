"""The block mask of ``flex_attention`` where each query sees one run of packed keys."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128  # flex_attention's own block size


def interval_mask(first: Tensor, last: Tensor, keys: int) -> BlockMask:
    """Query i sees keys ``first[i]..last[i]``, made block by block: [P, keys] would not fit."""
    queries, device = len(first), first.device
    blocks = -(-queries // _BLOCK)
    pad = blocks * _BLOCK - queries
    # Padding repeats the last query: it widens no block.
    starts = torch.cat((first, first[-1:].expand(pad))).view(blocks, _BLOCK)
    ends = torch.cat((last, last[-1:].expand(pad))).view(blocks, _BLOCK)
    begin = torch.arange(0, keys, _BLOCK, device=device)
    end = (begin + _BLOCK - 1).clamp(max=keys - 1)
    touched = (starts.amin(1)[:, None] <= end) & (ends.amax(1)[:, None] >= begin)
    whole = (starts.amax(1)[:, None] <= begin) & (ends.amin(1)[:, None] >= end)
    whole &= (begin + _BLOCK <= keys)[None]  # a ragged last block is masked by the kernel's own

    partial_counts, partial_order = _listed(touched & ~whole)
    full_counts, full_order = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_order,
        full_counts,
        full_order,
        BLOCK_SIZE=_BLOCK,
        # A lambda: type checks at run time wrap functions, and a mask's must be traced.
        mask_mod=lambda b, h, q, k: (first[q] <= k) & (k <= last[q]),
        seq_lengths=(queries, keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each row are set, and their columns first: [1, 1, Q], [1, 1, Q, K]."""
    counts = blocks.sum(1, dtype=torch.int32)
    order = blocks.int().argsort(dim=1, descending=True, stable=True).int()
    return counts[None, None], order.contiguous()[None, None]
