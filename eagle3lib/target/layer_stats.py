"""What the target's states look like, layer by layer: size, outliers, logit lens, likeness.

All of it is of the same answer positions. A position p is picked so that the two tokens after it
are known: x[p+1], which the state there predicts, and x[p+2], which a drafter's first step drafts
from that state (``drafter/align.py``). Layers are HF ``hidden_states`` indices (the state before
that layer); the target's number of layers stands for ``last``, the input of the final norm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.target.images import text_entries
from eagle3lib.target.layers import all_states
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateEntry, StateStore

_CHUNK_POSITIONS = 256  # rows of logits over the whole vocabulary that exist at once


@dataclass(frozen=True)
class LayerStates:
    """States at picked positions of some conversations. Memory: L * P * H * 4 bytes.

    ``first`` are the states of each conversation's first token, which hold the largest numbers
    (attention sinks); NaN for ``last`` where phase 02 does not store it.
    """

    layers: tuple[int, ...]
    slots: tuple[int, ...]
    states: Float[Tensor, "L P H"]
    first: Float[Tensor, "L C H"]
    row: Int64[Tensor, " P"]  # which conversation
    position: Int64[Tensor, " P"]  # in the conversation, prompt included
    next_ids: Int64[Tensor, " P"]  # x[p+1]
    drafted_ids: Int64[Tensor, " P"]  # x[p+2]

    def name(self, index: int) -> str:
        last = index == len(self.layers) - 1
        return "last" if last else str(self.layers[index])


def pick_entries(store: StateStore, most: int, media: set[int]) -> list[StateEntry]:
    """Held-out conversations with a position to look at, evenly picked from all sets; none that
    shows images, whose tokens are ``media``.

    Raises ``UserError`` when there is none.
    """
    usable = [e for e in store.select(split="heldout") if e.tokens - 3 >= e.first_taught]
    usable = text_entries(store, usable, media)
    if not usable:
        raise UserError(
            "no held-out answer has three tokens"
            + (", after a prompt without images" if media else ""),
            where=store.folder,
            next="eagle3 run PROFILE 01 02 heldout_workload=40",
        )
    return usable[:: max(1, len(usable) // most)][:most]


def gather_states(
    store: StateStore,
    entries: Sequence[StateEntry],
    positions: int,
    num_layers: int,
    model: Any = None,
) -> LayerStates:
    """States of about ``positions`` answer positions of ``entries``, evenly picked.

    ``model``: every layer, one forward a conversation; None: the stored slots and ``last``.
    """
    spans = [range(e.first_taught, e.tokens - 2) for e in entries]
    stride = max(1, sum(map(len, spans)) // positions)
    states, first, where = [], [], []
    for number, (entry, span) in enumerate(zip(entries, spans, strict=True)):
        row = store.row(entry)
        if model is None:
            width = row.last.shape[1]
            made = torch.stack([*row.slots.float().split(width, 1), row.last.float()])
            start = made[:, :1].clone()
            start[-1] = start[-1] if entry.first_taught == 0 else torch.nan
        else:
            made = all_states(model, row.token_ids.tolist())[:-1]  # the normed one is no layer
            start = made[:, :1]
        at = torch.tensor(span[::stride])
        states.append(made[:, at])
        first.append(start)
        ids = row.token_ids
        where.append(torch.stack([torch.full_like(at, number), at, ids[at + 1], ids[at + 2]]))
    stacked = torch.cat(states, dim=1)
    layers = (*(store.slots if model is None else range(num_layers)), num_layers)
    return LayerStates(layers, store.slots, stacked, torch.cat(first, dim=1), *torch.cat(where, 1))


def opening(found: LayerStates, tokens: int) -> LayerStates:
    """The first ``tokens`` picked positions of each conversation alone."""
    seen: Counter[int] = Counter()
    keep = []
    for place, row in enumerate(found.row.tolist()):
        keep += [place] if seen[row] < tokens else []
        seen[row] += 1
    at = {
        name: getattr(found, name)[keep] for name in ("row", "position", "next_ids", "drafted_ids")
    }
    return replace(found, states=found.states[:, keep], **at)


def size_lines(found: LayerStates) -> list[dict[str, Any]]:
    """Root mean square of the states over their dimensions: quantiles over positions, and the
    median over the conversations' first tokens."""
    size = found.states.square().mean(-1).sqrt()
    start = found.first.square().mean(-1).sqrt()
    low, middle, high = torch.quantile(size, torch.tensor([0.05, 0.5, 0.95]), dim=1)
    return [
        {
            "layer": found.name(i),
            "positions": size.shape[1],
            "p5": float(low[i]),
            "p50": float(middle[i]),
            "p95": float(high[i]),
            "first_token": float(start[i].median()),
        }
        for i in range(len(found.layers))
    ]


@dataclass(frozen=True)
class Outliers:
    """Dimensions by how much larger they are than the median dimension of their layer."""

    dimensions: Int64[Tensor, " D"]
    ratio: Float[Tensor, "L D"]  # root mean square over positions, over the layer's median one
    energy: Float[Tensor, "L D"]  # share of the layer's sum of squares


def outlier_dimensions(found: LayerStates, most: int = 12) -> Outliers:
    """The ``most`` dimensions whose ratio is largest in any layer, the most extreme first."""
    power = found.states.square().mean(1)  # [L, H]
    ratio = (power / power.median(-1, keepdim=True).values.clamp_min(1e-30)).sqrt()
    chosen = ratio.amax(0).topk(min(most, ratio.shape[1])).indices
    return Outliers(chosen, ratio[:, chosen], (power / power.sum(-1, keepdim=True))[:, chosen])


@dataclass(frozen=True)
class Lens:
    """The target's own head over every layer's state, as if it were the last one (the logit lens:
    nostalgebraist, "interpreting GPT: the logit lens", 2020). Natural logarithms."""

    right: Bool[Tensor, "L P"]  # its first choice is x[p+1]
    next_log_prob: Float[Tensor, "L P"]
    drafted_log_prob: Float[Tensor, "L P"]  # of x[p+2]: what lies further ahead
    entropy: Float[Tensor, "L P"]
    divergence: Float[Tensor, "L P"]  # KL(target's distribution || this layer's)
    choice: Int64[Tensor, "L P"]
    choice_log_prob: Float[Tensor, "L P"]

    def lines(self, found: LayerStates) -> list[dict[str, Any]]:
        """Counts and means of every layer."""
        return [
            {
                "layer": found.name(i),
                "positions": self.right.shape[1],
                "right": int(self.right[i].sum()),
                "next_log_prob": float(self.next_log_prob[i].mean()),
                "entropy": float(self.entropy[i].mean()),
                "divergence": float(self.divergence[i].mean()),
            }
            for i in range(len(found.layers))
        ]


@torch.no_grad()
def logit_lens(found: LayerStates, head: TargetHead) -> Lens:
    """Cost: L * P rows of logits over the whole vocabulary, 256 at a time."""
    parts = [
        _lens_of(head, found, slice(start, start + _CHUNK_POSITIONS))
        for start in range(0, found.states.shape[1], _CHUNK_POSITIONS)
    ]
    return Lens(*(torch.cat(columns, dim=1) for columns in zip(*parts, strict=True)))


def _lens_of(head: TargetHead, found: LayerStates, part: slice) -> tuple[Tensor, ...]:
    """The fields of ``Lens`` at some positions, [L, P'] each."""
    truth, ahead = found.next_ids[part, None], found.drafted_ids[part, None]
    final = head.logits(found.states[-1, part]).float().log_softmax(-1)
    lines = []
    for states in found.states[:, part]:
        q = head.logits(states).float().log_softmax(-1)
        best = q.max(-1)
        lines.append(
            (
                best.indices == truth[:, 0],
                q.gather(1, truth)[:, 0],
                q.gather(1, ahead)[:, 0],
                -(q.exp() * q).sum(-1),
                (final.exp() * (final - q)).sum(-1),
                best.indices,
                best.values,
            )
        )
    return tuple(torch.stack(column) for column in zip(*lines, strict=True))


def cosine_matrix(found: LayerStates) -> Float[Tensor, "L L"]:
    """Mean over positions of the cosine between two layers' states at the same position."""
    unit = torch.nn.functional.normalize(found.states, dim=-1)
    return torch.einsum("iph,jph->ij", unit, unit) / unit.shape[1]


def cka_matrix(found: LayerStates) -> Float[Tensor, "L L"]:
    """Linear CKA between layers (Kornblith et al. 2019, arXiv 1905.00414): 1 where positions lie
    alike up to rotation and scale. With the unbiased estimate of HSIC (Song et al. 2012), since
    positions are not many more than dimensions; it can be slightly below 0."""
    states = found.states.double()
    states = states / states.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-30)
    n = states.shape[1]
    gram = states @ states.transpose(1, 2)
    gram.diagonal(dim1=1, dim2=2).zero_()
    rows, sums, flat = gram.sum(2), gram.sum((1, 2)), gram.flatten(1)
    hsic = flat @ flat.T + sums[:, None] * sums / ((n - 1) * (n - 2)) - 2 / (n - 2) * rows @ rows.T
    own = hsic.diagonal().clamp_min(0).sqrt()
    return (hsic / (own[:, None] * own).clamp_min(1e-300)).float()
