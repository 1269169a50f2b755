"""``eagle3 note``, ``clean``: what was decided about a run, and what it no longer has to keep."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from eagle3lib.lab.errors import UserError

_RUN = typer.Argument(help="name of a run")
_BY = typer.Option("--by", help="who says so; your login name if left out")


def note(
    run: Annotated[str, _RUN],
    text: Annotated[str, typer.Argument(help="what was decided")] = "",
    phase: Annotated[str, typer.Option(help="a phase, such as 06")] = "",
    skip: Annotated[str, typer.Option(help="a gate that is skipped: reference or own")] = "",
    because: Annotated[str, typer.Option(help="why it is skipped")] = "",
    by: Annotated[str, _BY] = "",
) -> None:
    """Write into the decision log of RUN. The baseline's gate can't be skipped.

    Examples: eagle3 note RUN "K = 3, the server is small" --phase 06;
    eagle3 note RUN --skip reference --because "no drafter of this target is public"
    """
    from eagle3lib.lab.journal import record, skip_gate
    from eagle3lib.lab.profile import phase_name
    from eagle3lib.lab.run import existing_run
    from eagle3lib.measure.arms import PLAIN
    from eagle3lib.report.campaign import GATES
    from eagle3lib.report.page import refresh_page

    folder = existing_run(run)
    if skip:
        if skip not in GATES and skip not in GATES.values():
            raise UserError(f"no gate {skip!r}", expected=", ".join(GATES))
        event = skip_gate(folder, GATES.get(skip, skip), PLAIN, because or text, by)
    else:
        if not text.strip() or because:
            raise UserError("no text to note", expected='eagle3 note RUN "TEXT"')
        _refuse_hidden_skip(run, text)
        name = {"phase": phase_name(phase)} if phase else {}
        event = record(folder, "note", who=by, text=text.strip(), **name)
    refresh_page(run)
    print(f"noted by {event['who']}, {event['when']}")


def _refuse_hidden_skip(run: str, text: str) -> None:
    """A gate that is skipped in passing would be shown as one that waits."""
    if not re.search(r"\bskip", text, re.IGNORECASE):
        return
    if re.search(r"\bbaseline\b|\bengine alone\b", text, re.IGNORECASE):
        raise UserError(
            "the baseline's gate can't be skipped: every speed-up is measured against it",
            next="eagle3 serve TARGET, and read its log where it does not start",
        )
    if found := re.search(r"\b(reference|own)\b", text, re.IGNORECASE):
        gate = found.group(1).lower()
        raise UserError(
            "a gate that is skipped is more than a note",
            next=f'eagle3 note {run} --skip {gate} --because "..."',
        )


def clean(
    run: Annotated[str, _RUN],
    what: Annotated[
        str, typer.Option(help="states, checkpoints, previous, parted by commas; all if left out")
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", help="free it; else nothing is changed")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="also what a later phase still needs")
    ] = False,
    by: Annotated[str, _BY] = "",
) -> None:
    """Show what hidden states and checkpoints of RUN take, who needs them and how long they would
    take to make again; free them with --yes.

    Example: eagle3 clean RUN --what states --yes
    """
    from eagle3lib.lab.clean import KINDS, survey
    from eagle3lib.lab.clean import clean as free
    from eagle3lib.lab.words import duration_text, size_text
    from eagle3lib.report.page import refresh_page

    named = [part.strip() for part in what.split(",") if part.strip()]
    if unknown := set(named) - set(KINDS):
        raise UserError(f"no kind {', '.join(sorted(unknown))}", expected=", ".join(KINDS))
    found = survey(run)
    for k in found:
        again = (
            "can't be made again" if k.again_s is None else f"made in {duration_text(k.again_s)}"
        )
        needed = f"needed by {', '.join(k.needed_by)}" if k.needed_by else "no phase needs it now"
        gone = f"freed on {k.freed_on[:10]}" if k.freed_on else ""
        reads = f"read by {', '.join(k.readers)}" if k.readers else "set aside by a rerun"
        told = [again, reads, gone or needed] if k.bytes or gone else ["nothing there"]
        print(f"{k.name:12} {size_text(k.bytes):>9}  {'; '.join(told)}")
    # What is needed is kept without a word from the user, and an error when the user named it.
    free_now = [k.name for k in found if k.bytes and (force or not k.needed_by)]
    chosen = named or free_now
    if not yes:
        if free_now:
            print(f"free it: eagle3 clean {run} --what {','.join(free_now)} --yes")
        return
    for k in free(run, chosen, force=force, who=by):
        print(f"freed {k.name}: {size_text(k.bytes)}")
    refresh_page(run)
