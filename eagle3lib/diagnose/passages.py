"""Where answers went worst: passages of some rounds on end, in an order that is worth reading.

A passage of a drafter that accepts nothing has the same length as the next, so an order by length
alone would begin with all of one bad answer. Each answer's worst passage comes first, then each
one's second worst, and so on; within a turn the lowest acceptance length first, and where that is
the same, the passage whose missed tokens the target was surest of: those were there to be learned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from eagle3lib.diagnose.predictions import MISSES, AnswerView, Token

PASSAGE_ROUNDS = 8


@dataclass(frozen=True)
class Passage:
    """Some rounds on end: answer tokens first..last of one answer. ``turn``: 0 for the worst
    passage of its answer, 1 for the next. ``missed_p``: mean probability that the target gave the
    tokens that were missed in it, 0 where none was."""

    answer: int
    first: int
    last: int
    rounds: int
    accepted: int
    missed_p: float
    turn: int

    @property
    def length(self) -> float:
        return 1 + self.accepted / self.rounds


def passages(views: Iterable[AnswerView], rounds: int = PASSAGE_ROUNDS) -> list[Passage]:
    """Answers cut into passages of ``rounds`` rounds (a shorter rest joins the one before), in the
    order that the module tells; what is still equal stands in the order of the answers."""
    found = []
    for number, view in enumerate(views):
        cut = sorted(_cut(view, rounds), key=lambda p: (1 + p[3] / p[2], -p[4]))
        found.extend(Passage(number, *part, turn) for turn, part in enumerate(cut))
    return sorted(found, key=lambda p: (p.turn, p.length, -p.missed_p))


def _cut(view: AnswerView, rounds: int) -> Iterable[tuple[int, int, int, int, float]]:
    """(first, last, rounds, accepted, missed_p) of every passage, in the answer's order."""
    cuts = list(range(0, max(len(view.rounds) - rounds, 0) + 1, rounds))
    for cut, end in zip(cuts, [*cuts[1:], len(view.rounds)], strict=True):
        part = view.rounds[cut:end]
        if part:
            first = part[0].start + 1
            last = view.rounds[end].start if end < len(view.rounds) else len(view.tokens) - 1
            missed = _missed_p(view.tokens[first : last + 1])
            yield first, last, len(part), sum(r.accepted for r in part), missed


def _missed_p(tokens: Iterable[Token]) -> float:
    missed = [t.target_p for t in tokens if t.kind in MISSES]
    return sum(missed) / len(missed) if missed else 0.0
