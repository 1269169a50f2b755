"""Many conversations in one forward without padding, each attending to itself alone.

Rows are laid end to end as one sequence [1, N]; positions start anew at each row, and attention is
computed row by row. Everything else in a layer works token by token, so a batch costs its tokens
and nothing more. The states equal those of each row run alone, but for rounding in other matrix
sizes. On a GPU the rows of a batch are one ``flex_attention``, where a row's own are not needed.

Rows that begin with the same tokens (a system prompt, a chat template) can share them: these are
laid down and computed once, and each row attends to them and to its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from eagle3lib.target.flex import interval_mask
from eagle3lib.target.transfer import upload

_NAME = "eagle3_packed"


@dataclass(frozen=True)
class _Pack:
    lengths: list[int]  # of each row beyond what all share
    shared: int = 0  # tokens that come first and that all rows attend to
    masks: dict[int | None, Any] = field(default_factory=dict)  # by window, for all layers
    seen: dict[tuple[int, int, int | None], Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Any:
        if window not in self.masks:
            lengths = torch.tensor(self.lengths)
            last = torch.arange(int(lengths.sum()))
            first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
            if window is not None:
                first = first.maximum(last + 1 - window)
            sides = upload(first, device), upload(last, device)
            self.masks[window] = interval_mask(*sides, len(last))
        return self.masks[window]

    def row_mask(self, tokens: int, before: int, window: int | None) -> Tensor | None:
        """[T, before + T], true where a position of a row that follows ``before`` shared tokens
        sees; None where plain causal attention is the same."""
        key = tokens, before, window
        if key not in self.seen:
            hides = window is not None and before + tokens > window
            mask = None
            if before or hides:
                mask = torch.ones(tokens, before + tokens, dtype=torch.bool).tril(before)
            if mask is not None and hides and window is not None:
                mask &= torch.ones_like(mask).triu(before + 1 - window)
            self.seen[key] = mask
        return self.seen[key]


_pack: ContextVar[_Pack] = ContextVar("the packed rows")


def can_pack(decoder: Any) -> bool:
    """Whether a decoder's attention can be replaced, and nothing but attention mixes positions
    (recurrent and convolutional layers would run from one row into the next)."""
    kinds = set(getattr(decoder.config, "layer_types", None) or ["full_attention"])
    return (
        bool(getattr(decoder, "_supports_attention_backend", False))
        and not getattr(decoder, "_is_stateful", False)
        and kinds <= {"full_attention", "sliding_attention"}
    )


@contextlib.contextmanager
def packed(decoder: Any, lengths: list[int], shared: int = 0) -> Iterator[None]:
    """Within it the decoder takes rows of ``lengths`` laid end to end, after ``shared`` tokens that
    belong to each of them (not on a GPU)."""
    from transformers import AttentionInterface

    # A name that transformers knows no mask for: it then builds none, which would be N x N.
    AttentionInterface.register(_NAME, packed_attention)
    before, token = decoder.config._attn_implementation, _pack.set(_Pack(list(lengths), shared))
    decoder.config._attn_implementation = _NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
        _pack.reset(token)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of each row to itself, as transformers' attention functions are called.

    query [1, Hq, N, D], key [1, Hk, N, D], value [1, Hk, N, Dv] -> [1, N, Hq, Dv]. ``s_aux`` [Hq]
    are gpt-oss's sinks, ``softcap`` is Gemma 2's tanh on the scores.
    """
    pack = _pack.get()
    lengths = [pack.shared, *pack.lengths] if pack.shared else pack.lengths
    assert query.shape[:1] == (1,) and query.shape[2] == key.shape[2] == sum(lengths)
    plain = softcap is None and s_aux is None
    if query.is_cuda and plain and query.shape[3] == value.shape[3]:
        return _all_rows(query, key, value, scaling, sliding_window), None
    parts = zip(
        query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True
    )
    first_k, first_v = key[:, :, : pack.shared], value[:, :, : pack.shared]
    rows = []
    for q, own_k, own_v in parts:
        before = pack.shared if rows else 0
        k = torch.cat((first_k, own_k), 2) if before else own_k
        v = torch.cat((first_v, own_v), 2) if before else own_v
        mask = pack.row_mask(q.shape[2], before, sliding_window)
        mask = None if mask is None else mask.to(q.device)
        if plain:
            grouped = q.shape[1] != k.shape[1]
            rows.append(
                functional.scaled_dot_product_attention(
                    q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
                )
            )
        else:
            rows.append(_written_out(q, k, v, mask, scaling, softcap, s_aux))
    return torch.cat(rows, dim=2).transpose(1, 2).contiguous(), None


def _all_rows(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> Tensor:
    """All rows at once: launches that don't grow with the number of rows."""
    mask = _pack.get().mask(window, query.device)
    return _compiled_flex()(query, key, value, mask, scaling, query.shape[1] != key.shape[1])


def _flex(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, grouped: bool
) -> Tensor:
    read = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return read.transpose(1, 2).contiguous()


@cache
def _compiled_flex() -> Any:
    # Not the drafter's: torch counts compilations by function, and runs it eagerly (that is, with
    # all scores in memory) when they are many.
    return torch.compile(_flex, dynamic=True)


def _written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """What no fused kernel offers: capped scores, and a sink that shares in the softmax."""
    tokens, keys, groups = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    if mask is None:
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(2, 3) * (scaling if scaling is not None else q.shape[3] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(-1, -1, tokens, -1)
        scores = torch.cat((scores, column), dim=-1)
    shares = functional.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return shares[..., :keys] @ v
