"""The one forward of a Llama-type EAGLE-3 drafter: training, simulation and parity all call it.

``unroll`` runs K steps from every base position of many conversations at once. Conversations are
packed end to end (no padding in matrix products); only keys and values are made for every position,
queries, the MLP and the head for base positions alone. Attention follows ``align.py``: every base
position sees the target-made keys 0..p and its own chain, never another position's chain.

Reference: in fp32 this is the forward that engines, formats and fast paths are compared with. Cost
per base position and step: one layer and one head; attention pads to the longest conversation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3lib.drafter.align import base_positions, base_span, input_index
from eagle3lib.drafter.config import DrafterConfig


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=False)


class _MLP(nn.Module):
    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """``midlayer``: attention over concat(input_layernorm(embedding), hidden_norm(hidden))."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = _MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class _Rotary(LlamaRotaryEmbedding):
    """Its frequencies stay fp32 under ``.to(bfloat16)``, as in engines: rounded to eight bits they
    turn position 500 by up to a radian too far."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Rotary:
        return super()._apply(lambda t: t.to(fn(t).device), recurse)


class Drafter(nn.Module):
    """Parameter names are those of the SGLang/SpecForge-style checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(
            len(config.slots) * config.target_hidden_size, config.hidden_size, bias=False
        )
        self.midlayer = _Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._rotary = _Rotary(_llama_config(config))

    def logits(self, hidden: Float[Tensor, "P H"]) -> Float[Tensor, "P D"]:
        return self.lm_head(self.norm(hidden))

    def target_ids(self, draft_ids: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        return draft_ids + self.d2t[draft_ids]

    def rotate(self, x: Float[Tensor, "N heads hd"], positions: Int64[Tensor, " N"]) -> Tensor:
        """Rotary embedding in the half-split (NeoX) layout that Llama checkpoints use."""
        cos, sin = self._rotary(x.unsqueeze(0), positions.unsqueeze(0))  # [1, N, hd]
        cos, sin = cos[0].unsqueeze(1).to(x.dtype), sin[0].unsqueeze(1).to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


def _llama_config(c: DrafterConfig) -> Any:
    return LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=dict(c.rope_parameters),
    )


@dataclass(frozen=True)
class PackedRows:
    """Conversations end to end, and the base positions to unroll from.

    ``base`` and ``total`` are per base position: its index within its own conversation and that
    conversation's length. The index tables carry padding for attention only.
    """

    token_ids: Int64[Tensor, " N"]
    position: Int64[Tensor, " N"]  # index within the conversation
    base: Int64[Tensor, " P"]
    total: Int64[Tensor, " P"]
    row_start: Int64[Tensor, " P"]  # where the base position's conversation starts in the pack
    query_table: Int64[Tensor, "B Q"]  # base positions by conversation, -1 is padding
    key_table: Int64[Tensor, "B T"]  # packed indices by conversation, -1 is padding

    @classmethod
    def pack(cls, rows: list[Tensor], prompt_tokens: list[int]) -> PackedRows:
        """``rows``: token ids of each conversation; ``prompt_tokens``: how many of them are
        prompt."""
        lengths = [len(row) for row in rows]
        starts = [sum(lengths[:i]) for i in range(len(rows))]
        bases = [
            base_positions(base_span(n, t)) for n, t in zip(prompt_tokens, lengths, strict=True)
        ]
        counts = [len(b) for b in bases]
        first_base = [sum(counts[:i]) for i in range(len(rows))]
        return cls(
            token_ids=torch.cat(rows),
            position=torch.cat([torch.arange(t) for t in lengths]),
            base=torch.cat(bases),
            total=torch.repeat_interleave(torch.tensor(lengths), torch.tensor(counts)),
            row_start=torch.repeat_interleave(torch.tensor(starts), torch.tensor(counts)),
            query_table=_table(first_base, counts),
            key_table=_table(starts, lengths),
        )


def _table(starts: list[int], counts: list[int]) -> Tensor:
    table = torch.full((len(starts), max(counts, default=0)), -1)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        table[row, :count] = torch.arange(start, start + count)
    return table


@dataclass(frozen=True)
class Step:
    """What one step made: the pre-norm output of every base position, and its draft if asked
    for."""

    hidden: Float[Tensor, "P H"]
    drafts: Int64[Tensor, " P"] | None  # target ids


def unroll(
    drafter: Drafter, rows: PackedRows, states: Float[Tensor, "N SH"], steps: int, *, feed: str
) -> list[Step]:
    """Run ``steps`` steps from every base position.

    ``states`` are the slots of every token, concatenated. ``feed``: "truth" gives step j the
    conversation's own token (training-time test; a token beyond the end repeats the last one, its
    label does not exist), "draft" gives it the greedy draft of step j - 1 (serving).
    """
    fused = drafter.fc(states)
    keys, values = _target_keys(drafter, rows, fused)
    here = rows.row_start + rows.base  # packed index of each base position
    hidden = fused[here]
    attend = _chain_attention(drafter, rows, keys, values)
    tokens = _truth(rows, 0)
    made: list[Step] = []
    for step in range(steps):
        hidden = _layer_step(drafter, tokens, hidden, rows.base + step, step, attend)
        drafts = None
        if feed == "draft":
            drafts = drafter.target_ids(drafter.logits(hidden).argmax(-1))
        made.append(Step(hidden, drafts))
        tokens = drafts if drafts is not None else _truth(rows, step + 1)
    return made


def _truth(rows: PackedRows, step: int) -> Tensor:
    return rows.token_ids[rows.row_start + input_index(rows.base, step).minimum(rows.total - 1)]


def _mixed(drafter: Drafter, tokens: Tensor, hidden: Tensor) -> Tensor:
    """concat(input_layernorm(embedding), hidden_norm(hidden)) [., 2H]"""
    embedded = drafter.embed_tokens(tokens).to(hidden.dtype)
    layer = drafter.midlayer
    return torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), dim=-1)


def _target_keys(drafter: Drafter, rows: PackedRows, fused: Tensor) -> tuple[Tensor, Tensor]:
    """Step-0 keys and values of every position, made from the target's states: [N, kv, hd].

    Position p reads x[p+1]; the last one of a conversation has none, is given whatever follows it
    in the pack, and is beyond every base position, so no query sees it.
    """
    following = torch.cat((rows.token_ids[1:], rows.token_ids[-1:]))
    mixed, attention = _mixed(drafter, following, fused), drafter.midlayer.self_attn
    shape = (len(mixed), drafter.config.num_key_value_heads, drafter.config.head_dim)
    keys = drafter.rotate(attention.k_proj(mixed).view(shape), rows.position)
    return keys, attention.v_proj(mixed).view(shape)


Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def _layer_step(
    drafter: Drafter, tokens: Tensor, hidden: Tensor, rotary: Tensor, step: int, attend: Attend
) -> Tensor:
    """One step of the layer at every base position; the residual is the un-normed state."""
    c, layer = drafter.config, drafter.midlayer
    mixed, count = _mixed(drafter, tokens, hidden), len(hidden)
    query = layer.self_attn.q_proj(mixed).view(count, c.num_attention_heads, c.head_dim)
    key = layer.self_attn.k_proj(mixed).view(count, c.num_key_value_heads, c.head_dim)
    value = layer.self_attn.v_proj(mixed).view(count, c.num_key_value_heads, c.head_dim)
    read = attend(drafter.rotate(query, rotary), drafter.rotate(key, rotary), value, step)
    residual = hidden + layer.self_attn.o_proj(read)
    return residual + layer.mlp(layer.post_attention_layernorm(residual))


def _chain_attention(drafter: Drafter, rows: PackedRows, keys: Tensor, values: Tensor) -> Attend:
    """Attention of base positions over target-made keys 0..p and their own chain.

    Returned as a function so that the padded tables are made once for all steps; it remembers the
    chain's keys and values from step 1 on (step 0's own key is the target-made one at p).
    """
    c = drafter.config
    groups = c.num_attention_heads // c.num_key_value_heads
    q_table, k_table = rows.query_table.clamp(min=0), rows.key_table.clamp(min=0)
    key_position = torch.where(
        rows.key_table >= 0, rows.position[k_table], torch.iinfo(torch.int64).max
    )
    visible: Bool[Tensor, "B Q T"] = key_position[:, None, :] <= rows.base[q_table][:, :, None]
    real = rows.query_table >= 0
    slot_of = q_table[real].argsort()  # padded [B, Q] order -> order of base positions
    k_target, v_target = (x[k_table].transpose(1, 2) for x in (keys, values))  # [B, kv, T, hd]
    chain: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, step: int) -> Tensor:
        if step > 0:
            chain.append((key, value))
        q = query.unflatten(1, (c.num_key_value_heads, groups))  # [P, kv, g, hd]
        q = q[q_table].permute(0, 2, 3, 1, 4)  # [B, kv, g, Q, hd]
        scores = q @ k_target.unsqueeze(2).transpose(-1, -2)  # [B, kv, g, Q, T]
        scores = scores.float().masked_fill(~visible[:, None, None], -torch.inf)
        own = [
            (q * k[q_table].transpose(1, 2).unsqueeze(2)).sum(-1, keepdim=True) for k, _ in chain
        ]
        weights = torch.cat([scores, *(s.float() for s in own)], dim=-1).mul(c.head_dim**-0.5)
        weights = weights.softmax(-1).to(query.dtype)
        past = weights[..., : k_table.shape[1]] @ v_target.unsqueeze(2)
        for index, (_, v) in enumerate(chain):
            share = weights[..., k_table.shape[1] + index, None]
            past = past + share * v[q_table].transpose(1, 2).unsqueeze(2)
        out = past.permute(0, 3, 1, 2, 4).flatten(2)  # [B, Q, heads * hd]
        return out[real][slot_of]

    return attend
