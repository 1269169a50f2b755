"""The EAGLE-3 attention pattern: every base position sees the target-made keys 0..p of its own
conversation and the steps of its own chain, never another position's chain (``align.py``).

``chain_attention`` is the reference that every faster implementation of the same signature is
compared with. It serves grouped heads (Llama-type, fewer key heads than query heads) and
decompressed latent heads (MLA-type, as many, keys wider than values) alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from eagle3lib.drafter.rows import PackedRows

# (query [P, heads, dk], key [P, kv, dk], value [P, kv, dv], step) -> [P, heads * dv]
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
# (scale, rows, keys [N, kv, dk], values [N, kv, dv]) -> Attend
Attention = Callable[[float, PackedRows, Tensor, Tensor], Attend]


def chain_attention(
    scale: float,
    rows: PackedRows,
    keys: Float[Tensor, "N kv dk"],
    values: Float[Tensor, "N kv dv"],
) -> Attend:
    """Attention of base positions over target-made keys 0..p and their own chain.

    ``scale`` multiplies the scores; the softmax is fp32. Returned as a function so that the padded
    tables are made once for all steps; it remembers the chain's keys and values from step 1 on
    (step 0's own key is the target-made one at p), so the steps are to be asked in order. Memory:
    scores of all conversations, padded to the longest, [B, heads, Q, T].
    """
    kv_heads = keys.shape[1]
    q_table, k_table = rows.query_table.clamp(min=0), rows.key_table.clamp(min=0)
    key_position = torch.where(
        rows.key_table >= 0, rows.position[k_table], torch.iinfo(torch.int64).max
    )
    visible: Bool[Tensor, "B Q T"] = key_position[:, None, :] <= rows.base[q_table][:, :, None]
    hidden = ~visible[:, None, None]
    real = (rows.query_table >= 0).flatten().nonzero()[:, 0]
    place = real[q_table.flatten()[real].argsort()]  # of each base position in padded order
    k_target, v_target = (_padded(x, k_table) for x in (keys, values))  # [B, kv, T, d]
    k_turned = k_target.transpose(-1, -2).flatten(0, 1)  # [B * kv, d, T]
    scaled = keys.new_empty(1, 1, 1)  # not read: the product is scaled where it is made
    chain: list[tuple[Tensor, Tensor]] = []  # [B, kv, 1, Q, d] of each step from 1 on

    def attend(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if step > 0:
            chain.append((_padded(key, q_table).unsqueeze(2), _padded(value, q_table).unsqueeze(2)))
        q = _padded(query, q_table).unflatten(1, (kv_heads, -1))  # [B, kv, g, Q, dk]
        groups, last = q.shape[2], k_table.shape[1]
        # The group's queries share their keys: one product of them all, no copy of the keys each.
        scores = torch.baddbmm(
            scaled, q.flatten(2, 3).flatten(0, 1), k_turned, beta=0, alpha=scale
        ).view(*q.shape[:-1], last)
        scores = scores.float().masked_fill_(hidden, -torch.inf)  # [B, kv, g, Q, T]
        own = [(q * k).sum(-1, keepdim=True).float() * scale for k, _ in chain]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
        read = (weights[..., :last].flatten(2, 3) @ v_target).unflatten(2, (groups, -1))
        for index, (_, v) in enumerate(chain):
            read = read + weights[..., last + index, None] * v
        out = read.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)  # [B * Q, heads * dv]
        return out.index_select(0, place)

    return attend


def _padded(x: Float[Tensor, "N h d"], table: Int64[Tensor, "B L"]) -> Float[Tensor, "B h L d"]:
    """Rows of a pack by conversation. ``index_select``: the backward of plain indexing sorts."""
    picked = x.index_select(0, table.flatten()).unflatten(0, table.shape)  # [B, L, h, d]
    return picked.transpose(1, 2)
