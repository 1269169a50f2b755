"""``eagle3 note``, ``clean``: what was decided about a run, and what it no longer has to keep."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3lib.lab.errors import UserError

if TYPE_CHECKING:
    from eagle3lib.lab.clean import Kind

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
    from eagle3lib.lab.clean import KINDS, kept_bytes, survey
    from eagle3lib.lab.clean import clean as free
    from eagle3lib.lab.words import size_text
    from eagle3lib.report.page import refresh_page

    named = [part.strip() for part in what.split(",") if part.strip()]
    if unknown := set(named) - set(KINDS):
        raise UserError(f"no kind {', '.join(sorted(unknown))}", expected=", ".join(KINDS))
    found = survey(run)
    print("\n".join(line for kind in found for line in _kind_lines(kind)))
    rest = size_text(kept_bytes(run, found))
    print(f"{'the rest':12} {rest:>9}  answers, drafter, reports; never freed")
    # What is needed is kept without a word from the user, and an error when the user named it.
    free_now = [k.name for k in found if k.bytes and (force or not k.needed_by)]
    chosen = named or free_now
    if not yes:
        if free_now:
            total = size_text(sum(k.bytes for k in found if k.name in free_now))
            print(f"free {total}: eagle3 clean {run} --what {','.join(free_now)} --yes")
        return
    for k in free(run, chosen, force=force, who=by):
        print(f"freed {k.name}: {size_text(k.bytes)}")
    refresh_page(run)


def _kind_lines(kind: Kind) -> list[str]:
    """A kind with its size, and under it what it costs to make again and who reads it."""
    from eagle3lib.lab.words import duration_text, size_text

    head = f"{kind.name:12} {size_text(kind.bytes):>9}"
    gone = f"freed on {kind.freed_on[:10]}" if kind.freed_on else ""
    if not kind.bytes and not gone:
        return [f"{head}  nothing there"]
    again = "can't be made again"
    if kind.again_s is not None:
        first = f", with {', '.join(kind.after)}, whose files it reads" if kind.after else ""
        again = f"made again in {duration_text(kind.again_s)}, as it took{first}"
    needed = f"needed by {', '.join(kind.needed_by)}" if kind.needed_by else "no phase needs it now"
    readers = ", ".join((*kind.readers, *kind.also))
    told = [again, f"read by {readers}" if readers else "set aside by a rerun, read by nothing"]
    return [f"{head}  {gone or needed}", *(f"{'':24}{line}" for line in told)]
