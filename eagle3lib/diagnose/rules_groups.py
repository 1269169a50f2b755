"""Question 5, group by group: whose text does the drafter serve worse, and was it trained on?"""

from __future__ import annotations

from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.groups import Group, cost_of, groups_that_differ

# A dozen groups are looked at: at four standard errors chance names none of them.
_ERRORS = 4.0
_TOKENS = 0.1
_RARER = 0.5  # of its share among the served tokens
_COMMAND = "eagle3 run PROFILE 01 02 03 04 05 06 07"


def groups(e: Evidence) -> list[Cause]:
    """One finding for groups that accept less and were trained on too little, one for groups that
    only accept less: the text may just be harder."""
    low = groups_that_differ(e.groups, _ERRORS, _TOKENS)
    rare = [g for g in low if _rare(g)]
    rest = [g for g in low if not _rare(g)]
    out = [] if e.text_read else [_unread(e)]
    if rare:
        first = rare[0]
        out.append(
            Cause(
                "group-undertrained", "warning",
                f"{first.split} {first.name!r}: {first.length:.2f} tokens a round, "
                f"{first.rest_length:.2f} elsewhere, and hardly trained on",
                f"{first.trained_share:.0%} of the trained answer tokens, {first.served_share:.0%} "
                f"of the served ones; {_told(rare)}",
                "train on answers of this group, at the share that is served", "01_generate_data",
                question=5, cost=cost_of(first), command=_COMMAND,
                experiment="pooled acceptance by group against the rest, bootstrap over answers",
            )
        )  # fmt: skip
    if rest:
        first = rest[0]
        out.append(
            Cause(
                "group-differs", "note",
                f"{first.split} {first.name!r}: {first.length:.2f} tokens a round, "
                f"{first.rest_length:.2f} elsewhere",
                _told(rest),
                "judge the drafter group by group; more training data of the group may help",
                "01_generate_data", question=5, cost=cost_of(first), command=_COMMAND,
                experiment="pooled acceptance by group against the rest, bootstrap over answers",
            )
        )  # fmt: skip
    return out


def _rare(g: Group) -> bool:
    return g.trained_share is not None and g.trained_share < _RARER * g.served_share


def _told(found: list[Group]) -> str:
    lines = []
    for g in found:
        covered = "" if g.coverage is None else f", {g.coverage:.0%} in the draft vocabulary"
        lines.append(
            f"{g.split} {g.name!r}: {g.length:.2f} against {g.rest_length:.2f}, {g.rounds:,} "
            f"rounds of {g.answers} answers, {-(g.deviation or 0):.1f} standard errors{covered}"
        )
    return "; ".join(lines)


def _unread(e: Evidence) -> Cause:
    return Cause(
        "text-not-grouped", "note", "acceptance by kind of text and script can't be told",
        "the target's tokenizer is not read without remote code",
        "put a tokenizer.json beside the target's weights", str(e.material.target.folder),
        question=5, experiment="the target's tokenizer was loaded",
    )  # fmt: skip
