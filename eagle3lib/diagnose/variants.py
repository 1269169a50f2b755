"""Counterfactuals: what an engine would have recorded, had it this fault; what a drafter would
reach, were it mended.

Every variant is one change to a ``Setting`` and the code of the cause that it proves. A variant
whose rounds are the engine's record, where the drafter as exported does not give them, names the
engine's fault; one that is accepted clearly more often names the checkpoint's. Cost: one unroll
over the recorded answers a variant, no target forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.served import Setting
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.layers import Rotary
from eagle3lib.drafter.model import Drafter

Change = Callable[[Setting], Setting | None]  # None: the change means nothing here
_INT4, _INT8 = 7, 127


@dataclass(frozen=True)
class Variant:
    cause: str
    label: str
    apply: Change


def altered(drafter: Drafter, change: Callable[[Drafter], None]) -> Drafter:
    """A copy that shares the embedding (the largest tensor, which few variants touch)."""
    memo = {id(drafter.embed_tokens): drafter.embed_tokens}
    twin: Drafter = copy.deepcopy(drafter, memo)
    with torch.no_grad():
        change(twin)
    return twin


def drafter_change(change: Callable[[Drafter], None]) -> Change:
    return lambda s: replace(s, drafter=altered(s.drafter, change))


def engine_variants(layers: int) -> list[Variant]:
    """What engines were seen to do wrong; ``layers`` of the target."""
    slot_shifts = [
        Variant("engine-layer-ids", f"slots {by:+d}", _slots_by(by, layers)) for by in (1, -1)
    ]
    return [
        *slot_shifts,
        Variant("engine-layer-ids", "slots in reverse", _reversed_slots),
        Variant("engine-layer-ids", "default slots", _default_slots(layers)),
        Variant("engine-position", "draft steps one position late", _late(1)),
        Variant("engine-position", "every step one position late", _all_late),
        Variant("engine-position", "draft steps at the base position", _stuck),
        Variant("engine-state-shift", "state of p - 1", lambda s: replace(s, state_shift=1)),
        Variant("engine-state-shift", "state of p + 1", lambda s: replace(s, state_shift=-1)),
        Variant("engine-token-shift", "token x[p] enters", lambda s: replace(s, token_shift=1)),
        Variant("engine-zero-states", "states are zeros", lambda s: replace(s, zero_states=True)),
        Variant("engine-prefix-cache", "prompt's draft keys lost", _lost_prefix),
        Variant("engine-map-ignored", "draft ids as target ids", _map_ignored),
        Variant("engine-map-misread", "offsets read as ids", _map_misread),
        Variant("engine-embeddings", "embeddings are zeros", drafter_change(_zero_embeddings)),
        Variant("engine-rope", "rotary base 10,000", rope_change(_base_10000)),
        Variant("engine-rope", "rotary scaling dropped", rope_change(_unscaled)),
        Variant("engine-recurrent-norm", "norm_output the other way", _other_norm_output),
        Variant("engine-residual", "norm_before_residual the other way", _other_residual),
        Variant("engine-norm-skipped", "hidden_norm skipped", _without_norm("hidden_norm")),
        Variant("engine-norm-skipped", "last norm skipped", _without_norm("norm")),
        Variant("engine-norm-skipped", "fc_norm skipped", _without_fc_norm),
        Variant("engine-quantised", "four bits", drafter_change(lambda d: _round_to(d, _INT4))),
        Variant("engine-quantised", "eight bits", drafter_change(lambda d: _round_to(d, _INT8))),
        Variant("engine-tensor-parallel", "second rank's half lost", drafter_change(_half_lost)),
        Variant("engine-tensor-parallel", "first rank's half lost", drafter_change(_first_lost)),
    ]  # fmt: skip


def wider_variants(layers: int) -> list[Variant]:
    """Asked when none of ``engine_variants`` explains the record: one slot alone, other orders and
    other distances."""
    alone = [
        Variant("engine-layer-ids", f"slot {at + 1} alone {by:+d}", _slot_by(at, by, layers))
        for at in range(3) for by in (1, -1)
    ]  # fmt: skip
    orders = [(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)]
    return [
        *alone,
        *(Variant("engine-layer-ids", f"slots in order {order}", _slot_order(order))
          for order in orders),
        *(Variant("engine-layer-ids", f"slots {by:+d}", _slots_by(by, layers)) for by in (2, -2)),
        *(Variant("engine-position", f"draft steps {by:+d} positions", _late(by))
          for by in (2, -1, -2)),
        *(Variant("engine-quantised", f"{name} bits, not fc",
                  drafter_change(lambda d, n=levels: _round_to(d, n, "midlayer.")))
          for name, levels in (("four", _INT4), ("eight", _INT8))),
    ]  # fmt: skip


def mended_variants(layers: int, target_rope: dict[str, Any], embedding: Tensor) -> list[Variant]:
    """What can be undone in a checkpoint without its training: each is a fault if it gains."""
    return [
        *(Variant("layer-ids-not-trained", f"slots {by:+d}", _slots_by(by, layers))
          for by in (1, -1)),
        Variant("layer-ids-not-trained", "default slots", _default_slots(layers)),
        Variant("layer-ids-not-trained", "slots in reverse", _reversed_slots),
        Variant("vocab-map", "d2t as absolute ids", _map_misread),
        Variant("rope-not-trained", "the target's rotary", rope_change(lambda _: target_rope)),
        Variant("option-not-trained", "norm_output the other way", _other_norm_output),
        Variant("option-not-trained", "norm_before_residual the other way", _other_residual),
        Variant("embeddings-not-targets", "the target's embeddings", _with_embedding(embedding)),
    ]  # fmt: skip


def _slots_by(by: int, layers: int) -> Change:
    def shifted(s: Setting) -> Setting | None:
        wanted = tuple(slot + by for slot in s.slots)
        return replace(s, slots=wanted) if all(0 < w <= layers for w in wanted) else None

    return shifted


def _default_slots(layers: int) -> Change:
    def default(s: Setting) -> Setting | None:
        if layers < 7 or len(s.slots) != 3 or s.slots == default_slots(layers):
            return None
        return replace(s, slots=default_slots(layers))

    return default


def _reversed_slots(s: Setting) -> Setting:
    return replace(s, slots=s.slots[::-1])


def _slot_by(at: int, by: int, layers: int) -> Change:
    def shifted(s: Setting) -> Setting | None:
        if at >= len(s.slots) or not 0 < s.slots[at] + by <= layers:
            return None
        return replace(s, slots=(*s.slots[:at], s.slots[at] + by, *s.slots[at + 1 :]))

    return shifted


def _slot_order(order: tuple[int, ...]) -> Change:
    def ordered(s: Setting) -> Setting | None:
        return replace(s, slots=tuple(s.slots[i] for i in order)) if len(s.slots) == 3 else None

    return ordered


def _late(by: int) -> Change:
    """Draft steps after the first turn by ``by`` positions too many."""

    def late(s: Setting) -> Setting | None:
        return replace(s, chain=(0, *(by,) * (s.steps - 1))) if s.steps > 1 else None

    return late


def _all_late(s: Setting) -> Setting:
    return replace(s, chain=(1,) * s.steps)


def _stuck(s: Setting) -> Setting | None:
    return replace(s, chain=tuple(-k for k in range(s.steps))) if s.steps > 1 else None


def _lost_prefix(s: Setting) -> Setting:
    return replace(s, lost_prefix=True)


def _map_ignored(s: Setting) -> Setting | None:
    if not bool(s.drafter.d2t.any()):
        return None
    return replace(s, drafter=altered(s.drafter, lambda d: d.d2t.zero_()))


def _map_misread(s: Setting) -> Setting | None:
    if not bool(s.drafter.d2t.any()):
        return None

    def misread(d: Drafter) -> None:
        d.d2t -= torch.arange(len(d.d2t))

    return replace(s, drafter=altered(s.drafter, misread))


def _zero_embeddings(d: Drafter) -> None:
    d.embed_tokens = _embedding(torch.zeros_like(d.embed_tokens.weight))


def _embedding(weight: Tensor) -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(weight)


def _with_embedding(weight: Tensor) -> Change:
    def given(s: Setting) -> Setting | None:
        if not s.drafter.config.own_embeddings:
            return None

        def change(d: Drafter) -> None:
            d.embed_tokens = _embedding(weight.to(d.fc.weight.dtype))

        return replace(s, drafter=altered(s.drafter, change))

    return given


def rope_change(settings: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    """Another rotary embedding; None where it is the same."""

    def turned(s: Setting) -> Setting | None:
        now = s.drafter.config.rope_parameters
        wanted = settings(dict(now))
        if wanted == now:
            return None

        def change(d: Drafter) -> None:
            d.config = replace(d.config, rope_parameters=wanted)
            d._rotary = Rotary(d.config)

        return replace(s, drafter=altered(s.drafter, change))

    return turned


def _base_10000(rope: dict[str, Any]) -> dict[str, Any]:
    return rope | {"rope_theta": 10_000.0}


def _unscaled(rope: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": rope["rope_theta"]}


def _other_norm_output(s: Setting) -> Setting | None:
    if s.steps < 2:
        return None

    def change(d: Drafter) -> None:
        d.config = replace(d.config, norm_output=not d.config.norm_output)

    return replace(s, drafter=altered(s.drafter, change))


def _other_residual(s: Setting) -> Setting:
    def change(d: Drafter) -> None:
        d.midlayer.norm_before_residual = not d.midlayer.norm_before_residual

    return replace(s, drafter=altered(s.drafter, change))


class _Through(torch.nn.Module):
    """A norm that is not applied."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def _without_norm(name: str) -> Change:
    def change(d: Drafter) -> None:
        setattr(d.midlayer if name == "hidden_norm" else d, name, _Through())

    return drafter_change(change)


def _without_fc_norm(s: Setting) -> Setting | None:
    if s.drafter.fc_norm is None:
        return None

    def change(d: Drafter) -> None:
        d.fc_norm = None

    return replace(s, drafter=altered(s.drafter, change))


def _round_to(d: Drafter, levels: int, only: str = "") -> None:
    """Every matrix of the layer and ``fc`` (or whose name starts with ``only``) to 2 x levels + 1
    values a row, as weight-only quantisation does."""
    for name, parameter in d.named_parameters():
        chosen = name.startswith(only) and not name.startswith(("embed_tokens", "lm_head"))
        if parameter.ndim == 2 and chosen:
            scale = parameter.abs().amax(-1, keepdim=True).clamp(min=1e-12) / levels
            parameter.copy_((parameter / scale).round() * scale)


def _half_lost(d: Drafter) -> None:
    for weight in (d.midlayer.self_attn.o_proj.weight, d.midlayer.mlp.down_proj.weight):
        weight[:, weight.shape[1] // 2 :] = 0


def _first_lost(d: Drafter) -> None:
    for weight in (d.midlayer.self_attn.o_proj.weight, d.midlayer.mlp.down_proj.weight):
        weight[:, : weight.shape[1] // 2] = 0
