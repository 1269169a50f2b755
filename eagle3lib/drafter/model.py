"""The one forward of an EAGLE-3 drafter: training, simulation and parity all call it.

``unroll`` runs K steps from every base position of many conversations at once. Conversations are
packed end to end (no padding in matrix products); only keys and values are made for every position,
queries, the MLP and the head for base positions alone. What differs between kinds of drafter stands
in ``layers.py``, what is attended to in ``attention.py``.

Reference: in fp32 this is the forward that engines, formats and fast paths are compared with. Cost
per base position and step: one layer and one head.

On a GPU the same runs as fused pieces: ``flex.py`` for the attention, and what stands before and
after it compiled, once for all steps and sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from eagle3lib.drafter.align import input_index
from eagle3lib.drafter.attention import Attention, chain_attention
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.flex import flex_chain_attention
from eagle3lib.drafter.layers import Layer, RMSNorm, Rotary
from eagle3lib.drafter.rows import PackedRows


class Drafter(nn.Module):
    """Parameter names are those of the SGLang/SpecForge-style checkpoint."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        c, slots_width = config, len(config.slots) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.input_norm = RMSNorm(slots_width, c.rms_norm_eps) if c.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.slots)
            if c.fc_norm
            else None
        )
        self.fc = nn.Linear(slots_width, c.hidden_size, bias=False)
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(c.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(c.vocab_size, dtype=torch.bool))
        self._rotary = Rotary(c)

    def fuse(self, states: Float[Tensor, "N SH"]) -> Float[Tensor, "N H"]:
        """The slots of every token as one state of the drafter's width."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            states = torch.cat(normed, dim=-1)
        return self.fc(states)

    def logits(self, hidden: Float[Tensor, "P H"]) -> Float[Tensor, "P D"]:
        """Of the layer's output, whatever the options: the head always reads the normed state."""
        return self.lm_head(self.norm(hidden))

    def fed_back(self, hidden: Float[Tensor, "P H"]) -> Float[Tensor, "P H"]:
        """What the next step reads: the layer's output, normed with ``norm_output`` (EAGLE 3.1)."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def target_ids(self, draft_ids: Int64[Tensor, " P"]) -> Int64[Tensor, " P"]:
        return draft_ids + self.d2t[draft_ids]

    def turn(self, positions: Int64[Tensor, " N"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, [N, 1, rotary width] each."""
        return self._rotary.turn(positions, dtype)


@dataclass(frozen=True)
class Step:
    """What one step made: the layer's output before ``norm`` at every base position (with
    ``norm_output`` too), and its draft if asked for."""

    hidden: Float[Tensor, "P H"]
    drafts: Int64[Tensor, " P"] | None  # target ids


def unroll(
    drafter: Drafter,
    rows: PackedRows,
    states: Float[Tensor, "N SH"],
    steps: int,
    *,
    feed: str,
    attention: Attention | None = None,
) -> list[Step]:
    """Run ``steps`` steps from every base position.

    ``states`` are the slots of every token, concatenated; rows follow their device. ``feed``:
    "truth" gives step j the conversation's own token (training-time test; a token beyond the end
    repeats the last one, its label does not exist), "draft" gives it the greedy draft of step j - 1
    (serving). ``attention``: None takes the device's own, and compiled pieces on a GPU; one that is
    named runs everything eagerly (``chain_attention`` is the reference).
    """
    fast = attention is None and states.is_cuda
    attention = attention or (flex_chain_attention if fast else chain_attention)
    before, after, target_keys = (
        _compiled(piece) if fast else piece for piece in (_before, _after, _target_keys)
    )
    rows = rows.to(states.device)
    fused = drafter.fuse(states)
    # Position p reads x[p+1]; the last one of a conversation has none, is given whatever follows it
    # in the pack, and is beyond every base position, so no query sees it.
    following = torch.cat((rows.token_ids[1:], rows.token_ids[-1:]))
    keys, values = target_keys(drafter, following, fused, rows.position)
    attend = attention(drafter.midlayer.self_attn.scale, rows, keys, values)
    hidden = fused[rows.row_start + rows.base]
    tokens = _truth(rows, 0)
    made: list[Step] = []
    for step in range(steps):
        query, key, value, residual = before(drafter, tokens, hidden, rows.base + step)
        output = after(drafter, attend(query, key, value, step), residual)
        drafts = None
        if feed == "draft":
            drafts = drafter.target_ids(drafter.logits(output).argmax(-1))
        made.append(Step(output, drafts))
        hidden = drafter.fed_back(output)
        tokens = drafts if drafts is not None else _truth(rows, step + 1)
    return made


def _truth(rows: PackedRows, step: int) -> Tensor:
    return rows.token_ids[rows.row_start + input_index(rows.base, step).minimum(rows.total - 1)]


def _target_keys(
    drafter: Drafter, following: Tensor, fused: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Step-0 keys and values of every position, made from the target's states: [N, kv, d]."""
    mixed, _ = drafter.midlayer.mix(drafter.embed_tokens(following), fused)
    turn = drafter.turn(positions, mixed.dtype)
    return drafter.midlayer.self_attn.keys_values(mixed, turn)


def _before(
    drafter: Drafter, tokens: Tensor, hidden: Tensor, rotary: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(query [P, heads, dk], key [P, kv, dk], value [P, kv, dv], residual [P, H]) of a step."""
    layer = drafter.midlayer
    mixed, residual = layer.mix(drafter.embed_tokens(tokens), hidden)
    turn = drafter.turn(rotary, mixed.dtype)
    key, value = layer.self_attn.keys_values(mixed, turn)
    return layer.self_attn.queries(mixed, turn), key, value, residual


def _after(drafter: Drafter, read: Tensor, residual: Tensor) -> Tensor:
    """The layer's output [P, H] from what the attention read."""
    return drafter.midlayer.finish(read, residual)


@cache
def _compiled(piece: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(piece, dynamic=True)
