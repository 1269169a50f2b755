"""How fast stored states are read: in stored order, in a shuffled one, and as plain files.

Rates are of stored bytes, decoding included (but for the plain files, which bound them), so the
shuffled rate over that of the stored order is what random access keeps. Rounds alternate, since a
machine drifts; the median of the paired ratios is the figure.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from eagle3lib.target.states import StateEntry, StateStore

_BLOCK_BYTES = 4 * 2**20


def drop_cached(store: StateStore) -> None:
    """Ask the system to forget the shards' pages, so that the next read comes from the disk."""
    for shard in store.shards:
        descriptor = os.open(store.folder / shard, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # only clean pages are dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_rounds(
    store: StateStore, *, rounds: int, cold: bool, seed: int = 0
) -> list[dict[str, Any]]:
    """One line a round: bytes per second of plain files, stored and shuffled order, their ratio,
    and tokens per second of the shuffled order."""
    lines = []
    tokens = sum(entry.tokens for entry in store.entries)
    for number in range(rounds):
        shuffled = list(store.entries)
        random.Random(f"{seed}/{number}").shuffle(shuffled)
        seconds = {
            "files": _timed(store, lambda: _read_files(store), cold),
            "stored": _timed(store, lambda: _read_rows(store, store.entries), cold),
            "shuffled": _timed(store, lambda order=shuffled: _read_rows(store, order), cold),
        }
        line: dict[str, Any] = {"format": store.state_format, "cold": cold}
        line |= {f"{k}_mb_per_s": store.stored_bytes / 1e6 / s for k, s in seconds.items()}
        line["ratio"] = seconds["stored"] / seconds["shuffled"]
        line["shuffled_tokens_per_s"] = tokens / seconds["shuffled"]
        lines.append(line)
    return lines


def median_line(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of some rounds; the ratio's is that of the paired ratios."""
    numbers = [key for key, value in lines[0].items() if isinstance(value, float)]
    medians = {key: statistics.median(line[key] for line in lines) for key in numbers}
    return {**lines[0], **medians}


def _timed(store: StateStore, read: Callable[[], None], cold: bool) -> float:
    if cold:
        drop_cached(store)
    started = time.perf_counter()
    read()
    return time.perf_counter() - started


def _read_rows(store: StateStore, entries: list[StateEntry]) -> None:
    for _ in store.rows(entries):
        pass


def _read_files(store: StateStore) -> None:
    buffer = bytearray(_BLOCK_BYTES)
    for shard in store.shards:
        with (store.folder / shard).open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
