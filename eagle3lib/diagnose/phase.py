"""Phase 07 and ``eagle3 diagnose``: replay what an engine answered, and say what is the case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eagle3lib.diagnose.cause import QUESTIONS, Cause, as_cause, ranked
from eagle3lib.diagnose.causes import causes_of
from eagle3lib.diagnose.evidence import collect, facts
from eagle3lib.diagnose.experiments import with_trials
from eagle3lib.diagnose.findings import (
    acceptance_verdict,
    lossless_findings,
    slower_elsewhere,
    speed_verdict,
)
from eagle3lib.diagnose.material import SETS, Material, read_material
from eagle3lib.diagnose.replay import (
    ReplayedAnswer,
    compare_counts,
    plain_answers,
    replay_answers,
)
from eagle3lib.diagnose.waterfall import acceptance_waterfall, speed_facts
from eagle3lib.lab.files import write_json
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.machine import cores
from eagle3lib.lab.params import DiagnoseParams
from eagle3lib.lab.run import Phase
from eagle3lib.measure.arms import OWN
from eagle3lib.target.folder import Target

Replayed = dict[str, list[ReplayedAnswer]]
# Faults of the measurement whose rounds no simulator has: other drafts, other draws, missing ones.
_DIFFERS = {"k-mistranslated", "sampled-benchmark", "accounting"}
OnAnswer = Callable[[int], None]


def _unseen(answers: int) -> None:
    """Nobody looks on."""


def diagnose_run(
    phase: Phase, cfg: DiagnoseParams, target: Target
) -> tuple[dict[str, Any], list[Finding], Replayed]:
    """Phase 07: ``diagnose`` of a run. Writes ``findings.json``: verdicts, waterfalls, causes with
    proof and cost, the tables behind."""
    torch.set_num_threads(cores())
    material = read_material(phase.folder.parent, target)
    answers = sum(len(material.first_answers(name)) for name in SETS)
    with phase.progress(answers, "answers", "replay") as bar:
        metrics, findings, replayed = diagnose(material, cfg, bar.update)
    write_json(phase.folder / "findings.json", report_of(metrics))
    return metrics, list(findings), replayed


def diagnose(
    m: Material,
    cfg: DiagnoseParams,
    on_answer: OnAnswer = _unseen,
    *,
    every_variant: bool = True,
) -> tuple[dict[str, Any], list[Cause], Replayed]:
    """Numbers and causes of a run, or of anybody's drafter: the seven questions in order, none
    stopped at. What the material lacks leaves its numbers None and its tables empty; the keys stay.

    ``on_answer`` is told of every answer replayed; ``every_variant`` is ``collect``'s.
    """
    replayed = replay_sets(m, on_answer)
    compared = {
        name: compare_counts(answers, m.steps or 0, m.dtype) for name, answers in replayed.items()
    }
    evidence = collect(m, every_variant=every_variant)
    acceptance, old = acceptance_verdict(
        compared["workload"], cfg.tolerance, cfg.good_acceptance_length
    )
    if m.not_replayed:
        acceptance = f"nothing was replayed: {m.not_replayed}"
    speed, slow = speed_verdict(m.line)
    slow += slower_elsewhere(m.benchmark, OWN)
    causes = causes_of(evidence) + [as_cause(f, 7) for f in slow]
    causes += [as_cause(f, 2) for f in lossless_findings(compared)]
    causes = with_trials(with_verdict(causes, old), m)
    metrics = {
        "verdicts": {"acceptance": acceptance, "speed": speed, "cause": verdict_line(causes)},
        "num_speculative_tokens": m.steps,
        "answered_by": m.answered_by,
        "not_replayed": m.not_replayed,
        **compared,
        "round_cost": m.line.get("round_cost"),
        "bigram_per_step": _bigram(m),
        "waterfall": acceptance_waterfall(evidence),
        **speed_facts(evidence, m.line, m.steps),
        **facts(evidence),
        "findings": [c.as_dict() for c in causes],
    }
    return metrics, causes, replayed


def replay_sets(m: Material, on_answer: OnAnswer = _unseen) -> Replayed:
    """The first answer to every prompt in our drafter's arm, by prompt set; "workload" always."""
    chosen = {name: m.first_answers(name) for name in SETS}
    return {
        name: replay_answers(
            picked,
            m.head,
            m.states_of,
            m.drafter if m.steps else None,
            steps=m.steps or 0,
            slots=m.slots,
            plain=plain_answers(m.requests),
            on_answer=on_answer,
        )
        for name, picked in chosen.items()
        if picked or name == SETS[0]
    }


def _bigram(m: Material) -> list[float] | None:
    """The training's bigram on the workload, where it was measured with this K. A drafter from
    elsewhere has no training here."""
    bigram = (m.training.get("baselines") or {}).get("bigram_workload")
    same_steps = m.training.get("num_speculative_tokens") == m.steps
    return _per_step(bigram["histogram"]) if bigram and same_steps else None


def report_of(metrics: dict[str, Any]) -> dict[str, Any]:
    """What machines read: verdicts, causes, waterfalls and the counterfactual tables."""
    keys = ("verdicts", "findings", "waterfall", "speed_waterfall", "paying_steps",
            "engine_table", "mended_table")  # fmt: skip
    return {"questions": list(QUESTIONS)} | {k: metrics[k] for k in keys if k in metrics}


def verdict_line(causes: list[Cause]) -> str:
    """The run in a sentence that needs no knowledge of speculation."""
    above = [c for c in causes if c.severity != "note"]
    if not above:
        codes = {c.code for c in causes}
        return (
            "nothing is wrong"
            + ("; too little was trained on to judge the drafter" if "smoke-test" in codes else "")
            + ("; no engine was asked" if "not-served" in codes else "")
        )
    first, rest = above[0], len(above) - 1
    cost = f", at {first.cost:.2f} tokens a round" if first.cost and first.cost >= 0.005 else ""
    more = f"; {rest} more after it" if rest else ""
    return f"{first.title}{cost}{more}. Do: {first.remedy}"


def with_verdict(causes: list[Cause], old: list[Finding]) -> list[Cause]:
    """The two verdicts' own findings where no cause says more: an engine that disagrees is named
    by its variant or by how it was asked, and a smoke test is no hunt for a weak drafter."""
    codes = {c.code for c in causes}
    differs = any(c.question == 2 and c.severity != "note" for c in causes) or codes & _DIFFERS
    explained = any(c.severity != "note" for c in causes)
    kept = []
    for f in old:
        if f.code in codes or f.code in ("engine-disagrees", "nothing-accepted"):
            if not differs:
                kept.append(as_cause(f, 2))
        elif f.code == "weak-drafter":
            if "smoke-test" not in codes and not explained:
                kept.append(as_cause(f, 4))
        else:
            kept.append(as_cause(f, 2))
    return ranked([*causes, *kept])


def _per_step(histogram: list[int]) -> list[float]:
    """Share of rounds that accepted step k or more, from rounds by accepted drafts."""
    rounds = sum(histogram)
    return [round(sum(histogram[k:]) / rounds, 4) for k in range(1, len(histogram))]
