"""How far a phase is: a bar where it runs, and the same numbers on disk for ``eagle3 status``."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm.auto import tqdm

from eagle3lib.lab.files import write_json


@dataclass(frozen=True)
class ProgressFile:
    """How far a phase is; gone when it is whole."""

    what: str
    done: float | None = None  # None where nothing can be counted, an engine's start for example
    total: int | None = None
    unit: str = ""
    left_s: float | None = None  # of this counting alone, None before the first step


class Progress:
    """tqdm in the notebook, and the same numbers on disk once a second."""

    def __init__(self, path: Path, total: int, unit: str, what: str, done: int):
        self._bar = tqdm(total=total, unit=unit, desc=what, initial=done, mininterval=5, ascii=True)
        self._path, self._what, self._started, self._initial = path, what, time.time(), done
        self._written_s = 0.0
        self._write()

    def update(self, count: int) -> None:
        self._bar.update(count)
        if time.time() - self._written_s > 1:
            self._write()

    def close(self) -> None:
        self._bar.close()
        self._write()

    def _write(self) -> None:
        self._written_s = time.time()
        done, total = self._bar.n, self._bar.total
        elapsed_s = self._written_s - self._started
        rate = (done - self._initial) / elapsed_s if elapsed_s > 0 else 0.0
        left_s = max(0.0, total - done) / rate if rate > 0 else None
        left_s = None if left_s is None else round(left_s, 1)
        write_progress(self._path, ProgressFile(self._what, done, total, self._bar.unit, left_s))


def write_progress(path: Path, now: ProgressFile) -> None:
    write_json(path, asdict(now))
