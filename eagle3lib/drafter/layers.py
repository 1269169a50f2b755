"""The parts of a drafter's one layer, by kind. Parameter names are those of the checkpoints.

An attention module turns the mixed input [N, 2H] into queries [N, heads, dk] and into keys
[N, kv, dk] and values [N, kv, dv], both already rotated; what is attended to is ``attention.py``'s
matter.

    llama   q_proj, k_proj, v_proj        dk = dv = head_dim, kv <= heads, half-split rotary pairs
    mla     q_a_proj, q_a_layernorm, q_b_proj (or q_proj), kv_a_proj_with_mqa, kv_a_layernorm,
            kv_b_proj                     dk = nope + rope, dv = v_head_dim, kv = heads, the rotary
                                          part (interleaved pairs) of the key shared by all heads

Sources: EAGLE-3 (arXiv 2503.01840); multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3lib.drafter.config import DrafterConfig

Turn = tuple[Tensor, Tensor]  # cos and sin [N, 1, rotary width], the second half repeats the first


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


class Rotary(LlamaRotaryEmbedding):
    """Cosines and sines of positions. The frequencies stay fp32 under ``.to(bfloat16)``, as in
    engines: rounded to eight bits they turn position 500 by up to a radian too far."""

    def __init__(self, c: DrafterConfig):
        super().__init__(_rotary_config(c))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        return super()._apply(lambda t: t.to(fn(t).device), recurse)

    def turn(self, positions: Int64[Tensor, " N"], dtype: torch.dtype) -> Turn:
        cos, sin = self(torch.empty(0, dtype=dtype, device=positions.device), positions[None])
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def _rotary_config(c: DrafterConfig) -> Any:
    return LlamaConfig(
        hidden_size=c.hidden_size,
        num_attention_heads=c.num_attention_heads,
        head_dim=c.mla.qk_rope_head_dim if c.mla else c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters=dict(c.rope_parameters),
    )


def turn_halves(x: Float[Tensor, "N heads d"], turn: Turn) -> Float[Tensor, "N heads d"]:
    """Rotary over the pairs (i, i + d/2), the layout of Llama checkpoints."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


def turn_pairs(x: Float[Tensor, "N heads d"], turn: Turn) -> Float[Tensor, "N heads d"]:
    """Rotary over the pairs (2i, 2i + 1), the layout of DeepSeek checkpoints."""
    cos, sin = (t[..., : t.shape[-1] // 2].to(x.dtype) for t in turn)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class LlamaAttention(nn.Module):
    """Grouped-query attention; ``scale`` = 1 / sqrt(head_dim)."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.heads, self.kv_heads, self.scale = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim**-0.5,
        )
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, c.hidden_size, bias=False)

    def queries(self, mixed: Float[Tensor, "N M"], turn: Turn) -> Float[Tensor, "N heads dk"]:
        return turn_halves(self.q_proj(mixed).unflatten(-1, (self.heads, -1)), turn)

    def keys_values(self, mixed: Float[Tensor, "N M"], turn: Turn) -> tuple[Tensor, Tensor]:
        key = self.k_proj(mixed).unflatten(-1, (self.kv_heads, -1))
        return turn_halves(key, turn), self.v_proj(mixed).unflatten(-1, (self.kv_heads, -1))


class MLAAttention(nn.Module):
    """Multi-head latent attention, keys and values decompressed for every head."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        assert c.mla is not None
        m, width, eps = c.mla, 2 * c.hidden_size, c.rms_norm_eps
        self.heads, self.sizes, self.scale = c.num_attention_heads, m, mla_scale(c)
        queries = self.heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        if m.q_lora_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, m.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(m.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(m.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, m.kv_lora_rank + m.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(m.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(
            m.kv_lora_rank, self.heads * (m.qk_nope_head_dim + m.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(self.heads * m.v_head_dim, c.hidden_size, bias=False)

    def queries(self, mixed: Float[Tensor, "N M"], turn: Turn) -> Float[Tensor, "N heads dk"]:
        if self.sizes.q_lora_rank is None:
            query = self.q_proj(mixed)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(mixed)))
        query = query.unflatten(-1, (self.heads, -1))
        plain, turned = query.split((self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim), -1)
        return torch.cat((plain, turn_pairs(turned, turn)), dim=-1)

    def keys_values(self, mixed: Float[Tensor, "N M"], turn: Turn) -> tuple[Tensor, Tensor]:
        m = self.sizes
        latent, shared = self.kv_a_proj_with_mqa(mixed).split(
            (m.kv_lora_rank, m.qk_rope_head_dim), -1
        )
        wide = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        plain, value = wide.split((m.qk_nope_head_dim, m.v_head_dim), -1)
        turned = turn_pairs(shared.unsqueeze(1), turn).expand(-1, self.heads, -1)
        return torch.cat((plain, turned.to(plain.dtype)), dim=-1), value


def mla_scale(c: DrafterConfig) -> float:
    """Softmax scale of MLA. Under YaRN the factor m = 0.1 mscale_all_dim ln(factor) + 1 enters
    squared (DeepSeek-V2's own code, vLLM and SGLang; a trainer that forgets it trains a drafter
    that engines serve with sharper attention)."""
    assert c.mla is not None
    scale, rope = (c.mla.qk_nope_head_dim + c.mla.qk_rope_head_dim) ** -0.5, c.rope_parameters
    if rope["rope_type"] == "yarn" and rope["factor"] > 1:
        scale *= (0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope["factor"]) + 1.0) ** 2
    return scale


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """``midlayer``: attention over concat(input_layernorm(embedding), hidden_norm(hidden))."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.norm_before_residual = c.norm_before_residual
        self.self_attn = MLAAttention(c) if c.mla else LlamaAttention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def mix(
        self, embedded: Float[Tensor, "N H"], hidden: Float[Tensor, "N H"]
    ) -> tuple[Float[Tensor, "N 2*H"], Float[Tensor, "N H"]]:
        """(input of the attention, the residual it is added to): the residual is the hidden state
        itself, or the normed one with ``norm_before_residual``."""
        normed = self.hidden_norm(hidden)
        mixed = torch.cat((self.input_layernorm(embedded.to(hidden.dtype)), normed), dim=-1)
        return mixed, normed if self.norm_before_residual else hidden

    def finish(self, read: Float[Tensor, "P R"], residual: Float[Tensor, "P H"]) -> Tensor:
        """The layer's output [P, H] from what the attention read."""
        residual = residual + self.self_attn.o_proj(read)
        return residual + self.mlp(self.post_attention_layernorm(residual))
