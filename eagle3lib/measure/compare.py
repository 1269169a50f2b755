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

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import finished_run
from eagle3lib.lab.files import read_json
from eagle3lib.lab.params import PHASES
from eagle3lib.measure.accounting import MIN_PROMPTS
from eagle3lib.measure.arms import OWN, PLAIN, RequestRow, counts_of, read_requests

HIGHER, LOWER, UNDECIDED, UNKNOWN = "higher", "lower", "not told apart", "too few prompts"
_ROUNDS, _ACCEPTED, _TOKENS, _SECONDS, _PLAIN_TOKENS, _PLAIN_SECONDS, _STEP_1 = range(7)
Statistic = Callable[[np.ndarray], np.ndarray]  # sums [..., columns] -> values [...]
Prompt = tuple[int, ...]


def _length(s: np.ndarray) -> np.ndarray:
    return 1 + s[..., _ACCEPTED] / s[..., _ROUNDS]


def _speed(s: np.ndarray) -> np.ndarray:
    return s[..., _TOKENS] / s[..., _SECONDS]


def _plain_speed(s: np.ndarray) -> np.ndarray:
    return s[..., _PLAIN_TOKENS] / s[..., _PLAIN_SECONDS]


def _step(k: int) -> Statistic:
    return lambda s: s[..., _STEP_1 + k - 1] / s[..., _ROUNDS]


# Name -> what it is of a run's sums, and the columns that must not be zero.
STATISTICS: dict[str, tuple[Statistic, tuple[int, ...]]] = {
    "acceptance length": (_length, (_ROUNDS,)),
    "tok/s with the drafter": (_speed, (_SECONDS,)),
    "tok/s of the engine alone": (_plain_speed, (_PLAIN_SECONDS,)),
    "speed-up": (lambda s: _speed(s) / _plain_speed(s), (_SECONDS, _PLAIN_TOKENS)),
    "round cost, plain steps": (
        lambda s: _length(s) * _plain_speed(s) / _speed(s),
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
    paired: bool
    prompts: tuple[int, int]
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
    rows, steps = read_requests(folder / "06_benchmark_serving"), benchmark["num_speculative_tokens"]
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
        "training tokens": of("04_train_drafter", "training_tokens"),
        "simulated length, workload": of("04_train_drafter", "heldout", "workload", "acceptance_length"),
        "served tokens in draft vocabulary": of("07_diagnose_acceptance", "workload", "vocab_coverage"),
    }  # fmt: skip


def parameter_differences(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """One line a parameter whose values differ, a column a run; "" where a phase is not done."""
    lines = [{"parameter": "target"} | {r.name: f"{r.target} ({r.fingerprint})" for r in runs}]
    for name in _ordered({n for r in runs for n in r.parameters}):
        values = {r.name: r.parameters.get(name, "") for r in runs}
        lines.append({"parameter": name} | values)
    return [x for x in lines if len({str(x[r.name]) for r in runs}) > 1]


def _ordered(names: set[str]) -> list[str]:
    place = {f"{p} {f}": i for i, (p, f) in enumerate(
        (phase, field) for phase, model in PHASES.items() for field in model.model_fields
    )}  # fmt: skip
    return sorted(names, key=lambda n: (place.get(n, len(place)), n))


def result_lines(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """One line a run and prompt set: what was measured, what it was trained on."""
    lines = []
    for run in runs:
        for name, prompts in run.prompts.items():
            sums = np.array(list(prompts.values())).sum(0)
            line: dict[str, Any] = {"run": run.name, "set": name, "prompts": len(prompts), "K": run.steps}
            for label in STATISTICS:
                line[label] = value_of(label, sums)
            line["rounds"] = int(sums[_ROUNDS])
            line |= run.facts
            lines.append(line)
    return lines  # fmt: skip


def value_of(label: str, sums: np.ndarray) -> float | None:
    """A statistic of pooled sums; None where what it divides by was not measured."""
    statistic, needed = STATISTICS[label]
    return float(statistic(sums)) if all(sums[c] > 0 for c in needed) else None


def step_lines(runs: Sequence[ComparedRun]) -> list[dict[str, Any]]:
    """Share of rounds that accepted step k, by run and set; none where rounds have no steps."""
    out = []
    for run in runs:
        for name, prompts in run.prompts.items():
            sums = np.array(list(prompts.values())).sum(0)
            told = sums[_STEP_1:].sum() == sums[_ACCEPTED]
            for k in range(1, run.steps + 1 if sums[_ROUNDS] and told else 1):
                low, high = interval(list(prompts.values()), _step(k), (_ROUNDS,))
                out.append({"run": run.name, "set": name, "step": k,
                            "share": float(_step(k)(sums)), "low": low, "high": high,
                            "rounds": int(sums[_ROUNDS])})  # fmt: skip
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


def differences(
    base: ComparedRun, other: ComparedRun, resamples: int = 2000, seed: int = 0
) -> list[Difference]:
    """Every statistic that both runs have, over every prompt set that both asked."""
    out = []
    for set_name in (s for s in base.prompts if s in other.prompts):
        a, b = base.prompts[set_name], other.prompts[set_name]
        shared = [p for p in a if p in b]
        paired = len(shared) >= MIN_PROMPTS or a.keys() == b.keys()
        left, right = ([x[p] for p in (shared if paired else x)] for x in (a, b))
        for label in STATISTICS:
            found = compare(left, right, label, paired=paired, resamples=resamples, seed=seed)
            if found is not None:
                reason = why_not_comparable(base, other, label, set_name)
                out.append(Difference(label, set_name, base.name, other.name, *found, paired,
                                      (len(left), len(right)), reason))  # fmt: skip
    return out


def compare(
    left: list[np.ndarray], right: list[np.ndarray], label: str, *,
    paired: bool, resamples: int = 2000, seed: int = 0,
) -> tuple[float, float, float, float | None, float | None] | None:  # fmt: skip
    """(left's value, right's, right minus left, its interval's ends), None where either has none.

    Paired: ``left[i]`` and ``right[i]`` are one prompt, and are resampled together. Runs of
    different K have different columns: those that a statistic reads are the first.
    """
    statistic, _ = STATISTICS[label]
    a, b = np.array(left)[:, :_STEP_1], np.array(right)[:, :_STEP_1]
    values = value_of(label, a.sum(0)), value_of(label, b.sum(0))
    if values[0] is None or values[1] is None:
        return None
    low = high = None
    if min(len(a), len(b)) >= MIN_PROMPTS:
        rng = np.random.default_rng(seed)
        picks = rng.integers(0, len(a), (resamples, len(a)))
        others = picks if paired else rng.integers(0, len(b), (resamples, len(b)))
        low, high = _percentiles(statistic(b[others].sum(1)) - statistic(a[picks].sum(1)))
    return *values, values[1] - values[0], low, high


def interval(
    prompts: list[np.ndarray], statistic: Statistic, needed: tuple[int, ...],
    resamples: int = 2000, seed: int = 0,
) -> tuple[float | None, float | None]:  # fmt: skip
    """95 % interval of one run's statistic; (None, None) below five prompts that have it."""
    table = np.array([p for p in prompts if all(p[c] > 0 for c in needed)])
    if len(table) < MIN_PROMPTS:
        return None, None
    picks = np.random.default_rng(seed).integers(0, len(table), (resamples, len(table)))
    return _percentiles(statistic(table[picks].sum(1)))


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
