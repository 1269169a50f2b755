"""The reduced draft vocabulary: which target tokens a drafter can propose.

``d2t`` [D] int64 holds offsets: target id = draft id + d2t[draft id]. ``t2d`` [V] bool is true
where a target id is in the draft vocabulary. The law: sum(t2d) = D and positions(t2d) = arange(D)
+ d2t.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int64
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_atomic
from eagle3lib.lab.finding import Finding, Severity, raise_errors


@dataclass(frozen=True)
class VocabMap:
    d2t: Int64[Tensor, " D"]
    t2d: Bool[Tensor, " V"]

    @property
    def target_ids(self) -> Int64[Tensor, " D"]:
        """Target id of every draft id, rising."""
        return torch.arange(len(self.d2t)) + self.d2t

    @property
    def draft_ids(self) -> Int64[Tensor, " V"]:
        """Draft id of every target id, -1 outside the draft vocabulary."""
        ids = torch.full((len(self.t2d),), -1, dtype=torch.int64)
        ids[self.t2d] = torch.arange(len(self.d2t))
        return ids

    def save(self, path: Path) -> None:
        write_atomic(path, lambda tmp: save_file({"d2t": self.d2t, "t2d": self.t2d}, tmp))

    @classmethod
    def load(cls, path: Path) -> VocabMap:
        if not path.exists():
            raise UserError("there is no vocabulary map", where=path, next="eagle3 run PROFILE 03")
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise UserError(
                f"the vocabulary map can't be read: {error}",
                where=path,
                next="eagle3 run PROFILE 03",
            ) from None
        raise_errors(check_vocab_map(tensors["d2t"], tensors["t2d"], str(path)))
        return cls(tensors["d2t"], tensors["t2d"])


def build_vocab_map(
    counts: Counter[int], vocab_size: int, draft_vocab_size: int, forced: Iterable[int] = ()
) -> VocabMap:
    """The ``forced`` ids, then the most frequent ids, ties by the lower id.

    Where fewer distinct tokens were seen than the draft vocabulary holds, the lowest unseen ids
    fill it (byte and punctuation tokens in most tokenizers).
    """
    if not 0 < draft_vocab_size <= vocab_size:
        raise UserError(
            f"draft_vocab_size {draft_vocab_size}",
            expected=f"1 to {vocab_size}, the target's vocabulary",
        )
    first = list(dict.fromkeys(forced))
    unknown = [i for i in (*counts, *first) if not 0 <= i < vocab_size]
    if unknown:
        raise UserError(f"token id {unknown[0]} is outside the target's vocabulary of {vocab_size}")
    if len(first) > draft_vocab_size:
        raise UserError(
            f"draft_vocab_size {draft_vocab_size} can't hold the {len(first)} forced ids",
            expected=f"at least {len(first)}",
        )
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    chosen = list(dict.fromkeys([*first, *ranked, *range(vocab_size)]))[:draft_vocab_size]
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    target_ids = t2d.nonzero().flatten()
    return VocabMap(d2t=target_ids - torch.arange(draft_vocab_size), t2d=t2d)


def count_tokens(answers: Iterable[Sequence[int]]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for ids in answers:
        counts.update(ids)
    return counts


def coverage_counts(vocab: VocabMap, answers: Iterable[Sequence[int]]) -> tuple[int, int]:
    """(tokens inside the draft vocabulary, tokens) of the answers."""
    counts = count_tokens(answers)
    inside = sum(count for token, count in counts.items() if vocab.t2d[token])
    return inside, sum(counts.values())


# D^2 / V from which a random choice of D out of V tokens without two neighbours is out of the
# question: its probability is about exp(-D^2 / V), here 2e-9.
_NEIGHBOURS_SURE = 20


def check_offsets(d2t: Tensor, vocab_size: int, where: str = "") -> list[Finding]:
    """What d2t alone can tell: offsets of a rising map never fall, start at 0 or above and end
    within the vocabulary.

    Absolute ids in their place rise strictly. Where ``arange(D) + d2t`` then leaves the vocabulary,
    they are no offsets. Where it stays inside (D at most half of V), the law holds for a map that
    has no two neighbouring tokens: no choice of so many tokens is like that, so it is an error; for
    a small map (D^2 < 20 V) it can't be told, and is a warning.
    """
    if d2t.dtype != torch.int64:
        return []  # check_vocab_map says so
    strictly = len(d2t) > 1 and bool((d2t.diff() > 0).all())
    last = int(d2t[-1]) + len(d2t) - 1
    severity: Severity = "error"
    if strictly and (last >= vocab_size or len(d2t) ** 2 > _NEIGHBOURS_SURE * vocab_size):
        problem, remedy = "d2t holds absolute target ids", "store offsets: d2t - arange(len(d2t))"
    elif strictly:
        severity = "warning"
        problem = "d2t holds offsets of a map without neighbours, or absolute target ids"
        remedy = "can't be told from d2t alone: add t2d to the checkpoint"
    elif bool((d2t.diff() < 0).any()) or int(d2t[0]) < 0:
        problem, remedy = "d2t falls, so its target ids don't rise", "sort the map by target id"
    elif last >= vocab_size:
        problem = f"d2t names target id {last}, the vocabulary holds {vocab_size}"
        remedy = "take the map of a drafter of this target"
    else:
        return []
    evidence = "target id = draft id + d2t[draft id], rising, inside the target's vocabulary"
    return [Finding("vocab-map", severity, problem, evidence, remedy, where)]


def check_vocab_map(d2t: Tensor, t2d: Tensor, where: str = "") -> list[Finding]:
    """The law of d2t and t2d; names absolute ids in place of offsets, the commonest mistake."""
    positions = t2d.to(torch.bool).nonzero().flatten()
    ids = torch.arange(len(d2t))
    if d2t.dtype != torch.int64:
        problem, remedy = f"d2t is {d2t.dtype}", "store it as int64"
    elif len(positions) != len(d2t):
        problem = f"t2d marks {len(positions)} tokens, d2t holds {len(d2t)}"
        remedy = "build both from the same counts: eagle3 run PROFILE 03"
    elif torch.equal(d2t + ids, positions):
        return []
    elif torch.equal(d2t, positions):
        problem = "d2t holds absolute target ids"
        remedy = "store offsets: d2t - arange(len(d2t))"
    else:
        problem = "d2t and t2d name different tokens"
        remedy = "take both from the same checkpoint"
    evidence = "target id = draft id + d2t[draft id], rising, true in t2d"
    return [Finding("vocab-map", "error", problem, evidence, remedy, where)]
