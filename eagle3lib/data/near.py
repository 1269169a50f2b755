"""Near duplicates: prompts, and answers, that share most of their word 5-grams.

A question that differs in one word must not be trained on and held out at once: the held-out
figures would flatter the drafter. MinHash with locality-sensitive hashing finds the pairs to
compare, the exact Jaccard similarity of their 5-grams decides. Well under 1 ms for a short prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from eagle3lib.data.prompts import NEAR_DUPLICATE, Prompt, PromptFile, Reject
from eagle3lib.data.rows import AnswerRow

NEAR_ANSWERS = 0.8  # 5-grams shared: below it, answers to like questions begin to count

_NGRAM_WORDS = 5
_PERMUTATIONS, _SEED = 128, 1
# The index only proposes pairs, so it asks for less than the user does: a pair that it never
# proposes would be missed for good.
_INDEX_SHARE = 0.7
_PAIRS = 20
# Chinese and Japanese write no spaces: there each character counts as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def word_ngrams(prompt: Prompt) -> frozenset[str]:
    """Word 5-grams of what is asked, or all words of one that is shorter.

    System prompts are left out, since one often stands before every row; so are earlier answers,
    which the target gives anew.
    """
    grams: set[str] = set()
    for message in prompt.messages:
        if message["role"] in ("user", "tool"):
            grams |= _text_ngrams(message["content"])
    return frozenset(grams)


def _text_ngrams(text: str) -> frozenset[str]:
    words = _WORD.findall(text.lower())
    return _runs(words, min(_NGRAM_WORDS, len(words)))


def runs_of_words(text: str, count: int) -> frozenset[str]:
    """All runs of ``count`` words; none of a shorter text."""
    return _runs(_WORD.findall(text.lower()), count)


def _runs(words: list[str], count: int) -> frozenset[str]:
    last = len(words) - count + 1
    return frozenset(" ".join(words[i : i + count]) for i in range(last) if words)


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard similarity: shared 5-grams over all 5-grams of the two; 0 where one has none."""
    return len(a & b) / len(a | b) if a and b else 0.0


class _Index:
    """Sets of 5-grams by a key, found again by what they share with another set."""

    def __init__(self, least: float, grams_of: Callable[[str], frozenset[str]]):
        from datasketch import MinHash, MinHashLSH

        self._least, self._grams_of = least, grams_of
        self._lsh = MinHashLSH(threshold=_INDEX_SHARE * least, num_perm=_PERMUTATIONS)
        self._empty = MinHash(num_perm=_PERMUTATIONS, seed=_SEED)

    def find_or_add(self, key: str, grams: frozenset[str]) -> tuple[float, str]:
        """(similarity, key) of the nearest set that is similar by ``least`` or more; where there
        is none, ``grams`` are kept and the answer is (0, "").

        ``grams_of`` is asked for the sets to compare: keeping them all would fill the memory.
        """
        sketch = self._empty.copy()
        sketch.update_batch([gram.encode() for gram in grams])
        close = [
            (similarity(grams, self._grams_of(other)), other) for other in self._lsh.query(sketch)
        ]
        share, other = max(close, default=(0.0, ""))
        if share >= self._least:
            return share, other
        self._lsh.insert(key, sketch)
        return 0.0, ""


def drop_near_duplicates(files: Sequence[PromptFile], least: float) -> list[PromptFile]:
    """The files without prompts that are similar by ``least`` or more to one that stays.

    The first one stays, in the order of the files and, in each, of the prompts' ids: those are
    hashes of their content, so the order of the rows decides nothing. ``least`` 0 changes nothing.
    """
    if least == 0:
        return list(files)
    kept: dict[str, tuple[Prompt, str]] = {}  # id -> (prompt, place)
    index = _Index(least, lambda key: word_ngrams(kept[key][0]))

    def near_which(prompt: Prompt, place: str) -> str:
        """ "" keeps the prompt; an equal id does too: the split looks after it."""
        grams = word_ngrams(prompt)
        if prompt.id in kept or not grams:
            return ""
        share, other = index.find_or_add(prompt.id, grams)
        if other:
            return f"similarity {share:.2f} to {other} at {kept[other][1]}"
        kept[prompt.id] = (prompt, place)
        return ""

    results = []
    for file in files:
        in_order = sorted(file.prompts, key=lambda p: p.id)
        near = {p.id: near_which(p, file.places[p.id]) for p in in_order}
        rejects = [
            Reject(file.places[p.id], NEAR_DUPLICATE, p.id, near[p.id])
            for p in file.prompts
            if near[p.id]
        ]
        prompts = [p for p in file.prompts if not near[p.id]]
        results.append(replace(file, prompts=prompts, rejects=[*file.rejects, *rejects]))
    return results


@dataclass(frozen=True)
class NearAnswers:
    """Answers that are near an earlier one; ``same_prompt`` of them answer the same prompt.

    ``pairs`` are (similarity, row id, row id of the earlier one), in the order of the rows.
    """

    answers: int
    pairs: list[tuple[float, str, str]]
    same_prompt: int
    least: float

    def as_dict(self) -> dict[str, Any]:
        """What the metrics hold; the first pairs stand for all."""
        return {
            "answers": self.answers,
            "near_an_earlier_one": len(self.pairs),
            "of_these_to_the_same_prompt": self.same_prompt,
            "least_similarity": self.least,
            "pairs": [[round(share, 3), a, b] for share, a, b in self.pairs[:_PAIRS]],
        }


def near_duplicate_answers(rows: Iterable[AnswerRow], least: float = NEAR_ANSWERS) -> NearAnswers:
    """Count the answers that share ``least`` of their word 5-grams or more with an earlier one.

    Nothing is dropped: such answers are the target's own words, but many of them say that the
    prompts ask for little. An answer that has only its reasoning is compared by that. Exact
    Jaccard similarity of the pairs that MinHash proposes; about 2 ms for 500 words.
    """
    kept: dict[str, AnswerRow] = {}
    index = _Index(least, lambda key: _text_ngrams(_said(kept[key])))
    pairs: list[tuple[float, str, str]] = []
    total = same = 0
    for row in rows:
        total += 1
        grams = _text_ngrams(_said(row))
        share, other = index.find_or_add(row.id, grams) if grams else (0.0, "")
        if other:
            pairs.append((share, row.id, other))
            same += row.messages == kept[other].messages
        elif grams:
            kept[row.id] = row
    return NearAnswers(total, pairs, same, least)


def _said(row: AnswerRow) -> str:
    return row.text if row.text.strip() else row.reasoning
