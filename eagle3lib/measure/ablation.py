"""What an ablation of losses shows: lengths with intervals, ratios to the default, who wins.

Two judgements, each an acceptance length pooled over seeds and held-out conversations: ``greedy``
(T = 0, rounds) and ``sampled`` (T = 1, the chain of expected acceptances offline, rounds of an
engine when served). Intervals are a bootstrap that draws seeds and conversations, the same for all
variants, so that ratios are paired. Three seeds are few: an interval says how far the seeds at hand
lie apart, no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.peer import UNTRAINED

GREEDY, SAMPLED = JUDGEMENTS = ("greedy", "sampled")
_RESAMPLES = 2000
Counts = dict[str, np.ndarray]  # judgement -> [seeds, conversations, K, 2]: tries, successes


def read_results(folder: Path) -> list[dict[str, Any]]:
    """The cells of ``training/ablation.py``, the best last."""
    results = read_jsonl(folder / "results.jsonl")
    if not results:
        raise UserError(
            "there are no results of an ablation",
            where=folder / "results.jsonl",
            next="python -m eagle3lib.training.ablation --help",
        )
    return results


def comparable(
    results: list[dict[str, Any]], wanted: Sequence[tuple[str, int]] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """The cells that compare fairly, and in words what is not among them.

    An ablation may have been cut short, or cells have failed. Kept are the variants that have all
    of some seeds, and those seeds of them: the choice that keeps most cells. ``wanted``: (variant,
    seed) of the cells that there should be.
    """
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(result["variant"], set()).add(result["seed"])

    def having(some: frozenset[int]) -> list[str]:
        return [variant for variant, own in seeds.items() if some <= own]

    choices = {frozenset(own) for own in seeds.values()}
    while more := {a & b for a in choices for b in choices if a & b} - choices:
        choices |= more  # seeds that some variants share, though none has these alone
    best = max(choices, key=lambda some: (len(some) * len(having(some)), len(some), sorted(some)))
    kept = [r for r in results if r["variant"] in having(best) and r["seed"] in best]
    there = {(r["variant"], r["seed"]) for r in results}
    used = {(r["variant"], r["seed"]) for r in kept}
    missing = [f"{v}, seed {s}: not made" for v, s in wanted if (v, s) not in there]
    odd = sorted(there - used)
    return kept, missing + [f"{v}, seed {s}: not all have this seed" for v, s in odd]


def seed_lengths(counts: dict[str, Counts]) -> dict[str, dict[str, list[float]]]:
    """By variant and judgement: the length of every seed alone, over all conversations."""
    return {
        variant: {name: length_of(table.sum(1)).tolist() for name, table in own.items()}
        for variant, own in counts.items()
    }


def offline_counts(results: list[dict[str, Any]]) -> dict[str, Counts]:
    """By variant. Raises ``UserError`` where variants differ in seeds or conversations."""
    found, shapes = {}, {}
    for variant in dict.fromkeys(result["variant"] for result in results):
        cells = sorted((r for r in results if r["variant"] == variant), key=lambda r: r["seed"])
        shapes[variant] = [(c["seed"], [x["id"] for x in c["conversations"]]) for c in cells]
        lines = [cell["conversations"] for cell in cells]
        found[variant] = {
            GREEDY: np.array([[[(x["rounds"], x["accepted"])] for x in own] for own in lines]),
            SAMPLED: np.array(
                [[list(zip(x["labels"], x["overlap"], strict=True)) for x in own] for own in lines]
            ),
        }
    if any(shape != next(iter(shapes.values())) for shape in shapes.values()):
        raise UserError(
            "variants were judged with different seeds or on different conversations",
            expected="one run of the ablation, all cells finished",
        )
    return found


def baseline_lengths(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Judgement -> name -> length of what has learnt nothing, on the workload's held-out answers;
    an untrained drafter's is the mean over seeds."""
    pooled = results[0]["baselines"]
    greedy = {n: pooled[f"{n}_workload"]["acceptance_length"] for n in ("unigram", "bigram")}
    fresh = [r["untrained"] for r in results]
    first = [x["sets"]["workload"]["acceptance_length"] for x in fresh]
    chain = [x["estimates"]["workload"]["sampled_length"] for x in fresh]
    return {
        GREEDY: greedy | {UNTRAINED: float(np.mean(first))},
        SAMPLED: {UNTRAINED: float(np.mean(chain))},
    }


def arms_to_serve(
    results: list[dict[str, Any]], variants: list[str], seeds: int, folder: Path
) -> dict[str, tuple[str, Path]]:
    """Arm -> (variant, drafter's folder): the first ``seeds`` seeds of each variant."""
    arms = {}
    for variant in variants:
        cells = sorted((r for r in results if r["variant"] == variant), key=lambda r: r["seed"])
        for cell in cells[:seeds]:
            arms[f"{variant}, seed {cell['seed']}"] = (variant, folder / cell["drafter"])
    return arms


def served_counts(rows: list[RequestRow], variants: dict[str, str]) -> dict[str, Counts]:
    """Rounds of served prompts; ``variants``: arm -> variant (each arm is one seed of it)."""
    found: dict[str, Counts] = {}
    for variant in dict.fromkeys(variants.values()):
        arms = [arm for arm, own in variants.items() if own == variant]
        found[variant] = {
            name: np.array([_prompts(rows, arm, heat) for arm in arms])
            for name, heat in ((GREEDY, 0.0), (SAMPLED, 1.0))
            if any(row.temperature == heat for row in rows)
        }
    return found


def _prompts(rows: list[RequestRow], arm: str, heat: float) -> list[list[tuple[int, int]]]:
    mine = [r for r in rows if (r.arm, r.temperature) == (arm, heat)]
    by_prompt: dict[str, tuple[int, int]] = {}
    for row in sorted(mine, key=lambda r: r.prompt):
        rounds, accepted = by_prompt.get(row.prompt, (0, 0))
        made = row.accepted or []
        by_prompt[row.prompt] = (rounds + len(made), accepted + sum(made))
    return [[pair] for pair in by_prompt.values()]


def length_of(sums: np.ndarray) -> np.ndarray:
    """Acceptance length of counts [..., K, 2]: 1 + a_1 + a_1 a_2 + ... With one step, tries are
    rounds and successes accepted drafts of any step: 1 + accepted / rounds."""
    return 1 + np.cumprod(sums[..., 1] / sums[..., 0], axis=-1).sum(-1)


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        return {
            "value": round(self.value, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
        }

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def estimates(counts: dict[str, Counts], reference: str) -> dict[str, dict[str, Estimate]]:
    """By variant: every judgement's length, its ratio to the reference's (``greedy_ratio``), and
    ``score``, the geometric mean of the ratios; all with 95 % intervals."""
    if reference not in counts:
        raise UserError(f"no variant {reference!r} to compare with", expected=", ".join(counts))
    drawn = {variant: _lengths(own) for variant, own in counts.items()}
    found = {}
    for variant, own in drawn.items():
        ratios = {name: own[name] / drawn[reference][name] for name in own}
        score = np.prod(list(ratios.values()), axis=0) ** (1 / len(ratios))
        named = own | {f"{name}_ratio": ratio for name, ratio in ratios.items()}
        found[variant] = {name: _estimate(x) for name, x in (named | {"score": score}).items()}
    return found


def _lengths(own: Counts) -> dict[str, np.ndarray]:
    """[1 + resamples] lengths of every judgement: as it is first, then of each draw."""
    found = {}
    for name, counts in own.items():
        seeds, conversations = counts.shape[:2]
        draw = np.random.default_rng(0)
        # Conversations first: variants share them even where they differ in seeds.
        of_conversation = draw.multinomial(
            conversations, [1 / conversations] * conversations, _RESAMPLES
        )
        of_seed = draw.multinomial(seeds, [1 / seeds] * seeds, _RESAMPLES)
        sums = np.einsum("bs,bc,sckj->bkj", of_seed, of_conversation, counts, optimize=True)
        found[name] = np.concatenate([[length_of(counts.sum((0, 1)))], length_of(sums)])
    return found


def _estimate(values: np.ndarray) -> Estimate:
    low, high = np.nanpercentile(values[1:], [2.5, 97.5])
    return Estimate(float(values[0]), float(low), float(high))


def finalists(found: dict[str, dict[str, Estimate]], most: int) -> list[str]:
    """At most so many variants, the best score first."""
    ranked = sorted(found, key=lambda variant: -found[variant]["score"].value)
    return [variant for variant in ranked if variant != UNTRAINED][:most]


def winner(found: dict[str, dict[str, Estimate]], reference: str) -> str:
    """The best score where its whole interval lies above the reference's, else the reference: a
    default changes for what is shown, not for what is likely."""
    best = finalists(found, 1)[0]
    return best if found[best]["score"].low > 1 else reference


def ablation_table(found: dict[str, dict[str, Estimate]]) -> pd.DataFrame:
    """Lengths and ratios as people read them, the best score first."""
    order = [*finalists(found, len(found)), *({UNTRAINED} & set(found))]
    return pd.DataFrame(
        [{"loss": v} | {name: str(e) for name, e in found[v].items()} for v in order]
    )
