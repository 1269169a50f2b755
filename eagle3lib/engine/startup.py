"""How far a start has come, read from an engine's log: its phase, its count, the time left.

Lines of vLLM 0.32/0.33 and SGLang 0.5.23. A phase only moves forward: ranks that come late, and the
drafter's own loading after the target's, write earlier lines again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle3lib.engine.config import Engine

IMPORTING, STARTING, GRAPHS, READY = (
    "importing", "starting the engine", "capturing graphs", "ready",
)  # fmt: skip
WEIGHTS, COMPILING = "loading weights", "compiling"

# In order of progress; what a line must hold for a start to have come so far.
_PHASES: tuple[tuple[str, str], ...] = (
    (IMPORTING, r"$^"),
    (STARTING, r"Initializing a V1 LLM engine|Init (parallel|torch distributed) begin"),
    (WEIGHTS, r"Starting to load model|Load weight begin|oading \S* ?checkpoint shards:"
              r"|Multi-thread loading"),
    ("weights loaded", r"Model loading took|Load weight end|Loading weights took"),
    (COMPILING, r"Dynamo bytecode transform time|Compiling a graph for|for vLLM's torch\.compile"
                r"|Warming up model for the compilation"),
    ("sizing the cache", r"KV cache size:|KV Cache is allocated|Memory pool end"),
    (GRAPHS, r"Capturing CUDA graphs|Capture .*graph.* begin|Capturing batches"),
    ("warming up", r"init engine \(.* took|Graph capturing finished|Capture .*graph end"),
    ("opening the port", r"Starting vLLM server|Available routes are|Uvicorn running on"),
)  # fmt: skip
_READY = {"vllm": r"Application startup complete", "sglang": r"fired up and ready to roll"}
_LOADING_DRAFTER = re.compile(r"Loading drafter model")
# Written again and again by processes that only wait for others: no sign of life.
_WAITING = re.compile(r"No available shared memory broadcast block|Waiting for \d+ local")
# tqdm: "  75% Completed | 3/4 [00:03<00:01, 1.25it/s]", with a bar in place of "Completed" too.
_COUNT = re.compile(
    r"(?P<what>shards|CUDA graphs|batches)\b[^|]*\|(?:[^|]*\|)?\s*(?P<done>\d+)/(?P<total>\d+)\s*"
    r"\[[\d:]+<(?P<left>[\d:?]+),\s*(?P<rate>[^\]]+)\]"
)


@dataclass(frozen=True)
class Progress:
    """``left_s`` is what is left of this phase, as the engine estimates it; None: unknown."""

    phase: str = IMPORTING
    done: int | None = None
    total: int | None = None
    rate: str = ""
    left_s: float | None = None
    drafter: bool = False

    def text(self) -> str:
        parts = [self.phase]
        parts += ["of the drafter"] if self.drafter and self.phase == WEIGHTS else []
        if self.total:
            parts.append(f"{self.done}/{self.total} ({self.rate})")
        if self.left_s:
            parts.append(f"about {self.left_s:.0f} s left")
        return " ".join(parts)


class StartupLog:
    """Reads what an engine has added to its log since the last call."""

    def __init__(self, path: Path, engine: Engine):
        self.path = path
        self._patterns = [(n, re.compile(p)) for n, p in (*_PHASES, (READY, _READY[engine]))]
        self._reached, self._offset, self._rest = 0, 0, ""
        self._progress = Progress()
        self.news_bytes = 0
        """Bytes read so far but those of lines that say "still waiting": a sign of life."""

    def poll(self) -> Progress:
        """The furthest phase so far, with the last count of that phase."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return self._progress
        self._offset += len(new)
        # tqdm ends its lines with a carriage return; a half line is read again with its rest.
        lines = re.split(r"[\r\n]", self._rest + new.decode("utf-8", errors="replace"))
        self._rest = lines[-1][-4096:]
        self.news_bytes += sum(len(line) for line in lines if not _WAITING.search(line))
        for line in lines:
            self._read(line)
        return self._progress

    def _read(self, line: str) -> None:
        for index in range(len(self._patterns) - 1, self._reached, -1):
            name, pattern = self._patterns[index]
            if pattern.search(line):
                self._reached, self._progress = index, Progress(name)
                break
        phase = self._progress.phase
        if _LOADING_DRAFTER.search(line):
            self._progress = Progress(phase, drafter=True)
        count = _COUNT.search(line)
        if count and phase == (WEIGHTS if count["what"] == "shards" else GRAPHS):
            self._progress = Progress(
                phase,
                int(count["done"]),
                int(count["total"]),
                count["rate"].strip(),
                _seconds(count["left"]),
                self._progress.drafter,
            )


def _seconds(clock: str) -> float | None:
    """ "01:02:03" or "02:03" in seconds; None for tqdm's "?"."""
    if "?" in clock:
        return None
    total = 0
    for part in clock.split(":"):
        total = total * 60 + int(part or 0)
    return float(total)
