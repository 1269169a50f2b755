"""A cause: a finding that also says what it costs, which experiment proves it, and what to run.

Causes stack, so all are kept. They are ordered by severity, then by how well they are proven, then
by what they cost, then by the order of the seven questions (``QUESTIONS``). Of notes the smoke test
comes first: a toy amount of data explains the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from eagle3lib.lab.finding import _ORDER, Finding

QUESTIONS = (
    "is it measured right?",
    "does the engine do what the drafter would?",
    "is the checkpoint what was trained?",
    "is the training sound?",
    "is the data the served distribution?",
    "is the target hard here?",
    "what does a round cost?",
)
Proof = Literal["shown", "measured", "suspected"]
# "shown": a counterfactual reproduces it; "measured": a rule is broken; "suspected": by elimination
_PROOF: dict[str, int] = {"shown": 0, "measured": 1, "suspected": 2}


MOST_ROWS = 5  # a finding shows its plainest rows, not all


@dataclass(frozen=True)
class Row:
    """One that shows the cause: ``kind`` is prompt, conversation or tensor, ``id`` its name there,
    ``shows`` what is seen in it."""

    kind: str
    id: str
    shows: str


@dataclass(frozen=True)
class Series:
    """Numbers of a small figure: a bar for every name, in ``unit``; with ``line`` a curve."""

    title: str
    unit: str
    names: tuple[str, ...]
    values: tuple[float, ...]
    line: bool = False


@dataclass(frozen=True)
class Trial:
    """An experiment: what is changed, the commands that do it, and what each outcome would mean."""

    what: str
    commands: tuple[str, ...]
    tells: str


@dataclass(frozen=True)
class Cause(Finding):
    """``question`` is 1 to 7; ``cost`` in tokens a round, None where it can't be told;
    ``experiment`` is what was done, or is to be done, to prove it; ``command`` is to be run next.
    ``alike``: codes of causes that would leave the very same evidence; the texts name them too.
    ``rows`` (at most ``MOST_ROWS``) and ``series`` are evidence, empty where the rule has none;
    ``trials``: experiments to run, with this run's own names (``experiments.with_trials``).
    """

    question: int = 1
    proof: Proof = "measured"
    cost: float | None = None
    experiment: str = ""
    command: str = ""
    alike: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    series: Series | None = None
    trials: tuple[Trial, ...] = ()

    @property
    def names(self) -> set[str]:
        return {self.code, *self.alike}


def rows_of(kind: str, shown: Iterable[tuple[str, str]]) -> tuple[Row, ...]:
    """The first few of (id, what it shows)."""
    return tuple(Row(kind, name, text) for name, text in islice(shown, MOST_ROWS))


def bars(title: str, unit: str, values: Mapping[str, float | None]) -> Series | None:
    """A figure of the values that are known; None where none is."""
    known = {name: value for name, value in values.items() if value is not None}
    return Series(title, unit, tuple(known), tuple(known.values())) if known else None


def ranked(causes: Iterable[Cause]) -> list[Cause]:
    """Each code once a place, the first that was found; in the order of the module's text."""
    unique: dict[tuple[str, str], Cause] = {}
    for cause in causes:
        unique.setdefault((cause.code, cause.where), cause)
    return sorted(
        unique.values(),
        key=lambda c: (_ORDER[c.severity], c.severity != "note" or c.code != "smoke-test",
                       _PROOF[c.proof], -(c.cost or 0.0), c.question),
    )  # fmt: skip


def as_cause(finding: Finding, question: int) -> Cause:
    """A room's own finding as the answer to one of the questions."""
    return Cause(**finding.as_dict(), question=question)
