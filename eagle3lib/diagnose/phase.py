"""Phase 07: replay what the benchmark's engine answered, and say what is the case."""

from __future__ import annotations

from typing import Any

from eagle3lib.diagnose.cause import QUESTIONS, Cause, as_cause, ranked
from eagle3lib.diagnose.causes import causes_of
from eagle3lib.diagnose.evidence import Evidence, collect, facts
from eagle3lib.diagnose.findings import acceptance_verdict, lossless_findings, speed_verdict
from eagle3lib.diagnose.live import StatesOf, live_states
from eagle3lib.diagnose.material import read_material
from eagle3lib.diagnose.replay import (
    ReplayedAnswer,
    compare_counts,
    first_repeat,
    plain_answers,
    replay_answers,
)
from eagle3lib.diagnose.waterfall import acceptance_waterfall, paying_steps, speed_waterfall
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.params import DiagnoseParams
from eagle3lib.lab.run import Phase
from eagle3lib.measure.arms import OWN, drafter_folder, read_requests
from eagle3lib.target.folder import Target

Replayed = dict[str, list[ReplayedAnswer]]


def served_states(phase: Phase, target: Target) -> StatesOf:
    """The target's states in the dtype that was served, made once for replay and diagnosis."""
    return live_states(target, _metrics(phase, "06_benchmark_serving")["dtype"])


def replay_sets(phase: Phase, target: Target, states_of: StatesOf) -> Replayed:
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
                drafter_folder(phase.folder.parent, OWN),
                dtype=benchmark["dtype"],
                steps=benchmark["num_speculative_tokens"],
                plain=plain_answers(rows),
                states_of=states_of,
                on_answer=bar.update,
            )
            for name, picked in chosen.items()
            if picked
        }


def diagnose_run(
    phase: Phase, cfg: DiagnoseParams, target: Target, states_of: StatesOf, replayed: Replayed
) -> tuple[dict[str, Any], list[Finding]]:
    """Numbers and causes of a run: the seven questions in order, none stopped at.

    Writes ``findings.json``: verdict, waterfalls, causes with proof and cost, the tables behind.
    """
    benchmark = _metrics(phase, "06_benchmark_serving")
    training = _metrics(phase, "04_train_drafter")
    steps = benchmark["num_speculative_tokens"]
    compared = {
        name: compare_counts(answers, steps, benchmark["dtype"])
        for name, answers in replayed.items()
    }
    evidence = collect(read_material(phase.folder.parent, target, states_of))
    line = next(a for a in benchmark["arms"] if (a["arm"], a["set"]) == (OWN, "workload"))
    acceptance, old = acceptance_verdict(
        compared["workload"], cfg.tolerance, cfg.good_acceptance_length
    )
    speed, slow = speed_verdict(line)
    causes = causes_of(evidence) + [as_cause(f, 7) for f in slow]
    causes += [as_cause(f, 2) for f in lossless_findings(compared)]
    causes = with_verdict(causes, old)
    bigram = training["baselines"].get("bigram_workload")
    same_steps = training["num_speculative_tokens"] == steps
    metrics = {
        "verdicts": {"acceptance": acceptance, "speed": speed, "cause": verdict_line(causes)},
        "num_speculative_tokens": steps,
        **compared,
        "round_cost": line["round_cost"],
        "bigram_per_step": _per_step(bigram["histogram"]) if bigram and same_steps else None,
        "waterfall": acceptance_waterfall(evidence),
        **_speed(evidence, line, steps),
        **facts(evidence),
        "findings": [c.as_dict() for c in causes],
    }
    write_json(phase.folder / "findings.json", report_of(metrics))
    return metrics, list(causes)


def report_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """What machines read: verdicts, causes, waterfalls and the counterfactual tables."""
    keys = ("verdicts", "findings", "waterfall", "speed_waterfall", "paying_steps",
            "engine_table", "mended_table")  # fmt: skip
    return {"questions": list(QUESTIONS)} | {k: metrics[k] for k in keys if k in metrics}


def verdict_line(causes: list[Cause]) -> str:
    """The run in a sentence that needs no knowledge of speculation."""
    above = [c for c in causes if c.severity != "note"]
    if not above:
        small = any(c.code == "smoke-test" for c in causes)
        return "nothing is wrong" + (
            "; too little was trained on to judge the drafter" if small else ""
        )
    first, rest = above[0], len(above) - 1
    cost = f", at {first.cost:.2f} tokens a round" if first.cost and first.cost >= 0.005 else ""
    more = f"; {rest} more after it" if rest else ""
    return f"{first.title}{cost}{more}. Do: {first.remedy}"


def with_verdict(causes: list[Cause], old: list[Finding]) -> list[Cause]:
    """The two verdicts' own findings where no cause says more: an engine that disagrees is named
    by its variant, and a smoke test is no hunt for a weak drafter."""
    codes = {c.code for c in causes}
    explained = any(c.severity != "note" for c in causes)
    kept = []
    for f in old:
        if f.code in codes or f.code in ("engine-disagrees", "nothing-accepted"):
            if not any(c.question == 2 and c.severity != "note" for c in causes):
                kept.append(as_cause(f, 2))
        elif f.code == "weak-drafter":
            if "smoke-test" not in codes and not explained:
                kept.append(as_cause(f, 4))
        else:
            kept.append(as_cause(f, 2))
    return ranked([*causes, *kept])


def _speed(e: Evidence, line: dict[str, Any], steps: int) -> dict[str, Any]:
    if e.material.drafter is None:
        return {}
    size = sum(f.stat().st_size for f in e.material.target.folder.glob("*.safetensors"))
    config = e.material.drafter.config
    return {
        "speed_waterfall": speed_waterfall(line, config, steps, size),
        "paying_steps": paying_steps(line, config, steps, size),
    }


def _per_step(histogram: list[int]) -> list[float]:
    """Share of rounds that accepted step k or more, from rounds by accepted drafts."""
    rounds = sum(histogram)
    return [round(sum(histogram[k:]) / rounds, 4) for k in range(1, len(histogram))]


def _metrics(phase: Phase, name: str) -> dict[str, Any]:
    return read_json(phase.of(name) / "metrics.json")
