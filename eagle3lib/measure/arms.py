"""What the arms are, and what is read out of their recorded requests.

Every request is one line when it is whole (``serve_arms`` writes them): those of the headline in
``requests.jsonl``, which the diagnosis replays, those of the sweeps in ``sweeps.jsonl``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.engine.records import RoundCounts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.phase_params import resolve
from eagle3lib.lab.run import Phase
from eagle3lib.measure.accounting import Counts, PairedTiming
from eagle3lib.measure.points import Point

REQUESTS, SWEEPS, SAMPLES = "requests.jsonl", "sweeps.jsonl", "samples.jsonl"
PLAIN, REFERENCE, OWN = "engine alone", "reference drafter", "own drafter"
ARMS = {"own": OWN, "reference": REFERENCE}  # those with a drafter, as parameters name them


@dataclass(frozen=True)
class RequestRow:
    """One timed request. ``accepted`` and ``drafted`` are the engine's record, round by round;
    ``counts`` is its record without their order, where it gives no more. ``steps`` is K of the
    point (0: the run's own), for the plain arm that of the arm beside it."""

    arm: str
    set: str
    prompt: str
    repeat: int
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    finish_reason: str
    duration_s: float  # to the last token
    accepted: list[int] | None
    drafted: list[int] | None
    engine: str = "vllm"
    steps: int = 0
    concurrency: int = 1
    temperature: float = 0.0
    context_tokens: int = 0
    visit: int = 0  # of the arm's server, where they take turns
    started_s: float = 0.0  # since the epoch
    chunk_s: list[float] = field(default_factory=list)  # arrival of each chunk since the start
    chunk_tokens: list[int] = field(default_factory=list)
    counts: dict[str, Any] | None = None

    @property
    def point(self) -> Point:
        return Point(
            self.engine, self.steps, self.concurrency, self.temperature, self.context_tokens
        )

    @property
    def key(self) -> tuple[Point, str, str, int]:
        return self.point, self.arm, self.prompt, self.repeat


def exported_drafter(run: Path) -> Path:
    """Where phase 05 of a run puts its drafter, made or not."""
    return run / "05_export_drafter" / "drafter"


def own_drafter(phase: Phase, cfg: BenchmarkParams) -> Path:
    """The folder of the last arm: the run's export, or the one that is to be measured for it."""
    if cfg.drafter:
        return _named_drafter("drafter", cfg.drafter)
    return phase.of("05_export_drafter") / "drafter"


def _named_drafter(parameter: str, value: str) -> Path:
    folder = resolve(value)
    if not (folder / "config.json").exists():
        raise UserError(
            f"the folder of {parameter} has no config.json",
            where=folder,
            next=f"set parameter {parameter} to a drafter's folder",
        )
    return folder


def arms_of(cfg: BenchmarkParams, own: Path) -> dict[str, Path | None]:
    """Arms in their fixed order: engine alone, then a known-good drafter if one is named, then
    ours."""
    arms: dict[str, Path | None] = {PLAIN: None}
    if cfg.reference_drafter:
        arms[REFERENCE] = _named_drafter("reference_drafter", cfg.reference_drafter)
    arms[OWN] = own
    return arms


def drafter_folder(run: Path, arm: str) -> Path:
    """The drafter of an arm of a finished benchmark. Raises ``UserError`` where the run named no
    reference drafter."""
    recorded = run / "06_benchmark_serving" / "inputs.json"
    params = read_json(recorded)["params"] if recorded.exists() else {}
    named = params.get("drafter" if arm == OWN else "reference_drafter")
    if arm == OWN and not named:
        return exported_drafter(run)
    if not named:
        raise UserError(
            f"run {run.name!r} has no arm {arm!r}",
            expected="a benchmark with reference_drafter",
            where=recorded,
            next="eagle3 run PROFILE 06 reference_drafter=FOLDER",
        )
    return resolve(named)


def benchmark_prompts(phase: Phase, cfg: BenchmarkParams) -> list[AnswerRow]:
    """Held-out prompts of both sets, in the order of their ids; those that the target answered in a
    loop come last: a loop is easy to draft, and no measure of acceptance."""
    answers = read_answers(phase.of("01_generate_data"))
    rows = sorted(answers, key=lambda r: (r.looping, r.id))
    chosen = []
    for name, count in (("workload", cfg.workload_prompts), ("general", cfg.general_prompts)):
        found = [r for r in rows if (r.set, r.split, r.repeat) == (name, "heldout", 0)]
        if len(found) < count:
            raise UserError(
                f"{count} held-out prompts of the {name} set are asked for, "
                f"{len(found)} were answered",
                where=phase.of("01_generate_data"),
                next=f"raise heldout_{name} of phase 01, or lower {name}_prompts",
            )
        passed_over = sum(r.looping for r in found[count:])
        if passed_over:
            phase.note(
                f"{passed_over} of {len(found)} {name} prompts passed over: answers that loop"
            )
        chosen += found[:count]
    return chosen


def read_requests(folder: Path) -> list[RequestRow]:
    """The headline's requests; of one that was asked again (a block that broke off) the last."""
    return _read(folder / REQUESTS)


def read_sweeps(folder: Path) -> list[RequestRow]:
    """The requests of all other points; none without a sweep."""
    return _read(folder / SWEEPS)


def _read(path: Path) -> list[RequestRow]:
    rows = (RequestRow(**row) for row in read_jsonl(path)) if path.exists() else iter(())
    return list({row.key: row for row in rows}.values())


def counts_of(rows: list[RequestRow], steps: int) -> Counts:
    """Pooled counts of requests that the engine gave a record for."""
    counts = Counts()
    for row in rows:
        tokens = len(row.answer_token_ids)
        if row.accepted is not None and row.drafted is not None:
            counts.add(tokens, row.accepted, row.drafted, steps)
        elif row.counts is not None:
            counts.add_counts(tokens, RoundCounts(**row.counts), steps)
    return counts


def at_point(rows: list[RequestRow], point: Point, steps: int) -> list[RequestRow]:
    """The rows of one point; those that name no K are of the run's own, ``steps``."""
    return [r for r in rows if replace(r.point, steps=r.steps or steps) == point]


def paired(rows: list[RequestRow], arm: str, set_name: str) -> list[PairedTiming]:
    """One entry a prompt: all its repeats in the plain arm and in ``arm``."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: {PLAIN: [0, 0.0], arm: [0, 0.0]})
    for row in rows:
        if row.set == set_name and row.arm in (PLAIN, arm):
            tokens_seconds = sums[row.prompt][row.arm]
            tokens_seconds[0] += len(row.answer_token_ids)
            tokens_seconds[1] += row.duration_s
    return [
        PairedTiming(int(s[PLAIN][0]), s[PLAIN][1], int(s[arm][0]), s[arm][1])
        for s in sums.values()
        if s[PLAIN][0] and s[arm][0]
    ]


def output_differences(rows: list[RequestRow], arm: str) -> pd.DataFrame:
    """Prompts whose answers differ between the plain arm and ``arm``, and where they part.

    ``rows`` of one greedy point; at a temperature answers differ as they should.
    """
    answers: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        answers[row.prompt].setdefault(row.arm, row.answer_token_ids)
    out: list[dict[str, Any]] = []
    for prompt, by_arm in answers.items():
        if PLAIN not in by_arm or arm not in by_arm:
            continue
        plain, spec = by_arm[PLAIN], by_arm[arm]
        if plain != spec:
            at = next(
                (i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b),
                min(len(plain), len(spec)),
            )
            out.append(
                {
                    "prompt": prompt,
                    "differs_at": at,
                    "plain": plain[at : at + 1],
                    "with_drafter": spec[at : at + 1],
                }
            )
    return pd.DataFrame(out, columns=["prompt", "differs_at", "plain", "with_drafter"])
