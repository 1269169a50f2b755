"""States from the target itself, loaded once and only when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from eagle3lib.target.capture import forward_states
from eagle3lib.target.folder import Target
from eagle3lib.target.model import load_target

StatesOf = Callable[[list[int], tuple[int, ...]], Tensor]  # ids, slots -> [T, slots + 1, H]


def live_states(target: Target, dtype: str) -> StatesOf:
    """One conversation at a time, as in an engine with one request at a time."""
    loaded: list[Any] = []

    def states_of(ids: list[int], slots: tuple[int, ...]) -> Tensor:
        if not loaded:
            loaded.append(load_target(target, dtype))
        return forward_states(loaded[0], [ids], slots)[0]

    return states_of
