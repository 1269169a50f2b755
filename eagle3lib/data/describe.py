"""The data report: how long rows are, whose words they hold, scripts, code, and repetition.

Everything here is a count that goes into ``metrics.json``; shares are divided where they are shown.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib.data.near import near_duplicate_answers
from eagle3lib.data.roles import tokens_by_role
from eagle3lib.data.rows import AnswerRow
from eagle3lib.data.template import load_chat_template
from eagle3lib.lab.errors import UserError

CODE, OTHER = "code", "digits, marks, spaces"
_FENCE = re.compile(r"```(?P<language>[^\s`]*).*?(?:```|\Z)", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s]")
_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA",
            "KATAKANA", "HANGUL", "THAI")  # fmt: skip


def data_report(
    rows: Sequence[AnswerRow],
    target_folder: Path,
    stop_ids: Sequence[int],
    *,
    trust_remote_code: bool = False,
    most_rows: int = 5000,
) -> dict[str, Any]:
    """All counts of the report, as phase 01 keeps them in its metrics.

    ``template_problem`` says why prompts could not be taken apart, "" when they could. A row costs
    a few milliseconds, so of more than ``most_rows`` that many are looked at, evenly picked
    (``rows_looked_at``); lengths are of all.
    """
    everything, rows = rows, evenly(rows, most_rows)
    problem = ""
    try:
        template = load_chat_template(target_folder, stop_ids, trust_remote_code=trust_remote_code)
    except UserError as error:  # the rows themselves are none the worse
        template, problem = None, str(error)
    roles = tokens_by_role(rows, template)
    return {
        "rows": len(everything),
        "rows_looked_at": len(rows),
        "lengths": lengths(everything),
        "tokens_by_role": {name: dict(count) for name, count in roles.items()},
        "template_problem": problem,
        "text": text_counts(rows),
        "near_duplicates": near_duplicate_answers(rows).as_dict(),
        "common_runs": top_ngrams(row for row in rows if row.trained).to_dict("records"),
    }


def evenly(rows: Sequence[AnswerRow], most: int) -> Sequence[AnswerRow]:
    """At most ``most`` of the rows, at equal distances, in their order."""
    if len(rows) <= most:
        return rows
    return [rows[i * len(rows) // most] for i in range(most)]


def lengths(rows: Iterable[AnswerRow]) -> dict[str, dict[str, dict[str, int]]]:
    """Tokens of prompts and answers by set and split: least, median, 90th percentile, most, all."""
    found: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        part = found.setdefault(f"{row.set} {row.split}", {"prompt": [], "answer": []})
        part["prompt"].append(len(row.prompt_token_ids))
        part["answer"].append(len(row.answer_token_ids))
    return {
        name: {side: _spread(sorted(tokens)) for side, tokens in part.items()}
        for name, part in sorted(found.items())
    }


def _spread(ordered: list[int]) -> dict[str, int]:
    """Quantiles by nearest rank: each is a length that a row has."""
    last = len(ordered) - 1
    named = {"least": 0.0, "median": 0.5, "p90": 0.9, "most": 1.0}
    return {k: ordered[round(q * last)] for k, q in named.items()} | {"all": sum(ordered)}


def script_of(letter: str) -> str:
    """Writing system of a letter by its Unicode name, e.g. "LATIN"; "OTHER" for rare ones."""
    name = unicodedata.name(letter, "")
    return next((script for script in _SCRIPTS if name.startswith(script)), "OTHER")


def text_counts(rows: Iterable[AnswerRow]) -> dict[str, dict[str, Any]]:
    """By set: answers, those with any code, code blocks by language, and characters.

    Each character counts once: in a code fence (to the end where the limit cut it), a letter of a
    script outside of one, or neither.
    """
    counts: dict[str, dict[str, Any]] = {}
    for row in rows:
        empty = {"answers": 0, "with_code": 0, "characters": Counter(), "languages": Counter()}
        count = counts.setdefault(row.set, empty)
        fences = list(_FENCE.finditer(row.text))
        count["answers"] += 1
        count["with_code"] += bool(fences)
        count["languages"].update(f["language"].lower() or "not named" for f in fences)
        count["characters"][CODE] += sum(len(f[0]) for f in fences)
        for character, times in Counter(_FENCE.sub("", row.text)).items():
            kind = script_of(character).title() if character.isalpha() else OTHER
            count["characters"][kind] += times
    for count in counts.values():
        count["characters"] = dict((+count["characters"]).most_common())
        count["languages"] = dict(count["languages"].most_common())
    return counts


def top_ngrams(rows: Iterable[AnswerRow], size: int = 5, most: int = 15) -> pd.DataFrame:
    """The commonest runs of ``size`` words, by the number of answers that hold them: what every
    answer begins with is seen here, and so is an answer that only repeats a template."""
    answers: Counter[tuple[str, ...]] = Counter()
    total = 0
    for row in rows:
        words = _WORD.findall(row.text)
        answers.update({tuple(words[i : i + size]) for i in range(len(words) - size + 1)})
        total += 1
    return pd.DataFrame(
        [
            {"words": " ".join(gram), "answers": count, "share": count / max(total, 1)}
            for gram, count in answers.most_common(most)
        ],
        columns=["words", "answers", "share"],
    )
