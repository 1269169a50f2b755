"""Small tables that notebooks show: a few facts, counts with their rates, findings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.finding import Finding, by_severity
from eagle3lib.target.states import StateStore

_STYLES = [
    {
        "selector": "th, td",
        "props": "text-align: left; vertical-align: top; padding: 4px 12px 4px 0",
    },
    {"selector": "td", "props": "white-space: normal; max-width: 46em"},
]


def show(frame: pd.DataFrame) -> Styler:
    """A table for reading: nothing cut off, left-aligned, thousands separated."""
    plain = frame.index.names == [None] and isinstance(frame.index, pd.RangeIndex)
    styler = frame.style.format(precision=3, thousands=",", na_rep="").set_table_styles(_STYLES)
    return styler.hide(axis="index") if plain else styler


def facts_table(facts: dict[str, Any] | list[dict[str, Any]]) -> Styler:
    """One fact a line; a list of dicts becomes a table with their keys as columns."""
    if isinstance(facts, list):
        return show(pd.DataFrame(facts))
    return show(pd.DataFrame({"value": [_shown(v) for v in facts.values()]}, index=list(facts)))


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def findings_table(findings: Iterable[Finding]) -> Styler:
    columns = ["severity", "title", "evidence", "remedy", "where"]
    return show(pd.DataFrame([f.as_dict() for f in by_severity(findings)], columns=columns))


def answers_table(rows: list[AnswerRow]) -> Styler:
    """Answers and tokens by set and split, and how they ended."""
    frame = pd.DataFrame(
        [
            {
                "set": r.set,
                "split": r.split,
                "answer tokens": len(r.answer_token_ids),
                "prompt tokens": len(r.prompt_token_ids),
                "cut by the limit": r.finish_reason == "length",
                "kept apart": bool(r.kept_apart),
            }
            for r in rows
        ]
    )
    table = frame.groupby(["set", "split"]).sum()
    table.insert(0, "answers", frame.groupby(["set", "split"]).size())
    return show(table)


def sample_answers(rows: list[AnswerRow], count: int) -> Styler:
    """The first characters of some prompts and answers, evenly picked."""
    picked = rows[:: max(1, len(rows) // count)][:count]
    return show(
        pd.DataFrame(
            [
                {
                    "set": r.set,
                    "prompt": str(r.messages[-1]["content"])[:160],
                    "answer": r.text[:240],
                }
                for r in picked
            ]
        )
    )


def norms_table(store: StateStore, most_rows: int = 24) -> pd.DataFrame:
    """Root mean square of every state of some conversations, by slot."""
    out = []
    for entry in store.entries[:: max(1, len(store.entries) // most_rows)]:
        row = store.row(entry)
        slots, last = row.slots.float(), row.last[entry.first_taught :].float()
        states = [*slots.chunk(len(store.slots), dim=-1), last]
        names = [f"before layer {slot}" for slot in store.slots] + ["last (pre-norm)"]
        for name, state in zip(names, states, strict=True):
            rms = state.square().mean(-1).sqrt()
            out += [{"state": name, "rms": float(value)} for value in rms[::8]]
    return pd.DataFrame(out)


def baselines_table(metrics: dict[str, Any]) -> Styler:
    """Acceptance length on held-out answers: the drafter, untrained, and the n-gram baselines."""
    lines = {"drafter (best epoch)": metrics["heldout"], "drafter, untrained": metrics["untrained"]}
    for label in ("bigram", "unigram"):
        lines[label] = {
            name.removeprefix(f"{label}_"): counts
            for name, counts in metrics["baselines"].items()
            if name.startswith(f"{label}_")
        }
    return show(
        pd.DataFrame(
            {
                name: {s: counts["acceptance_length"] for s, counts in sets.items()}
                for name, sets in lines.items()
            }
        ).T
    )


def steps_table(metrics: dict[str, Any]) -> Styler:
    """Training-time-test steps of the last update: labels, labels inside the vocabulary, right
    ones."""
    lines = []
    for k, step in enumerate(metrics["final_steps"], start=1):
        lines.append(
            {
                "step": k,
                "labels": step["positions"],
                "in draft vocabulary": step["inside"],
                "first choice right": f"{step['right'] / max(step['inside'], 1):.1%}",
                "loss": step["loss"],
            }
        )
    return show(pd.DataFrame(lines).set_index("step"))


def acceptance_table(metrics: dict[str, Any]) -> Styler:
    """Counts and shares per step of every arm with a drafter."""
    lines = []
    for line in metrics["arms"]:
        accepted = line.get("acceptance")
        if not accepted:
            continue
        entry = {
            "set": line["set"],
            "arm": line["arm"],
            "rounds": accepted["rounds"],
            "drafted": accepted["drafted"],
            "accepted": accepted["accepted"],
            "acceptance length": accepted["acceptance_length"],
        }
        for k, (share, given) in enumerate(
            zip(accepted["per_step"], accepted["conditional"], strict=True), start=1
        ):
            entry[f"step {k}"] = f"{share:.1%}"
            entry[f"step {k} given {k - 1}"] = "" if given is None else f"{given:.1%}"
        lines.append(entry)
    return show(pd.DataFrame(lines))


def comparison_table(metrics: dict[str, Any]) -> Styler:
    """Engine against simulator by set."""
    lines = []
    for name in ("workload", "general"):
        compared = metrics.get(name)
        if not compared:
            continue
        lines.append(
            {
                "set": name,
                "answers": compared["answers"],
                "rounds compared": compared["rounds_compared"],
                "rounds equal": compared["rounds_equal"],
                "served": compared["engine"]["acceptance_length"],
                "simulated": compared["simulator"]["acceptance_length"],
                "answer tokens in draft vocabulary": compared["vocab_coverage"],
                "target's greedy token": compared["teacher_agreement"],
            }
        )
    return show(pd.DataFrame(lines))
