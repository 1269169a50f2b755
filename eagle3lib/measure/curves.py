"""Acceptance of a benchmark's requests along one thing at a time, always as counts.

A round belongs to the place where it starts: the answer tokens before it, and with the prompt's the
context that it sees. Intervals are bootstraps over prompts, as in ``compare.py``. Requests whose
engine told no order of rounds have steps but no places; they are counted apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.arms import (
    OWN,
    REFERENCE,
    RequestRow,
    counts_of,
    read_requests,
    read_sweeps,
)
from eagle3lib.measure.compare import acceptance_length, bootstrap

Line = dict[str, Any]


def rows_of_arm(folder: Path, arm: str = OWN, *, sweeps: bool = False) -> list[RequestRow]:
    """Requests of a drafter's arm, of the headline or of all points (``sweeps``)."""
    rows = read_requests(folder) + (read_sweeps(folder) if sweeps else [])
    return [r for r in rows if r.arm == arm]


def step_curves(rows: Sequence[RequestRow], steps: int) -> list[Line]:
    """By set and step: rounds, rounds that reached the step, and that accepted it."""
    out = []
    for name in dict.fromkeys(r.set for r in rows):
        counts = counts_of([r for r in rows if r.set == name], steps)
        reached = [counts.rounds, *counts.accepted_at]
        out += [
            {"set": name, "step": k, "rounds": counts.rounds, "reached": reached[k - 1],
             "accepted": counts.accepted_at[k - 1]}
            for k in range(1, len(counts.accepted_at) + 1)
        ]  # fmt: skip
    return out


def round_places(row: RequestRow) -> list[tuple[int, int]]:
    """(answer tokens before the round, accepted drafts) of every round; the first starts after
    token 1, which the prefill gave. Empty where the engine told no order."""
    accepted = row.accepted or []
    starts = accumulate((a + 1 for a in accepted), initial=1)
    return list(zip(starts, accepted, strict=False))


def without_order(rows: Iterable[RequestRow]) -> int:
    """Requests whose rounds have no place."""
    return sum(r.accepted is None for r in rows)


def by_position(rows: Sequence[RequestRow]) -> list[Line]:
    """Acceptance length by set and by answer tokens before a round, in doublings."""
    return _placed(rows, lambda row, before: before)


def by_context(rows: Sequence[RequestRow]) -> list[Line]:
    """The same by all tokens before a round, those of the prompt too."""
    return _placed(rows, lambda row, before: len(row.prompt_token_ids) + before)


def _placed(rows: Sequence[RequestRow], place: Callable[[RequestRow, int], int]) -> list[Line]:
    sums: dict[tuple[int, str], dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        for before, accepted in round_places(row):
            cell = sums[place(row, before).bit_length() - 1, row.set]
            pair = cell.setdefault(row.prompt, [0, 0])
            pair[0] += 1
            pair[1] += accepted
    return [
        {"set": name, "from": 2**power, "to": 2 ** (power + 1) - 1} | _summed(prompts)
        for (power, name), prompts in sorted(sums.items())
    ]


def by_temperature(rows: Sequence[RequestRow], steps: int) -> list[Line]:
    """Acceptance length by set and temperature, at the run's own K and no filled context."""
    sums: dict[tuple[str, float], dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        if (row.steps or steps) != steps or row.context_tokens:
            continue
        counts = counts_of([row], steps)
        pair = sums[row.set, row.temperature].setdefault(row.prompt, [0, 0])
        pair[0] += counts.rounds
        pair[1] += counts.accepted
    return [
        {"set": name, "temperature": heat} | _summed(prompts)
        for (name, heat), prompts in sorted(sums.items())
        if any(pair[0] for pair in prompts.values())
    ]


def answer_kinds(answers: Iterable[AnswerRow]) -> dict[str, str]:
    """Prompt -> code, reasoning or prose: what the target answered it with in phase 01."""

    def kind(row: AnswerRow) -> str:
        return "code" if "```" in row.text else "reasoning" if row.reasoning else "prose"

    return {row.id: kind(row) for row in answers}


def by_kind(rows: Sequence[RequestRow], steps: int, kinds: dict[str, str]) -> list[Line]:
    """Acceptance length by set and what the answer holds (``answer_kinds``)."""
    sums: dict[tuple[str, str], dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        counts = counts_of([row], steps)
        cell = sums[row.set, kinds.get(row.prompt, "not told")]
        pair = cell.setdefault(row.prompt, [0, 0])
        pair[0] += counts.rounds
        pair[1] += counts.accepted
    return [
        {"set": name, "kind": kind} | _summed(prompts)
        for (name, kind), prompts in sorted(sums.items())
        if any(pair[0] for pair in prompts.values())
    ]


def _summed(prompts: dict[str, list[int]]) -> Line:
    table = np.array([pair for pair in prompts.values() if pair[0]], dtype=float)
    low, high = bootstrap(table, acceptance_length)
    rounds, accepted = (int(n) for n in table.sum(0))
    return {"prompts": len(table), "rounds": rounds, "accepted": accepted,
            "acceptance_length": 1 + accepted / rounds, "low": low, "high": high}  # fmt: skip


def training_curve(log: Path) -> list[Line]:
    """Held-out acceptance length (simulated) by answer tokens trained on so far, each pass counted
    anew; ``log``: phase 04's log of updates and evaluations."""
    out, tokens = [], 0
    for row in read_jsonl(log):
        if row["kind"] == "train":
            tokens += row["tokens"]
        elif row["kind"] == "evaluation":
            out += [
                {"set": name, "epoch": row["epoch"], "trained_tokens": tokens,
                 "rounds": counts["rounds"], "acceptance_length": counts["acceptance_length"]}
                for name, counts in row["sets"].items()
            ]  # fmt: skip
    return out


def lengths_by_k(rows: Sequence[RequestRow], steps: int) -> list[Line]:
    """Acceptance length that K drafts would have had, for every K up to the measured one: drafts of
    a chain don't depend on those after them, so a shorter round accepts the same first ones."""
    out = []
    for name in dict.fromkeys(r.set for r in rows):
        counts: Counts = counts_of([r for r in rows if r.set == name], steps)
        for k, length in enumerate(accumulate(counts.per_step, initial=1.0)):
            if k:
                line = {"set": name, "num_speculative_tokens": k, "rounds": counts.rounds}
                out.append(line | {"acceptance_length": length})
    return out


def run_lengths(folder: Path) -> dict[str, list[Line]]:
    """Arm -> ``lengths_by_k`` of a finished benchmark's headline, for each arm with a drafter."""
    steps = read_json(folder / "metrics.json")["num_speculative_tokens"]
    found = {arm: rows_of_arm(folder, arm) for arm in (OWN, REFERENCE)}
    return {arm: lengths_by_k(rows, steps) for arm, rows in found.items() if rows}
