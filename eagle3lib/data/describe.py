"""What the answers are made of: scripts, code, repetition."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

import pandas as pd

from eagle3lib.data.rows import AnswerRow

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_WORD = re.compile(r"\w+|[^\w\s]")
_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "CJK", "HIRAGANA",
            "KATAKANA", "HANGUL", "THAI")  # fmt: skip


def script_of(letter: str) -> str:
    """Writing system of a letter by its Unicode name, e.g. "LATIN"; "OTHER" for rare ones."""
    name = unicodedata.name(letter, "")
    return next((script for script in _SCRIPTS if name.startswith(script)), "OTHER")


def text_table(rows: Iterable[AnswerRow]) -> pd.DataFrame:
    """By set: characters, those inside code fences, letters by script, answers with any code."""
    counts: dict[str, Counter[str]] = {}
    scripts: dict[str, Counter[str]] = {}
    for row in rows:
        count = counts.setdefault(row.set, Counter())
        fenced = _FENCE.findall(row.text)
        count["answers"] += 1
        count["answers with code"] += bool(fenced)
        count["characters"] += len(row.text)
        count["in code"] += sum(map(len, fenced))
        scripts.setdefault(row.set, Counter()).update(map(script_of, filter(str.isalpha, row.text)))
    lines = []
    for name, count in counts.items():
        letters = sum(scripts[name].values())
        shares = [f"{s.title()} {n / letters:.1%}" for s, n in scripts[name].most_common(4)]
        lines.append(
            {
                "set": name,
                "answers": count["answers"],
                "with code": f"{count['answers with code'] / count['answers']:.0%}",
                "characters in code": f"{count['in code'] / max(count['characters'], 1):.0%}",
                "letters": ", ".join(shares),
            }
        )
    return pd.DataFrame(lines)


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
