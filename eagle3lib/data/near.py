"""Near duplicates: prompts that share most of their word 5-grams.

A question that differs in one word must not be trained on and held out at once: the held-out
figures would flatter the drafter. MinHash with locality-sensitive hashing finds the pairs to
compare, the exact Jaccard similarity of their 5-grams decides. Well under 1 ms for a short prompt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from eagle3lib.data.prompts import NEAR_DUPLICATE, Prompt, PromptFile, Reject

_NGRAM_WORDS = 5
_PERMUTATIONS, _SEED = 128, 1
# The index only proposes pairs, so it asks for less than the user does: a pair that it never
# proposes would be missed for good.
_INDEX_SHARE = 0.7
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
            words = _WORD.findall(message["content"].lower())
            last = max(1, len(words) - _NGRAM_WORDS + 1)
            grams.update(" ".join(words[i : i + _NGRAM_WORDS]) for i in range(last) if words)
    return frozenset(grams)


def similarity(a: frozenset[str], b: frozenset[str]) -> float:
    """Jaccard similarity: shared 5-grams over all 5-grams of the two; 0 where one has none."""
    return len(a & b) / len(a | b) if a and b else 0.0


class _Kept:
    """The prompts that stay so far, found again by what they share with another."""

    def __init__(self, least: float):
        from datasketch import MinHash, MinHashLSH

        self._least = least
        self._index = MinHashLSH(threshold=_INDEX_SHARE * least, num_perm=_PERMUTATIONS)
        self._empty = MinHash(num_perm=_PERMUTATIONS, seed=_SEED)
        self._prompts: dict[str, tuple[Prompt, str]] = {}  # id -> (prompt, place)

    def add(self, prompt: Prompt, place: str) -> str:
        """Keep ``prompt`` and return "", or say which one it is a near duplicate of."""
        grams = word_ngrams(prompt)
        if prompt.id in self._prompts or not grams:  # an equal id: the split looks after it
            return ""
        sketch = self._empty.copy()
        sketch.update_batch([gram.encode() for gram in grams])
        close = [
            (similarity(grams, word_ngrams(self._prompts[key][0])), key)
            for key in self._index.query(sketch)
        ]
        share, key = max(close, default=(0.0, ""))
        if share >= self._least:
            return f"similarity {share:.2f} to {key} at {self._prompts[key][1]}"
        self._index.insert(prompt.id, sketch)
        self._prompts[prompt.id] = (prompt, place)
        return ""


def drop_near_duplicates(files: Sequence[PromptFile], least: float) -> list[PromptFile]:
    """The files without prompts that are similar by ``least`` or more to one that stays.

    The first one stays, in the order of the files and, in each, of the prompts' ids: those are
    hashes of their content, so the order of the rows decides nothing. ``least`` 0 changes nothing.
    """
    if least == 0:
        return list(files)
    kept = _Kept(least)
    results = []
    for file in files:
        in_order = sorted(file.prompts, key=lambda p: p.id)
        near = {p.id: kept.add(p, file.places[p.id]) for p in in_order}
        prompts = [p for p in file.prompts if not near[p.id]]
        rejects = [
            Reject(file.places[p.id], NEAR_DUPLICATE, p.id, near[p.id])
            for p in file.prompts
            if near[p.id]
        ]
        results.append(replace(file, prompts=prompts, rejects=[*file.rejects, *rejects]))
    return results
