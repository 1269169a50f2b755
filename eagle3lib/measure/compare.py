"""Runs beside one another: how they differ in parameters, and whether their results really differ.

What was sampled are prompts, so every interval is a bootstrap over prompts (Efron 1979, percentiles
2.5 and 97.5), all repeats of a prompt together, never over one mean: paired where both runs
answered the same prompts, independent where they did not. A prompt is its token ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.lab.explore import finished_run
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import PHASES
from eagle3lib.measure.accounting import MIN_PROMPTS
from eagle3lib.measure.arms import OWN, PLAIN, RequestRow, counts_of, read_requests

HIGHER, LOWER, UNDECIDED, UNKNOWN = "higher", "lower", "not told apart", "too few prompts"
_ROUNDS, _ACCEPTED, _TOKENS, _SECONDS, _PLAIN_TOKENS, _PLAIN_SECONDS, _STEP_1 = range(7)
Statistic = Callable[[np.ndarray], np.ndarray]  # sums [..., columns] -> values [...]
Prompt = tuple[int, ...]


def acceptance_length(s: np.ndarray) -> np.ndarray:
    """Of sums whose first columns are rounds and accepted drafts."""
    return 1 + s[..., _ACCEPTED] / s[..., _ROUNDS]


def _speed(s: np.ndarray) -> np.ndarray:
    return s[..., _TOKENS] / s[..., _SECONDS]


def _plain_speed(s: np.ndarray) -> np.ndarray:
    return s[..., _PLAIN_TOKENS] / s[..., _PLAIN_SECONDS]


def _step(k: int) -> Statistic:
    return lambda s: s[..., _STEP_1 + k - 1] / s[..., _ROUNDS]


# Name -> what it is of a run's sums, and the columns that must not be zero.
STATISTICS: dict[str, tuple[Statistic, tuple[int, ...]]] = {
    "acceptance length": (acceptance_length, (_ROUNDS,)),
    "tok/s with the drafter": (_speed, (_SECONDS,)),
    "tok/s of the engine alone": (_plain_speed, (_PLAIN_SECONDS,)),
    "speed-up": (lambda s: _speed(s) / _plain_speed(s), (_SECONDS, _PLAIN_TOKENS)),
    "round cost, plain steps": (
        lambda s: acceptance_length(s) * _plain_speed(s) / _speed(s),
        (_ROUNDS, _SECONDS, _TOKENS, _PLAIN_SECONDS),
    ),
}
TIMED = frozenset(STATISTICS) - {"acceptance length"}  # these are of a machine, too


@dataclass(frozen=True)
class ComparedRun:
    """One run; ``prompts``: by set, the sums of each prompt (columns as in ``STATISTICS``)."""

    name: str
    target: str
    fingerprint: str
    steps: int  # K
    benchmark: dict[str, Any]
    parameters: dict[str, Any]  # "PHASE NAME" -> value
    facts: dict[str, Any]
    machine: dict[str, Any]
    prompts: dict[str, dict[Prompt, np.ndarray]]


@dataclass(frozen=True)
class Difference:
    """``other`` minus ``base`` in one statistic over one prompt set. ``prompts``: of both runs;
    ``reason``: why the two are not comparable, empty where they are."""

    statistic: str
    set: str
    base: str
    other: str
    base_value: float
    other_value: float
    difference: float
    low: float | None
    high: float | None
    prompts: tuple[int, int]
    paired: bool
    reason: str

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return UNKNOWN
        return HIGHER if self.low > 0 else LOWER if self.high < 0 else UNDECIDED

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def run_names(base: str, others: str) -> list[str]:
    """The base and the others, parted by commas, each once."""
    return list(dict.fromkeys([base, *(n.strip() for n in others.split(",") if n.strip())]))


def read_run(name: str) -> ComparedRun:
    """Raises ``UserError`` for a run that is not there or has no finished benchmark."""
    folder = finished_run(name, "06_benchmark_serving")
    manifest = read_json(folder / "manifest.json")
    benchmark = read_json(folder / "06_benchmark_serving" / "metrics.json")
    rows, steps = (
        read_requests(folder / "06_benchmark_serving"),
        benchmark["num_speculative_tokens"],
    )
    parameters = {
        f"{phase} {field}": value
        for phase, done in manifest["phases"].items()
        for field, value in done["parameters"].items()
        if field != "target"  # a line of its own
    }
    return ComparedRun(
        name, manifest["target"]["name"], manifest["target"]["fingerprint"], steps, benchmark,
        parameters, _facts(folder), manifest["machine"],
        {s: prompt_sums(rows, s, steps) for s in dict.fromkeys(r.set for r in rows)},
    )  # fmt: skip


def prompt_sums(rows: Sequence[RequestRow], set_name: str, steps: int) -> dict[Prompt, np.ndarray]:
    """Sums of every prompt of a set over its repeats in both arms."""
    by_prompt: dict[Prompt, list[RequestRow]] = defaultdict(list)
    for row in rows:
        if row.set == set_name:
            by_prompt[tuple(row.prompt_token_ids)].append(row)
    out = {}
    for prompt, mine in by_prompt.items():
        own, plain = ([r for r in mine if r.arm == arm] for arm in (OWN, PLAIN))
        counts = counts_of(own, steps)
        at = [*counts.accepted_at, *[0] * steps][:steps]
        timed = [
            v for part in (own, plain)
            for v in (sum(len(r.answer_token_ids) for r in part), sum(r.duration_s for r in part))
        ]  # fmt: skip
        out[prompt] = np.array([counts.rounds, counts.accepted, *timed, *at], dtype=float)
    return out


def _facts(folder: Path) -> dict[str, Any]:
    """What phases before the benchmark made; None where a phase is not done."""

    def of(phase: str, *path: str) -> Any:
        done = (folder / phase / "manifest.json").exists()
        value: Any = read_json(folder / phase / "metrics.json") if done else None
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    return {
        "answer tokens trained on": of("04_train_drafter", "trained_tokens"),
        "epochs": of("04_train_drafter", "epochs"),
        "answer tokens in the draft vocabulary, workload": of(
            "07_diagnose_acceptance", "workload", "vocab_coverage"
        ),
    }


def side_by_side(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Parameters that differ, then results: one line each, a column a run, None where a run has
    none."""
    lines = _parameter_lines(runs)
    lines += [_line("trained", name, runs, [r.facts[name] for r in runs]) for name in runs[0].facts]
    for set_name in dict.fromkeys(s for r in runs for s in r.prompts):
        sums = [_pooled(r, set_name) for r in runs]
        kind = f"measured, {set_name}"
        lines.append(_line(kind, "prompts", runs, [len(r.prompts.get(set_name, {})) for r in runs]))
        for label in STATISTICS:
            lines.append(_line(kind, label, runs, [value_of(label, s) for s in sums]))
        for k in range(1, max(r.steps for r in runs) + 1):
            shares = [_share(r, s, k) for r, s in zip(runs, sums, strict=True)]
            lines.append(_line(kind, f"rounds that accepted step {k}", runs, shares))
    return lines


def _line(kind: str, what: str, runs: Sequence[ComparedRun], values: list[Any]) -> dict[str, Any]:
    rounded = [round(v, 4) if isinstance(v, float) else v for v in values]
    return {"kind": kind, "what": what} | dict(zip((r.name for r in runs), rounded, strict=True))


def _pooled(run: ComparedRun, set_name: str) -> np.ndarray | None:
    prompts = run.prompts.get(set_name)
    return np.array(list(prompts.values())).sum(0) if prompts else None


def _parameter_lines(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    targets = [f"{r.target} ({r.fingerprint})" for r in runs]
    lines = [_line("parameter", "target", runs, targets)]
    for name in _ordered({n for r in runs for n in r.parameters}):
        lines.append(_line("parameter", name, runs, [r.parameters.get(name) for r in runs]))
    return [x for x in lines if len({str(x[r.name]) for r in runs}) > 1]


def _ordered(names: set[str]) -> list[str]:
    known = [f"{phase} {field}" for phase, model in PHASES.items() for field in model.model_fields]
    place = {name: i for i, name in enumerate(known)}
    return sorted(names, key=lambda n: (place.get(n, len(place)), n))


def _share(run: ComparedRun, sums: np.ndarray | None, k: int) -> float | None:
    """Share of rounds that accepted step k; None where the run has no such step or rounds whose
    steps it does not know."""
    if (
        sums is None
        or k > run.steps
        or not sums[_ROUNDS]
        or sums[_STEP_1:].sum() != sums[_ACCEPTED]
    ):
        return None
    return float(_step(k)(sums))


def value_of(label: str, sums: np.ndarray | None) -> float | None:
    """A statistic of pooled sums; None where what it divides by was not measured."""
    statistic, needed = STATISTICS[label]
    return float(statistic(sums)) if sums is not None and _has(sums, needed) else None


def _has(sums: np.ndarray, needed: tuple[int, ...]) -> bool:
    return bool((sums[list(needed)] > 0).all())


def step_lines(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Share of rounds that accepted step k with its interval, by run, set and step."""
    out = []
    for run in runs:
        for name, prompts in run.prompts.items():
            table = np.array([p for p in prompts.values() if p[_ROUNDS] > 0]).reshape(
                -1, _STEP_1 + run.steps
            )
            for k in range(1, run.steps + 1):
                share = _share(run, table.sum(0), k)
                if share is not None:
                    low, high = bootstrap(table, _step(k))
                    line = {"run": run.name, "set": name, "step": k, "share": share}
                    rounds = int(table[:, _ROUNDS].sum())
                    out.append(line | {"low": low, "high": high, "rounds": rounds})
    return out


def why_not_comparable(base: ComparedRun, other: ComparedRun, label: str, set_name: str) -> str:
    """Why a difference would be of something else than the drafters; empty where it would not."""
    reasons = []
    if base.fingerprint != other.fingerprint:
        reasons.append("other target")
    a, b = base.prompts[set_name], other.prompts[set_name]
    shared = len(a.keys() & b.keys())
    if shared < MIN_PROMPTS and (a.keys() != b.keys()):
        reasons.append(f"other prompts ({shared} shared)")
    same = ["temperature", "engine", "dtype"] if label in TIMED else ["temperature"]
    same += ["concurrency"] if label in TIMED else []
    reasons += [f"other {s}" for s in same if base.benchmark.get(s) != other.benchmark.get(s)]
    if label == "acceptance length" and base.steps != other.steps:
        reasons.append(f"K {base.steps} and {other.steps}")
    if label in TIMED and _hardware(base) != _hardware(other):
        reasons.append("other machine")
    return ", ".join(reasons)


def _hardware(run: ComparedRun) -> tuple[str, ...]:
    return tuple(str(run.machine.get(k)) for k in ("cpu", "cores", "gpus"))


def differences(base: ComparedRun, other: ComparedRun, resamples: int = 2000) -> list[Difference]:
    """Every statistic that both runs have, over every prompt set that both asked."""
    out = []
    for set_name in (s for s in base.prompts if s in other.prompts):
        a, b = base.prompts[set_name], other.prompts[set_name]
        paired = len(a.keys() & b.keys()) >= MIN_PROMPTS or a.keys() == b.keys()
        for label in STATISTICS:
            reason = why_not_comparable(base, other, label, set_name)
            found = compare(a, b, label, paired=paired, resamples=resamples)
            if found is not None:
                out.append(
                    Difference(label, set_name, base.name, other.name, *found, paired, reason)
                )
    return out


def compare(
    a: dict[Prompt, np.ndarray], b: dict[Prompt, np.ndarray], label: str, *,
    paired: bool, resamples: int = 2000,
) -> tuple[float, float, float, float | None, float | None, tuple[int, int]] | None:  # fmt: skip
    """(a's value, b's, b minus a, its interval's ends, prompts of both); None if one has no value.

    Paired: prompts that both have are resampled together, others are left out. A prompt that has
    nothing of what the statistic divides by (no round, say) is left out too.
    """
    statistic, needed = STATISTICS[label]
    of_a, of_b = ([p for p, sums in x.items() if _has(sums, needed)] for x in (a, b))
    if paired:
        of_a = of_b = [p for p in of_a if p in set(of_b)]
    if not of_a or not of_b:
        return None
    # Runs of another K have other columns at the end, which no statistic reads.
    left, right = (np.array([x[p][:_STEP_1] for p in of]) for x, of in ((a, of_a), (b, of_b)))
    values = float(statistic(left.sum(0))), float(statistic(right.sum(0)))
    low = high = None
    if paired:
        low, high = bootstrap(
            np.concatenate((left, right), axis=1),
            lambda s: statistic(s[..., _STEP_1:]) - statistic(s[..., :_STEP_1]), resamples,
        )  # fmt: skip
    elif min(len(left), len(right)) >= MIN_PROMPTS:
        rng = np.random.default_rng(0)
        theirs, mine = (statistic(_resampled(x, resamples, rng)) for x in (right, left))
        low, high = _percentiles(theirs - mine)
    return *values, values[1] - values[0], low, high, (len(left), len(right))


def bootstrap(
    table: np.ndarray, statistic: Statistic, resamples: int = 2000
) -> tuple[float | None, float | None]:
    """95 % interval of a statistic of the sums over prompts, [prompts, columns]; (None, None) below
    five prompts."""
    if len(table) < MIN_PROMPTS:
        return None, None
    return _percentiles(statistic(_resampled(table, resamples, np.random.default_rng(0))))


def _resampled(table: np.ndarray, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Sums of ``resamples`` draws of as many prompts with replacement, [resamples, columns]."""
    return table[rng.integers(0, len(table), (resamples, len(table)))].sum(1)


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
