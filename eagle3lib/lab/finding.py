"""A finding: one rule that did not hold, with its evidence and its remedy.

Every room exports ``check_...() -> list[Finding]`` for what it owns; plan, gates, reports and
diagnosis collect, order and show them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from eagle3lib.lab.errors import UserError

Severity = Literal["error", "warning", "note"]
_ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """``code`` is stable and for machines; the texts are for people."""

    code: str
    severity: Severity
    title: str
    evidence: str = ""
    remedy: str = ""
    where: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first; the order of discovery is kept within a severity."""
    return sorted(findings, key=lambda f: _ORDER[f.severity])


def raise_errors(findings: Iterable[Finding]) -> None:
    """Raise one ``UserError`` that lists every finding of severity "error"; else return."""
    errors = [f for f in findings if f.severity == "error"]
    if not errors:
        return
    first = errors[0]
    more = "".join(f"\n  also:     {f.title} ({f.where})" for f in errors[1:])
    raise UserError(
        first.title, expected=first.evidence, where=first.where, next=first.remedy + more
    )
