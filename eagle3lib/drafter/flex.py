"""Attention of the training-time test on a GPU: equal to ``attention.chain_attention``, and fast.

Every base position sees the target-made keys 0..p of its own conversation and its own chain. The
first part is one ``flex_attention`` over the packed keys, under one block mask that serves all
steps; the chain is at most K dot products a query. Both are softmaxes over parts of one row, so
they merge by their log-sum-exps (as in flash-decoding)::

    out = (e^a * read_target + sum_j e^(s_j) * v_j) / (e^a + sum_j e^(s_j))      a: its lse

Cost: nothing is padded to the longest conversation, and no [positions, keys] matrix exists.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from eagle3lib.drafter.attention import Attend
from eagle3lib.drafter.rows import PackedRows
from eagle3lib.target.flex import interval_mask


def flex_chain_attention(scale: float, rows: PackedRows, keys: Tensor, values: Tensor) -> Attend:
    """``keys`` [N, kv, dk] and ``values`` [N, kv, dv] of all tokens -> ``attend(query [P, heads,
    dk], key [P, kv, dk], value [P, kv, dv], step)`` -> [P, heads * dv].

    Everything lives on one GPU; ``flex_attention`` has no backward on a CPU.
    """
    first, last = rows.row_start, rows.row_start + rows.base  # the keys that a query sees
    mask = interval_mask(first, last, len(keys))
    k_target, v_target = (x.transpose(0, 1).unsqueeze(0) for x in (keys, values))  # [1, kv, N, d]
    chain: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if step > 0:
            chain.append((key, value))
        read, aux = _flex()(
            query.transpose(0, 1).unsqueeze(0),
            k_target,
            v_target,
            block_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
            return_aux=AuxRequest(lse=True),
        )
        read, lse = (
            read[0].transpose(0, 1),
            aux.lse[0].transpose(0, 1),
        )  # [P, heads, dv], [P, heads]
        if not chain:
            return read.flatten(1)
        own_keys = torch.stack([k for k, _ in chain], 1)
        own_values = torch.stack([v for _, v in chain], 1)
        return _merge()(query, read, lse, own_keys, own_values, scale)

    return attend


def _merge_chain(
    query: Tensor, read: Tensor, lse: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """Add the chain's own ``keys`` [P, j, kv, dk] to what was read of the target's, in fp32."""
    kv = keys.shape[2]
    grouped = query.unflatten(1, (kv, -1)).float()  # [P, kv, g, dk]
    # Products and sums, not matrix products: j is a handful, and this way it is one fused kernel.
    scores = (grouped.unsqueeze(1) * keys.float().unsqueeze(3)).sum(-1) * scale  # [P, j, kv, g]
    weights = torch.cat((lse.unflatten(1, (kv, -1)).unsqueeze(1), scores), 1).softmax(1)
    own = (weights[:, 1:].unsqueeze(-1) * values.float().unsqueeze(3)).sum(1)  # [P, kv, g, dv]
    out = weights[:, 0].unsqueeze(-1) * read.unflatten(1, (kv, -1)).float() + own
    return out.flatten(1).to(query.dtype)


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


@cache
def _merge() -> Any:
    return torch.compile(_merge_chain, dynamic=True)
