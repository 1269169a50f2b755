"""Counterfactuals: what an engine would have recorded, had it this fault; what a drafter would
reach, were it mended.

Every variant is one change to a ``Setting`` and the code of the cause that it proves. A variant
whose rounds are the engine's record, where the drafter as exported does not give them, names the
engine's fault; one that is accepted clearly more often names the checkpoint's. Cost: one unroll
over the recorded answers a variant, no target forward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.served import (
    Answered,
    Setting,
    accepted_at,
    drafts_of,
    replays,
    rounds_equal,
)
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


@dataclass(frozen=True)
class Outcome:
    """One line of the table. ``gain`` is accepted drafts a base position beyond the drafter as
    exported, paired, with its standard error over answers. ``up_to``: (rounds equal, rounds) when
    only the first 1, 2, ... K - 1 drafts of each round are looked at."""

    cause: str
    label: str
    rounds_equal: int
    rounds: int
    acceptance_length: float | None
    gain: float
    gain_error: float
    accepted: tuple[int, ...]  # at every base position of all answers, end to end
    up_to: tuple[tuple[int, int], ...] = ()

    @property
    def equal_share(self) -> float:
        return self.rounds_equal / self.rounds if self.rounds else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "variant": self.label,
            "rounds_equal": self.rounds_equal,
            "rounds": self.rounds,
            "acceptance_length": self.acceptance_length,
            "gain_per_position": round(self.gain, 4),
            "gain_error": round(self.gain_error, 4),
        }


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


def is_explained(table: Sequence[Outcome]) -> bool:
    """Whether a variant leaves a tenth of the differing rounds at most; the drafter as exported
    comes first."""
    most = max((o.rounds_equal for o in table[1:]), default=0)
    return _leaves_a_tenth(most, table[0].rounds_equal, table[0].rounds)


def explained_up_to(table: Sequence[Outcome], least: int) -> int | None:
    """The most drafts of a round, fewer than K, by which a variant explains what differs in
    ``least`` rounds or more: a fault that does more further on. None where there is none."""
    plain = table[0]
    for k in range(len(plain.up_to), 0, -1):
        equal, rounds = plain.up_to[k - 1]
        most = max((o.up_to[k - 1][0] for o in table[1:] if len(o.up_to) >= k), default=0)
        if rounds - equal >= least and _leaves_a_tenth(most, equal, rounds):
            return k
    return None


def _leaves_a_tenth(most: int, plain: int, rounds: int) -> bool:
    return rounds - most <= 0.1 * (rounds - plain)


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


def outcomes(
    base: Setting,
    variants: Sequence[Variant],
    answers: Sequence[Answered],
    known: Sequence[Outcome] = (),
) -> list[Outcome]:
    """The table, the drafter as exported first. Variants that change nothing are left out; those
    of the same label in ``known``, a table of the same drafter and answers, are not made again."""
    made = {o.label: o for o in known}
    plain = made.get("as exported") or _outcome("", "as exported", base, answers, None)
    table = [plain]
    for variant in variants:
        if variant.label in made:
            table.append(replace(made[variant.label], cause=variant.cause))
        elif (setting := variant.apply(base)) is not None:
            table.append(_outcome(variant.cause, variant.label, setting, answers, plain))
    return table


def _outcome(
    cause: str, label: str, setting: Setting, answers: Sequence[Answered], plain: Outcome | None
) -> Outcome:
    drafts = drafts_of(setting, answers)
    equal, rounds = _equal(drafts, answers, setting.steps)
    counts = [accepted_at(d, a.answer) for d, a in zip(drafts, answers, strict=True)]
    walked = [n for r in replays(drafts, answers, setting.steps) for n in r.accepted]
    flat = tuple(n for part in counts for n in part)
    gain, error = _paired(counts, plain.accepted if plain else flat)
    return Outcome(
        cause, label, equal, rounds, round(1 + sum(walked) / len(walked), 4) if walked else None,
        gain, error, flat, tuple(_equal(drafts, answers, k) for k in range(1, setting.steps)),
    )  # fmt: skip


def _equal(drafts: list[Tensor], answers: Sequence[Answered], steps: int) -> tuple[int, int]:
    """(rounds equal, rounds) by the first ``steps`` drafts of each round."""
    pairs = [
        rounds_equal(d[:, :steps], a) for d, a in zip(drafts, answers, strict=True) if a.accepted
    ]
    return sum(e for e, _ in pairs), sum(n for _, n in pairs)


def _paired(counts: list[list[int]], plain: tuple[int, ...]) -> tuple[float, float]:
    """Mean difference a base position, and its standard error with answers as the units sampled."""
    sums, sizes, at = [], [], 0
    for part in counts:
        sums.append(sum(part) - sum(plain[at : at + len(part)]))
        sizes.append(len(part))
        at += len(part)
    if not at:
        return 0.0, math.inf
    mean = sum(sums) / at
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, sizes, strict=True))
    few = len(sums) / max(len(sums) - 1, 1)
    return mean, math.sqrt(few * spread) / at


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
