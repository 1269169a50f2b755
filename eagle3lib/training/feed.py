"""The parts of a training, each ready while the one before is trained on.

A GPU is given the states and labels of part i + 1 before the training of part i, whose work on the
host (masks, chunks, launches) then falls into the time that it computes them. Stored states are
read on another thread meanwhile. Never more than two parts are there: the next is begun when the
one before is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from eagle3lib.target.stream import LiveStates
from eagle3lib.target.transfer import fetch
from eagle3lib.training.data import Batch, Entries, States, all_finite, assemble, check_finite
from eagle3lib.training.objective import FullHead, Labels

Part = tuple[Batch, Labels] | None  # None: no conversation
Begun = Callable[[], Part]


class Feed(Iterator[Part]):
    """The part of each of ``jobs``, in order. ``ahead`` may be called when the device has been
    given all that is to be done with the last one. Raises ``UserError`` for states that are not
    finite."""

    def __init__(self, states: States, head: FullHead, jobs: Iterable[Entries]):
        self._states, self._head, self._jobs = states, head, iter(jobs)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._begun, self._ready = self._begin(), False
        self._part: Part = None

    def __next__(self) -> Part:
        self.ahead()
        if not self._ready:
            raise StopIteration
        part = self._part
        self._begun, self._ready = self._begin(), False
        return part

    def ahead(self) -> None:
        """Make the next part ready, if there is one."""
        if self._begun is not None and not self._ready:
            self._part, self._begun, self._ready = self._begun(), None, True

    def close(self) -> None:
        """End the thread; what it reads is lost."""
        self._begun = None
        self._pool.shutdown(cancel_futures=True)

    def _begin(self) -> Begun | None:
        entries = next(self._jobs, None)
        if entries is None:
            return None
        if not entries:
            return lambda: None
        if isinstance(self._states, LiveStates):
            return self._judged(assemble(self._states, entries, self._head.device))
        reading = self._pool.submit(assemble, self._states, entries, self._head.device)
        return lambda: self._judged(reading.result())()

    @torch.no_grad()
    def _judged(self, batch: Batch) -> Begun:
        finite, labels = fetch(all_finite(batch)), self._head.begin(batch)

        def part() -> Part:
            check_finite(self._states, batch, bool(finite()))
            return batch, labels()

        return part
