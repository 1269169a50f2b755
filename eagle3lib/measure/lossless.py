"""Is sampling with a drafter still the target's own? A permutation test on the next tokens.

Samples of one prompt, ``n`` of each arm with seeds of their own, give the first tokens' empirical
distribution at each position. The statistic is the largest total variation distance of a position,

    TV = 1/2 sum over tokens |share in one arm - share in the other|

and its distribution under "both arms sample alike" comes from shuffling whole samples between the
arms (a sample's positions depend on each other; the samples do not). Total variation and no
chi-square: most tokens of a vocabulary are seen too seldom for the latter. The first token comes
from the prefill, which no draft reaches: its own test is the control. Where it is small too, the
arms differ without speculation (their samplers do, or samples depend on each other).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from eagle3lib.lab.finding import Finding

_ENDED = -1  # a sample that ended before this position
MIN_SAMPLES = 20


@dataclass(frozen=True)
class LosslessTest:
    """``threshold``: the distance that chance alone exceeds with probability ``alpha``: smaller
    differences can't be seen with so many samples. ``control_p_value``: the first token's alone."""

    samples: int
    positions: int
    distance: float
    threshold: float
    p_value: float
    control_p_value: float
    alpha: float

    @property
    def rejected(self) -> bool:
        return self.p_value <= self.alpha

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"rejected": self.rejected}


def compare_samples(
    plain: Sequence[Sequence[int]],
    spec: Sequence[Sequence[int]],
    *,
    alpha: float,
    permutations: int = 2000,
    seed: int = 0,
) -> LosslessTest | None:
    """None with fewer than 20 samples an arm. The p-value counts the observed split as one of the
    permutations (Phipson and Smyth 2010), so its false alarm rate is at most ``alpha``."""
    if min(len(plain), len(spec)) < MIN_SAMPLES:
        return None
    table = _table([*plain, *spec])  # [n, positions], codes
    sizes = [int(column.max()) + 1 for column in table.T]
    in_spec = np.arange(len(table)) >= len(plain)
    rng = np.random.default_rng(seed)
    splits = [in_spec, *(rng.permutation(in_spec) for _ in range(permutations))]
    # [1 + permutations, positions]; the observed split first
    distances = np.array([_distances(table, split, sizes) for split in splits])
    largest = distances.max(axis=1)
    return LosslessTest(
        samples=min(len(plain), len(spec)),
        positions=table.shape[1],
        distance=round(float(largest[0]), 4),
        threshold=round(float(np.quantile(largest[1:], 1 - alpha)), 4),
        p_value=_p_value(largest),
        control_p_value=_p_value(distances[:, 0]),
        alpha=alpha,
    )


def _table(samples: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(map(len, samples))
    padded = np.array([[*s, *[_ENDED] * (width - len(s))] for s in samples])
    return np.stack([np.unique(c, return_inverse=True)[1] for c in padded.T], axis=1)


def _p_value(statistics: np.ndarray) -> float:
    """Share of splits, the observed one first and among them, as far apart as the observed."""
    return round(float((statistics >= statistics[0] - 1e-12).mean()), 5)


def _distances(table: np.ndarray, in_spec: np.ndarray, sizes: Sequence[int]) -> list[float]:
    """Total variation between the two sides at each position."""
    out = []
    for column, size in zip(table.T, sizes, strict=True):
        spec = np.bincount(column[in_spec], minlength=size) / in_spec.sum()
        plain = np.bincount(column[~in_spec], minlength=size) / (~in_spec).sum()
        out.append(float(np.abs(spec - plain).sum()) / 2)
    return out


def check_lossless(tests: Sequence[dict[str, object]]) -> list[Finding]:
    """Rejected tests as errors. With alpha 0.01 one in a hundred is a false alarm: run it again."""
    return [
        Finding(
            "sampling-not-lossless",
            "error",
            f"{t['arm']} at temperature {t['temperature']} does not sample as the engine alone",
            f"next tokens differ by {t['distance']} in total variation, chance gives "
            f"{t['threshold']} or less; p {t['p_value']}, alpha {t['alpha']}, "
            f"{t['samples']} samples an arm; the first token alone, which no draft reaches: "
            f"p {t['control_p_value']}",
            "repeat with more lossless_samples; if it stays, and the first token is alike, the "
            "engine's acceptance rule is not exact (typical or relaxed acceptance): report it with "
            "this run",
            "06_benchmark_serving",
        )
        for t in tests
        if t["rejected"]
    ]
