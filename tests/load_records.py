"""Records of a benchmark whose rounds cost what a test says: K and loads crossed, both arms."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lib.diagnose.expected_speed import CostModel
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import OWN, PLAIN, REQUESTS, SWEEPS, RequestRow
from eagle3lib.measure.summary import summarise

COST = CostModel(host=0.2, step=0.1, crowd=0.01, concurrency=1, told={}, worst_error=None)
PARAMS = BenchmarkParams(
    repeats=1, num_speculative_tokens=3, more_speculative_tokens="1", concurrency="1,8"
)
_PLAIN_STEP_S = 0.05
_ROUNDS = 20


def crossed_rows(prompts: Sequence[str], cost: CostModel = COST) -> list[RequestRow]:
    """The headline (K = 3, one in flight) first. At every point the same rounds, cut at its K, so
    that acceptance at a smaller K is what the larger one tells of it."""
    return [
        row
        for steps in (3, 1)
        for load in (1, 8)
        for n, prompt in enumerate(prompts)
        for row in _pair(n, prompt, steps, load, cost.cost(steps, load))
    ]


def _pair(number: int, prompt: str, steps: int, load: int, cost: float) -> list[RequestRow]:
    draw = random.Random(number)
    accepted = [min(draw.choice((0, 0, 1, 2, 3)), steps) for _ in range(_ROUNDS)]
    answer = list(range(1 + sum(accepted) + len(accepted)))
    common = (prompt, 0, [1, 2, 3], answer, "length")
    # The first token comes from the prefill in both arms.
    seconds = {PLAIN: (len(answer) - 1) * _PLAIN_STEP_S, OWN: _ROUNDS * cost * _PLAIN_STEP_S}
    return [
        RequestRow(
            arm, "workload", *common, seconds[arm],
            *((accepted, [steps] * _ROUNDS) if arm == OWN else (None, None)),
            steps=steps, concurrency=load, started_s=1e9 + number,
        )
        for arm in (PLAIN, OWN)
    ]  # fmt: skip


def metrics_of(rows: list[RequestRow]) -> dict[str, Any]:
    """As the benchmark writes them, through JSON."""
    return json.loads(json.dumps(summarise(rows, PARAMS, {})))


def write_records(benchmark: Path, rows: list[RequestRow], metrics: dict[str, Any]) -> None:
    """Over those of a finished benchmark, whose facts about servers and gates stay."""
    head = [r for r in rows if (r.steps, r.concurrency) == (3, 1)]
    swept = [r for r in rows if r not in head]
    for name, some in ((REQUESTS, head), (SWEEPS, swept)):
        lines = "".join(json.dumps(asdict(r)) + "\n" for r in some)
        (benchmark / name).write_text(lines, encoding="utf-8")
    path = benchmark / "metrics.json"
    old = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(old | metrics), encoding="utf-8")
