"""Expected speed-up over K and concurrency, from the measured acceptance and the measured cost.

    S(K, c) = L(K) / C(K, c)        C(K, c) = 1 + host + K step + K (c - 1) crowd

L is the acceptance length that K drafts would have had; C is the cost of a round in plain steps at
the same concurrency. ``step`` is what one more draft costs, ``crowd`` what a draft costs more with
every other request in flight, as verification stops being free. Each coefficient is fitted by least
squares where the measured points vary in it; else it is assumed, and ``CostModel`` says so. Beyond
the measured K, L takes the last step's conditional acceptance to stay as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.diagnose.waterfall import drafter_cost
from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.arms import OWN
from eagle3lib.target.folder import Target

Line = dict[str, Any]


@dataclass(frozen=True)
class CostModel:
    """``crowd`` is None where one concurrency was measured: then nothing is said of others."""

    host: float
    step: float
    crowd: float | None
    concurrency: int  # of the first measured point
    told: dict[str, str]  # coefficient -> where it comes from
    worst_error: float | None  # largest share by which a measured cost differs from the model's

    def cost(self, steps: int, concurrency: int) -> float:
        """Plain steps of a round. Raises ``ValueError`` for a concurrency that it can't tell."""
        if self.crowd is None and concurrency != self.concurrency:
            raise ValueError(f"measured at concurrency {self.concurrency} alone")
        crowd = (self.crowd or 0.0) * (concurrency - 1)
        return 1 + self.host + steps * (self.step + crowd)


def measured_points(metrics: Line, set_name: str = "workload", arm: str = OWN) -> list[Line]:
    """Points of a drafter's arm at the run's temperature and no filled context, one engine (the
    headline's), whose cost of a round is known from prompts enough for an interval."""
    return [
        p
        for p in metrics["points"]
        if (p["arm"], p["set"], p["engine"]) == (arm, set_name, metrics["points"][0]["engine"])
        and p["temperature"] == metrics["temperature"]
        and not p["context_tokens"]
        and p["round_cost"]
        and p["speedup"]["low"] is not None
    ]


def reads_of_a_step(drafter: Path, target: Target) -> float:
    """Plain steps that one draft's weights cost to read; a floor of its real cost."""
    config = read_drafter_config(drafter, target.num_layers)
    return drafter_cost(
        config, 1, sum(f.stat().st_size for f in target.folder.glob("*.safetensors"))
    )


def fit_cost(points: Sequence[Line], step_floor: float) -> CostModel | None:
    """None without a measured cost. ``step_floor`` is taken where one K alone was measured."""
    if not points:
        return None
    steps = np.array([p["num_speculative_tokens"] for p in points], dtype=float)
    loads = np.array([p["concurrency"] for p in points], dtype=float)
    extra = np.array([p["round_cost"] for p in points]) - 1
    told = {"host": f"fitted to {len(points)} measured points"}
    columns, fixed = [np.ones(len(points))], np.zeros(len(points))
    if len(set(steps)) > 1:
        columns.append(steps)
        told["step"] = f"fitted, K {_values(steps)}"
    else:
        fixed += step_floor * steps
        told["step"] = f"assumed, the drafter's reads alone: only K {_values(steps)} was measured"
    if len(set(loads)) > 1:
        columns.append(steps * (loads - 1))
        told["crowd"] = f"fitted, concurrency {_values(loads)}"
    else:
        told["crowd"] = f"unknown: only concurrency {_values(loads)} was measured"
    found = list(np.linalg.lstsq(np.stack(columns, 1), extra - fixed, rcond=None)[0])
    host = float(found.pop(0))
    step = float(found.pop(0)) if len(set(steps)) > 1 else step_floor
    crowd = float(found.pop(0)) if len(set(loads)) > 1 else None
    model = CostModel(host, step, crowd, int(loads[0]), told, None)
    pairs = zip(points, steps, loads, strict=True)
    errors = [abs(model.cost(int(k), int(c)) / p["round_cost"] - 1) for p, k, c in pairs]
    spare = len(points) > len(columns)  # as many points as coefficients always fit
    return CostModel(host, step, crowd, int(loads[0]), told, max(errors) if spare else None)


def _values(numbers: np.ndarray) -> str:
    return ", ".join(f"{n:g}" for n in sorted(set(numbers.tolist())))


def expected_length(counts: Counts, steps: int) -> float:
    """1 + the shares of rounds that accept step 1 .. ``steps``; steps beyond the measured ones
    decay by the last conditional acceptance. Raises ``ValueError`` for counts without steps."""
    shares = list(counts.per_step[:steps])
    if not shares:
        raise ValueError("these counts don't tell acceptance per step")
    last = next((c for c in reversed(counts.conditional) if c is not None), 0.0)
    while len(shares) < steps:
        shares.append(shares[-1] * last)
    return 1 + sum(shares)


def speedup_grid(
    model: CostModel, counts: Counts, steps: Sequence[int], loads: Sequence[int]
) -> list[list[float]]:
    """Expected speed-up, a row for each concurrency and a column for each K."""
    return [
        [expected_length(counts, k) / max(model.cost(k, load), 1e-9) for k in steps]
        for load in loads
    ]


def facts(model: CostModel | None) -> Line:
    """The coefficients and where each comes from."""
    if model is None:
        return {"cost of a round": "not measured in this run, or from too few prompts"}
    values = {"host": model.host, "step": model.step, "crowd": model.crowd}
    units = {"host": "a round", "step": "a draft", "crowd": "a draft and other request"}
    lines = {
        f"{name}, plain steps {units[name]}": f"{'-' if v is None else f'{v:.4g}'} "
        f"({model.told[name]})"
        for name, v in values.items()
    }
    error = model.worst_error
    told = (
        "unknown, as many points as coefficients" if error is None else f"{error:.1%} of the cost"
    )
    return lines | {"largest error at a measured point": told}
