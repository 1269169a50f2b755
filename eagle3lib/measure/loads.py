"""Both arms of a benchmark at every load of its sweep: times of a step and a round, and speed.

Of the requests of phase 06 at the run's K and temperature, both sets of prompts pooled::

    in flight          seconds of all requests / seconds of their blocks (Little's law): below
                       ``concurrency`` where the prompts run out
    plain step, round  seconds from a request's first token to its last, over the tokens after the
                       first; over the rounds, with a drafter; of the requests that were streamed
    cost of a round    round / plain step
    tokens a second    of the machine, over whole blocks; the speed-up is their ratio, so it holds
                       the prefill and the ends of the blocks as well
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.measure.arms import PLAIN, RequestRow, counts_of, read_requests, read_sweeps
from eagle3lib.measure.result import throughput_of


@dataclass(frozen=True)
class Pace:
    """One arm at one load; ``step_s`` is a plain step's time, or a round's."""

    tokens_per_s: float
    in_flight: float
    step_s: float


@dataclass(frozen=True)
class Load:
    """Both arms of one engine at one load; ``context_tokens`` is the mean that a step sees."""

    engine: str
    concurrency: int
    context_tokens: int
    plain: Pace
    drafted: Pace
    acceptance_length: float
    kept_per_round: float  # the same without what the end of an answer cuts
    rounds_from: str  # the engine's record, or the lowest load's acceptance

    @property
    def speedup(self) -> float:
        return self.drafted.tokens_per_s / self.plain.tokens_per_s

    @property
    def cost(self) -> float:
        """Plain steps of a round."""
        return self.drafted.step_s / self.plain.step_s


def measured_loads(folder: Path, arm: str) -> list[Load]:
    """Every engine and load of the benchmark in ``folder``, rising. Raises ``UserError`` for an arm
    that was not measured, and an engine that told no rounds at all."""
    metrics = read_json(folder / "metrics.json")
    steps = metrics["num_speculative_tokens"]
    rows = [
        row
        for row in read_requests(folder) + read_sweeps(folder)
        if (row.steps or steps) == steps
        and row.temperature == metrics["temperature"]
        and not row.context_tokens
    ]
    arms = dict.fromkeys(row.arm for row in rows)
    if arm not in arms or PLAIN not in arms:
        raise UserError(
            f"no requests of {arm!r} beside {PLAIN!r}", expected=f"one of: {', '.join(arms)}",
            where=folder, next="set parameter arm",
        )  # fmt: skip
    loads: list[Load] = []
    for engine, concurrency in sorted({(row.engine, row.concurrency) for row in rows}):
        here = [r for r in rows if (r.engine, r.concurrency) == (engine, concurrency)]
        plain, drafted = ([r for r in here if r.arm == name] for name in (PLAIN, arm))
        if plain and drafted:
            before = [load for load in loads if load.engine == engine]
            loads.append(_load(plain, drafted, steps, before))
    return loads


def _load(
    plain: list[RequestRow], drafted: list[RequestRow], steps: int, before: Sequence[Load]
) -> Load:
    engine, concurrency = plain[0].engine, plain[0].concurrency
    told, streamed = counts_of(drafted, steps), _streamed(drafted)
    length, source = told.acceptance_length, "the engine's record"
    if length is not None and told.requests == len(drafted):
        kept = _after_first(drafted) / told.rounds
        rounds: float = counts_of(streamed, steps).rounds
    elif before:
        # vLLM 0.26 tells none beside other requests; greedy acceptance is the same at any load.
        length, kept = before[0].acceptance_length, before[0].kept_per_round
        rounds, source = _after_first(streamed) / kept, f"as at {before[0].concurrency} in flight"
    else:
        raise UserError(
            f"{engine} told no rounds at {concurrency} requests in flight",
            expected="a load of 1 in the sweep, or an engine that keeps a record",
            next="measure again with concurrency=1 in front of the other loads",
        )
    tokens = [len(r.answer_token_ids) for r in plain]
    seen = (n * (len(r.prompt_token_ids) + n / 2) for r, n in zip(plain, tokens, strict=True))
    return Load(
        engine, concurrency, round(sum(seen) / sum(tokens)),
        _pace(plain, _after_first(_streamed(plain))), _pace(drafted, rounds), length, kept, source,
    )  # fmt: skip


def _streamed(rows: list[RequestRow]) -> list[RequestRow]:
    found = [row for row in rows if len(row.chunk_s) > 1]
    if not found:
        raise UserError(
            f"no request of {rows[0].arm!r} at {rows[0].concurrency} in flight was streamed",
            expected="some whose tokens' arrival is known (of more than eight in flight about "
            "eight are streamed)",
            next="measure again with more prompts",
        )
    return found


def _after_first(rows: list[RequestRow]) -> int:
    return sum(len(r.answer_token_ids) - 1 for r in rows)


def _pace(rows: list[RequestRow], steps: float) -> Pace:
    """``steps``: plain steps or rounds of the streamed requests, the prefills' left out."""
    per_s = throughput_of(rows, rows[0].concurrency)
    wall_s = sum(len(r.answer_token_ids) for r in rows) / per_s
    streamed_s = sum(r.chunk_s[-1] - r.chunk_s[0] for r in _streamed(rows))
    return Pace(per_s, sum(r.duration_s for r in rows) / wall_s, streamed_s / steps)
