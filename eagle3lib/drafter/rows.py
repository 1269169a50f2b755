"""Conversations packed end to end, and the base positions that a drafter is unrolled from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import accumulate

import torch
from jaxtyping import Int64
from torch import Tensor

from eagle3lib.drafter.align import Span, base_positions, base_span
from eagle3lib.target.transfer import upload


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
    def pack(
        cls, rows: list[Tensor], prompt_tokens: list[int], spans: list[Span] | None = None
    ) -> PackedRows:
        """``rows``: token ids of each conversation; ``prompt_tokens``: how many of them are
        prompt; ``spans``: the base positions of each, None for all that it has."""
        lengths = [len(row) for row in rows]
        starts = [0, *accumulate(lengths)][:-1]
        if spans is None:
            spans = [base_span(n, t) for n, t in zip(prompt_tokens, lengths, strict=True)]
        bases = [base_positions(span) for span in spans]
        counts = [len(b) for b in bases]
        first_base = [0, *accumulate(counts)][:-1]
        return cls(
            token_ids=torch.cat(rows),
            position=torch.cat([torch.arange(t) for t in lengths]),
            base=torch.cat(bases),
            total=torch.repeat_interleave(torch.tensor(lengths), torch.tensor(counts)),
            row_start=torch.repeat_interleave(torch.tensor(starts), torch.tensor(counts)),
            query_table=_table(first_base, counts),
            key_table=_table(starts, lengths),
        )

    def to(self, device: torch.device | str) -> PackedRows:
        """The same rows with every index on ``device``; themselves when they are there."""
        device = torch.device(device)
        if self.token_ids.device == device:
            return self
        return PackedRows(**{f.name: upload(getattr(self, f.name), device) for f in fields(self)})


def _table(starts: list[int], counts: list[int]) -> Tensor:
    table = torch.full((len(starts), max(counts, default=0)), -1)
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        table[row, :count] = torch.arange(start, start + count)
    return table
