"""Phase 07: replay what the benchmark's engine answered, and say what is the case."""

from __future__ import annotations

from typing import Any

from eagle3lib.diagnose.findings import (
    acceptance_verdict,
    data_findings,
    lossless_findings,
    speed_verdict,
)
from eagle3lib.diagnose.replay import (
    ReplayedAnswer,
    compare_counts,
    first_repeat,
    plain_answers,
    replay_answers,
)
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding, by_severity
from eagle3lib.lab.params import DiagnoseParams
from eagle3lib.lab.run import Phase
from eagle3lib.measure.arms import OWN, read_requests
from eagle3lib.target.folder import Target

Replayed = dict[str, list[ReplayedAnswer]]


def replay_sets(phase: Phase, target: Target) -> Replayed:
    """Replay the first answer to every benchmark prompt in our drafter's arm, by prompt set."""
    benchmark = _metrics(phase, "06_benchmark_serving")
    rows = read_requests(phase.of("06_benchmark_serving"))
    chosen = {name: first_repeat(rows, OWN, name) for name in ("workload", "general")}
    if not chosen["workload"]:
        raise UserError(
            "the benchmark has no record of rounds",
            where=phase.of("06_benchmark_serving"),
            expected="vLLM 0.32 or newer, which gives one for each request",
            next="run phase 06 with such an engine",
        )
    with phase.progress(sum(map(len, chosen.values())), "answers", "replay") as bar:
        return {
            name: replay_answers(
                picked,
                target,
                phase.of("05_export_drafter") / "drafter",
                dtype=benchmark["dtype"],
                steps=benchmark["num_speculative_tokens"],
                plain=plain_answers(rows),
                on_answer=bar.update,
            )
            for name, picked in chosen.items()
            if picked
        }


def diagnose_run(
    phase: Phase, cfg: DiagnoseParams, replayed: Replayed
) -> tuple[dict[str, Any], list[Finding]]:
    """Numbers and findings of a run: acceptance first, then the data behind it, then speed."""
    benchmark = _metrics(phase, "06_benchmark_serving")
    training = _metrics(phase, "04_train_drafter")
    steps = benchmark["num_speculative_tokens"]
    compared = {
        name: compare_counts(answers, steps, benchmark["dtype"])
        for name, answers in replayed.items()
    }
    workload = compared["workload"]
    acceptance, findings = acceptance_verdict(workload, cfg.tolerance, cfg.good_acceptance_length)
    bigram = training["baselines"].get("bigram_workload")
    same_steps = training["num_speculative_tokens"] == steps
    baseline = bigram["acceptance_length"] if bigram and same_steps else None
    findings += lossless_findings(compared)
    findings += data_findings(
        workload, compared.get("general"), training["trained_tokens"], baseline
    )
    line = next(a for a in benchmark["arms"] if (a["arm"], a["set"]) == (OWN, "workload"))
    speed, more = speed_verdict(line)
    findings = by_severity(findings + more)
    metrics = {
        "verdicts": {"acceptance": acceptance, "speed": speed},
        "num_speculative_tokens": steps,
        **compared,
        "round_cost": line["round_cost"],
        "bigram_per_step": _per_step(bigram["histogram"]) if bigram and same_steps else None,
        "findings": [f.as_dict() for f in findings],
    }
    return metrics, findings


def _per_step(histogram: list[int]) -> list[float]:
    """Share of rounds that accepted step k or more, from rounds by accepted drafts."""
    rounds = sum(histogram)
    return [round(sum(histogram[k:]) / rounds, 4) for k in range(1, len(histogram))]


def _metrics(phase: Phase, name: str) -> dict[str, Any]:
    return read_json(phase.of(name) / "metrics.json")
