"""What an engine told of its rounds: one by one, as counts a request, or as a server's counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lib.measure.arms import OWN, RequestRow


@dataclass(frozen=True)
class Told:
    """Rounds and accepted drafts, pooled over ``requests`` requests; ``source`` in words."""

    source: str
    requests: int
    rounds: int
    accepted: int

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.rounds


def told_rounds(r: RequestRow) -> tuple[int, int]:
    """(rounds, accepted drafts) of a request, by its rounds or its counts; (0, 0) for neither."""
    if r.accepted is not None:
        return len(r.accepted), sum(r.accepted)
    return (r.counts["rounds"], r.counts["accepted"]) if r.counts else (0, 0)


def pooled_length(rows: Sequence[RequestRow]) -> float | None:
    told = [told_rounds(r) for r in rows]
    rounds = sum(n for n, _ in told)
    return 1 + sum(accepted for _, accepted in told) / rounds if rounds else None


def mean_length(rows: Sequence[RequestRow]) -> float | None:
    """Mean of the requests' own acceptance lengths, which is not the pooled one."""
    own = [1 + accepted / rounds for rounds, accepted in map(told_rounds, rows) if rounds]
    return sum(own) / len(own) if own else None


def pooled(rows: Sequence[RequestRow], benchmark: dict[str, Any], every: int) -> Told | None:
    """Of requests whose rounds are not told one by one: their counts, else the server's counters,
    which hold all ``every`` requests of the arm. None where the engine told nothing."""
    told = [told_rounds(r) for r in rows if r.counts]
    if rounds := sum(n for n, _ in told):
        return Told("counts a request", len(told), rounds, sum(accepted for _, accepted in told))
    counters = (benchmark.get("counters") or {}).get(OWN) or {}
    if not counters.get("drafts"):
        return None
    accepted = int(counters.get("accepted_tokens", 0))
    return Told("the server's counters alone", every, int(counters["drafts"]), accepted)
