"""Small tables that notebooks show: a few facts, counts with their rates, findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
from pandas.io.formats.style import Styler

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.finding import Finding, by_severity
from eagle3lib.measure.arms import PLAIN, RequestRow, output_differences
from eagle3lib.target.states import StateStore

_EXCERPT_CHARS = 240
_STYLES = [
    {
        "selector": "th, td",
        "props": "text-align: left; vertical-align: top; padding: 4px 12px 4px 0",
    },
    {"selector": "td", "props": "white-space: normal; max-width: 46em"},
]


@dataclass(frozen=True)
class NoRows:
    """Words in place of a table that would be a bare header."""

    words: str

    def to_html(self) -> str:
        return f'<p class="sub">{escape(self.words)}</p>'

    _repr_html_ = to_html

    def __repr__(self) -> str:
        return self.words


Shown = Styler | NoRows


def show(frame: pd.DataFrame, nothing: str = "Nothing to show.") -> Shown:
    """A table for reading: nothing cut off, left-aligned, thousands separated; without a row the
    words ``nothing``."""
    if frame.empty:
        return NoRows(nothing)
    plain = frame.index.names == [None] and isinstance(frame.index, pd.RangeIndex)
    # Prompts and answers hold markup of their own, which a page must show and not obey.
    styler = frame.style.format(precision=3, thousands=",", na_rep="", escape="html")
    styler = styler.format_index(escape="html").set_table_styles(_STYLES)
    return styler.hide(axis="index") if plain else styler


def facts_table(
    facts: dict[str, Any] | list[dict[str, Any]], nothing: str = "Nothing to show."
) -> Shown:
    """One fact a line; a list of dicts becomes a table with their keys as columns."""
    if isinstance(facts, list):
        return show(pd.DataFrame(facts), nothing)
    frame = pd.DataFrame({"value": [_shown(v) for v in facts.values()]}, index=list(facts))
    return show(frame, nothing)


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def findings_table(findings: Iterable[Finding]) -> Shown:
    columns = ["severity", "title", "evidence", "remedy", "where"]
    lines = [f.as_dict() for f in by_severity(findings)]
    return show(pd.DataFrame(lines, columns=columns), "Nothing was found wrong.")


def lossless_table(metrics: dict[str, Any]) -> Shown:
    """The tests of samples, one a drafter's arm and temperature."""
    asked = sorted({line["temperature"] for line in metrics["points"] if line["temperature"]})
    return facts_table(
        metrics["lossless"],
        "Too few samples of both arms for a test."
        if asked
        else "No temperature above 0 was measured: there are no samples to test.",
    )


def parted_answers_table(rows: list[RequestRow], arm: str) -> Shown:
    """Where greedy answers of ``arm`` part from the engine's alone. ``rows`` of the headline."""
    greedy = [row for row in rows if not row.temperature]
    asked = {name: {row.prompt for row in greedy if row.arm == name} for name in (PLAIN, arm)}
    both = len(asked[PLAIN] & asked[arm])
    return show(
        output_differences(greedy, arm),
        f"The {arm} gave all {both} answers of the engine alone, token by token."
        if both
        else f"No greedy answer of the {arm} to compare with the engine alone.",
    )


def answers_table(rows: list[AnswerRow]) -> Shown:
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


def lengths_table(report: dict[str, Any]) -> Shown:
    """Tokens of prompts and answers by set and split, out of phase 01's data report."""
    sides = ("prompt", "answer")
    lines = [
        {"rows of": name, "side": side} | part[side]
        for name, part in report["lengths"].items()
        for side in sides
    ]
    return show(pd.DataFrame(lines).rename(columns={"p90": "90 % below"}))


def reasoning_table(report: dict[str, Any]) -> Shown:
    """Tokens that the target made, those of them that are reasoning, and code, by set."""
    lines = []
    for name, tokens in report["tokens_by_role"].items():
        text = report["text"][name]
        made = tokens.get("reasoning", 0) + tokens.get("answer", 0)
        languages = [f"{language} {n:,}" for language, n in text["languages"].items()]
        lines.append(
            {
                "set": name,
                "tokens made": made,
                "reasoning": f"{tokens.get('reasoning', 0) / max(made, 1):.1%}",
                "answers": text["answers"],
                "with code": f"{text['with_code'] / max(text['answers'], 1):.0%}",
                "code blocks": ", ".join(languages[:5]),
            }
        )
    return show(pd.DataFrame(lines))


def on_policy_table(lines: list[dict[str, Any]]) -> Shown:
    """How many answer tokens are the target's own greedy ones, by kind of answer."""
    return show(
        pd.DataFrame(
            [
                {
                    "set": line["set"],
                    "token ids": line["token_ids_from"],
                    "thinking": line["thinking"],
                    "temperature": line["temperature"],
                    "answers read": f"{line['answers']:,} of {line['of']:,}",
                    "answer tokens": line["tokens"],
                    "the target's own greedy token": line["greedy"],
                    "on-policy share": f"{line['greedy'] / max(line['tokens'], 1):.1%}",
                }
                for line in lines
            ]
        )
    )


def near_answers_table(report: dict[str, Any], rows: list[AnswerRow]) -> Shown:
    """How many answers are near an earlier one, and the first such pair as it is."""
    near = report["near_duplicates"]
    found, least = near["near_an_earlier_one"], near["least_similarity"]
    lines = {
        f"answers near an earlier one ({least:.0%} of 5-grams or more)": f"{found:,} of "
        f"{near['answers']:,}",
        "of these, to the same prompt": f"{near['of_these_to_the_same_prompt']:,}",
    }
    by_id = {row.id: row for row in rows}
    for share, *pair in near["pairs"][:1]:
        lines["for example, similarity"] = f"{share:.2f}"
        for word, row in zip(("an answer", "an earlier one"), map(by_id.get, pair), strict=True):
            said = (row.text or row.reasoning)[:_EXCERPT_CHARS] if row else ""
            asked = str(row.messages[-1]["content"])[:_EXCERPT_CHARS] if row else ""
            lines[word] = f"{said!r}, asked {asked!r}"
    return facts_table(lines)


def sample_answers(rows: list[AnswerRow], count: int) -> Shown:
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


def baselines_table(metrics: dict[str, Any]) -> Shown:
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


def steps_table(metrics: dict[str, Any]) -> Shown:
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


def acceptance_table(metrics: dict[str, Any]) -> Shown:
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
    return show(pd.DataFrame(lines), "No arm had a drafter.")


def comparison_table(metrics: dict[str, Any]) -> Shown:
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
    return show(pd.DataFrame(lines), "No set of prompts to compare.")
