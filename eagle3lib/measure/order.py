"""In which order arms are asked, so that a machine's drift meets all of them alike, or is seen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import PLAIN

Task = tuple[str, AnswerRow, int]  # arm, prompt, repeat


@dataclass(frozen=True)
class Visit:
    """Arms whose servers are up together, and the repeats asked of each."""

    number: int
    repeats: dict[str, list[int]]


def visits_of(cfg: BenchmarkParams, arms: list[str]) -> list[Visit]:
    """One visit with all arms, or A-B-A: the plain arm's repeats are split over two visits."""
    every = list(range(cfg.repeats))
    if cfg.side_by_side:
        return [Visit(0, {arm: every for arm in arms})]
    first = [Visit(0, {PLAIN: every[0::2]})]
    middle = [Visit(i, {arm: every}) for i, arm in enumerate(arms[1:], start=1)]
    return [*first, *middle, Visit(len(arms), {PLAIN: every[1::2]})]


def blocks_of(
    arms: dict[str, list[int]], prompts: list[AnswerRow], concurrency: int
) -> Iterator[list[Task]]:
    """Tasks in the order in which they are asked.

    One at a time: a single block, the order of arms turning with every prompt. Several in flight:
    one block for each arm and repeat, the order of arms turning with the repeat.
    """
    names, repeats = list(arms), sorted({r for mine in arms.values() for r in mine})
    if concurrency == 1:
        yield [
            (arm, prompt, repeat)
            for repeat in repeats
            for i, prompt in enumerate(prompts)
            for arm in turned(names, i + repeat)
            if repeat in arms[arm]
        ]
        return
    for repeat in repeats:
        for arm in turned(names, repeat):
            if repeat in arms[arm]:
                yield [(arm, prompt, repeat) for prompt in prompts]


def turned(arms: list[str], by: int) -> list[str]:
    by %= len(arms)
    return arms[by:] + arms[:by]
