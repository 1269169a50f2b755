"""The target itself, loaded once and only when it is first asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
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


class LiveTarget:
    """States of a conversation (called, it is a ``StatesOf``), and the target's own answers. One
    conversation at a time, as in an engine with one request at a time. The neighbours of the slots
    are captured with them and kept (up to 1 GB): the diagnosis asks for them next. Raises
    ``UserError`` for a conversation that shows images: the text model can't see them."""

    def __init__(self, target: Target, dtype: str):
        self.target, self.dtype = target, dtype
        self._kept: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor]] = {}

    @cached_property
    def model(self) -> Any:
        return load_target(self.target, self.dtype)

    def __call__(self, ids: list[int], slots: tuple[int, ...]) -> Tensor:
        layers, states = self._kept.get(tuple(ids), ((), None))
        if states is None or not set(slots) <= set(layers):
            check_text(self.target, ids)
            layers = tuple(sorted({*slots, *neighbours(slots, self.target.num_layers)}))
            states = forward_states(self.model, [ids], layers)[0]
            if sum(s.nbytes for _, s in self._kept.values()) + states.nbytes < _KEPT_BYTES:
                self._kept[tuple(ids)] = layers, states
        chosen = [layers.index(s) for s in slots]
        return torch.cat((states[:, chosen], states[:, -1:]), dim=1)

    @torch.no_grad()
    def answer(self, ids: list[int], max_tokens: int) -> list[int]:
        """The greedy answer to a prompt's ids, its stop token included where it comes."""
        check_text(self.target, ids)
        stops, made, cache = set(self.target.stop_ids()), list[int](), None
        fed = torch.tensor([ids])
        while len(made) < max_tokens and not (made and made[-1] in stops):
            out = self.model(input_ids=fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            made.append(int(out.logits[0, -1].argmax()))
            fed = torch.tensor([made[-1:]])
        return made
