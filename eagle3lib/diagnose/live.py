"""States from the target itself, loaded once and only when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eagle3lib.drafter.config import default_slots
from eagle3lib.target.folder import Target
from eagle3lib.target.forward import forward_states
from eagle3lib.target.images import check_text
from eagle3lib.target.model import load_target

StatesOf = Callable[[list[int], tuple[int, ...]], Tensor]  # ids, slots -> [T, slots + 1, H]
_KEPT_BYTES = 10**9


def neighbours(slots: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """The slots, those beside them, and the default ones: what a wrong reading would take."""
    wanted = {s + by for s in slots for by in (-2, -1, 0, 1, 2)}
    if layers >= 7:
        wanted |= set(default_slots(layers))
    return tuple(sorted(w for w in wanted if 0 < w <= layers))


def live_states(target: Target, dtype: str) -> StatesOf:
    """One conversation at a time, as in an engine with one request at a time. The neighbours of the
    slots are captured with them and kept (up to 1 GB): the diagnosis asks for them next.
    Raises ``UserError`` for a conversation that shows images: the text model can't see them."""
    loaded: list[Any] = []
    kept: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor]] = {}

    def states_of(ids: list[int], slots: tuple[int, ...]) -> Tensor:
        layers, states = kept.get(tuple(ids), ((), None))
        if states is None or not set(slots) <= set(layers):
            check_text(target, ids)
            if not loaded:
                loaded.append(load_target(target, dtype))
            layers = tuple(sorted({*slots, *neighbours(slots, target.num_layers)}))
            states = forward_states(loaded[0], [ids], layers)[0]
            if sum(s.nbytes for _, s in kept.values()) + states.nbytes < _KEPT_BYTES:
                kept[tuple(ids)] = layers, states
        chosen = [layers.index(s) for s in slots]
        return torch.cat((states[:, chosen], states[:, -1:]), dim=1)

    return states_of
