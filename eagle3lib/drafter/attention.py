"""The EAGLE-3 attention pattern: every base position sees the target-made keys 0..p of its own
conversation and the steps of its own chain, never another position's chain (``align.py``).

``chain_attention`` is the reference that every faster implementation of the same signature is
compared with. It serves grouped heads (Llama-type, fewer key heads than query heads) and
decompressed latent heads (MLA-type, as many, keys wider than values) alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
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
    real = rows.query_table >= 0
    slot_of = q_table[real].argsort()  # padded [B, Q] order -> order of base positions
    k_target, v_target = (x[k_table].transpose(1, 2) for x in (keys, values))  # [B, kv, T, d]
    chain: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if step > 0:
            chain.append((key, value))
        q = query.unflatten(1, (kv_heads, -1))  # [P, kv, g, dk]
        q = q[q_table].permute(0, 2, 3, 1, 4)  # [B, kv, g, Q, dk]
        scores = q @ k_target.unsqueeze(2).transpose(-1, -2)  # [B, kv, g, Q, T]
        scores = scores.float().masked_fill(~visible[:, None, None], -torch.inf)
        own = [
            (q * k[q_table].transpose(1, 2).unsqueeze(2)).sum(-1, keepdim=True) for k, _ in chain
        ]
        weights = torch.cat([scores, *(s.float() for s in own)], dim=-1).mul(scale)
        weights = weights.softmax(-1).to(query.dtype)
        past = weights[..., : k_table.shape[1]] @ v_target.unsqueeze(2)
        for index, (_, v) in enumerate(chain):
            share = weights[..., k_table.shape[1] + index, None]
            past = past + share * v[q_table].transpose(1, 2).unsqueeze(2)
        out = past.permute(0, 3, 1, 2, 4).flatten(2)  # [B, Q, heads * dv]
        return out[real][slot_of]

    return attend
