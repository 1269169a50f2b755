"""Which of the target's layers a stored slot really is: measured, not believed.

Each stored state is compared with every HF ``hidden_states[i]`` of the same row, with the pre-norm
last state and with the normed one, by relative error |stored - state| / |state|. Neighbouring
layers have cosines close to one, so the closest counts, not the first one that is close.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3lib.lab.finding import Finding
from eagle3lib.target.model import decoder_of
from eagle3lib.target.states import StateEntry, StateStore

FAR = 0.3  # relative error above which a state is none of the target's
_AGAIN = "mend the capture's layer ids, delete the states and run 02_capture_hidden_states again"


@dataclass(frozen=True)
class SlotMatch:
    """A stored slot beside the target's own states. ``LAST`` and ``NORMED`` stand for n and the
    state after the final norm."""

    name: str  # "slot 2" or "last"
    declared: int
    found: int  # HF index whose states are closest; n: pre-norm last; n + 1: after the final norm
    error: float  # relative, at ``found``
    declared_error: float
    cosine: float  # at ``found``, mean over tokens


@torch.no_grad()
def all_states(model: Any, ids: list[int]) -> Float[Tensor, "N T H"]:
    """HF hidden_states[0..n-1], the pre-norm last state, and the normed one, of one row.

    By transformers' own ``output_hidden_states``, not by the hooks that captured.
    """
    decoder = decoder_of(model)
    seen: list[Tensor] = []
    hook = decoder.norm.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        device = next(model.parameters()).device
        made = decoder(
            input_ids=torch.tensor([ids], device=device), output_hidden_states=True, use_cache=False
        )
    finally:
        hook.remove()
    layers = list(made.hidden_states[: decoder.config.num_hidden_layers])
    return torch.stack([*layers, seen[-1], decoder.norm(seen[-1])])[:, 0].float().cpu()


def match_slots(store: StateStore, model: Any, entries: list[StateEntry]) -> list[SlotMatch]:
    """Where each slot and ``last`` of the given rows are found in the target."""
    n = int(decoder_of(model).config.num_hidden_layers)
    names = [f"slot {slot}" for slot in store.slots] + ["last"]
    distance = torch.zeros(len(names), n + 2)  # squared, summed over tokens
    cosine, power, tokens = torch.zeros_like(distance), torch.zeros(len(names), n + 2), 0
    for row in store.rows(entries):
        there = all_states(model, row.token_ids.tolist())  # [N, T, H]
        width = there.shape[2]
        stored = [*row.slots.float().split(width, 1), row.last.float()]
        for i, state in enumerate(stored):
            start = row.entry.first_taught if names[i] == "last" else 0
            mine, theirs = state[start:], there[:, start:]
            distance[i] += (theirs - mine).square().sum((1, 2))
            power[i] += theirs.square().sum((1, 2))
            near = torch.cosine_similarity(theirs, mine[None].expand_as(theirs), dim=-1)
            cosine[i] += near.mean(1)
        tokens += 1
    error = (distance / power.clamp_min(1e-30)).sqrt()
    best = error.argmin(1)
    declared = [*store.slots, n]
    return [
        SlotMatch(
            name,
            declared[i],
            int(best[i]),
            round(float(error[i, best[i]]), 4),
            round(float(error[i, declared[i]]), 4),
            round(float(cosine[i, best[i]]) / max(tokens, 1), 6),
        )
        for i, name in enumerate(names)
    ]


def check_layers(matches: list[SlotMatch], num_layers: int) -> list[Finding]:
    """Findings that name how the stored layers differ from what the store says, if they do."""
    *slots, last = matches
    evidence = "; ".join(f"{m.name}: {_place(m, num_layers)}" for m in matches)
    titles = []
    if any(m.error > FAR for m in matches):
        titles.append("some states are none of the target's: another target, other rows, or damage")
    else:
        titles += [_slots_title(slots, num_layers), _last_title(last, num_layers)]
    return [
        Finding("state-layers", "error", title, evidence, _AGAIN, "states")
        for title in titles
        if title
    ]


def _place(match: SlotMatch, n: int) -> str:
    names = {n: "the pre-norm last state", n + 1: "the normed last state"}
    where = names.get(match.found, f"HF hidden_states[{match.found}]")
    return f"closest to {where} (relative error {match.error:.3f}, cosine {match.cosine:.4f})"


def _slots_title(slots: list[SlotMatch], n: int) -> str:
    declared, found = [m.declared for m in slots], [m.found for m in slots]
    if found == declared:
        return ""
    shifts = {f - d for f, d in zip(found, declared, strict=True)}
    if shifts == {1}:
        return "slots are output-of-layer ids, shifted by one: slot k holds HF hidden_states[k + 1]"
    if shifts == {-1}:
        return "slots are shifted by one downwards: slot k holds HF hidden_states[k - 1]"
    if found == declared[::-1]:
        return "slots are in reversed order"
    if sorted(found) == sorted(declared):
        return f"slots are in another order: {found} where {declared} are declared"
    if any(f > n for f in found):
        return "a slot holds the normed last state"
    return f"slots are other layers: HF {found} where {declared} are declared"


def _last_title(last: SlotMatch, n: int) -> str:
    if last.found == n:
        return ""
    if last.found == n + 1:
        return "last is post-norm: the head would norm it a second time"
    return f"last is HF hidden_states[{last.found}], not the input of the final norm"
