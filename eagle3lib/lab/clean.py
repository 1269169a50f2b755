"""``eagle3 clean``: what is large in a run, who still needs it, what it costs to make again.

The manifest says that a kind is freed before anything is deleted: a kill half-way leaves a whole
phase without its files, never a half one that looks damaged.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.journal import record
from eagle3lib.lab.large import LARGE, freed, to_make_again
from eagle3lib.lab.manifest import whole_phases
from eagle3lib.lab.run import existing_run, lock_phase, outdated_by

PREVIOUS = "previous"
KINDS = (*LARGE, PREVIOUS)


@dataclass(frozen=True)
class Kind:
    """``needed_by``: phases that have yet to read it, or that it was not made to the end for.
    ``again_s``: seconds that making it again takes, by the run's own durations: the phase's, and
    those of the phases in ``after``, whose freed files it reads; None where it can't be made again.
    ``also``: what else reads it. ``freed_on``: a UTC time where it was freed before."""

    name: str
    bytes: int
    folders: tuple[Path, ...]
    readers: tuple[str, ...]
    needed_by: tuple[str, ...]
    again_s: float | None
    freed_on: str = ""
    after: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def survey(run: str) -> list[Kind]:
    """Every kind of large files of a run. Raises ``UserError`` for a run that is not there."""
    folder = existing_run(run)
    found = [_kind(folder, name) for name in LARGE]
    # What a rerun set aside: nothing reads it, nothing makes it again.
    aside = tuple(sorted(p for p in folder.glob("*.previous") if p.is_dir()))
    return [*found, Kind(PREVIOUS, _bytes(aside), aside, (), (), None)]


def _kind(folder: Path, name: str) -> Kind:
    large = LARGE[name]
    whole = folder / large.phase / "manifest.json"
    if whole.exists():
        needed = tuple(
            r
            for r in large.readers
            if not (folder / r / "manifest.json").exists() or outdated_by(folder, r)
        )
    else:
        needed = (large.phase,)
    # The second is what a kill left behind.
    places = [folder / large.phase / part for part in (large.path, f".{large.path}.freed")]
    present = tuple(p for p in places if p.exists())
    after = tuple(to_make_again(folder, large.phase)) if whole.exists() else ()
    made_by = [folder / phase / "manifest.json" for phase in (large.phase, *after)]
    seconds = sum(read_json(p)["duration_s"] for p in made_by) if whole.exists() else None
    gone = freed(folder, large.phase).get(name, {})
    return Kind(
        name, _bytes(present), present, large.readers, needed, seconds, gone.get("when", ""),
        after, large.also,
    )  # fmt: skip


def kept_bytes(run: str, kinds: Iterable[Kind]) -> int:
    """What is never freed: answers, the drafter, reports, records."""
    return _bytes([existing_run(run)]) - sum(kind.bytes for kind in kinds)


def _bytes(folders: Iterable[Path]) -> int:
    files = (p for folder in folders for p in folder.rglob("*") if p.is_file())
    return sum(p.lstat().st_size for p in files)


def clean(run: str, kinds: Iterable[str], *, force: bool = False, who: str = "") -> list[Kind]:
    """Free ``kinds`` and return what was freed.

    Raises ``UserError`` for a kind that a phase still needs (unless ``force``), that is not whole,
    and while a phase that makes or reads it runs; nothing is freed then.
    """
    folder = existing_run(run)
    asked = set(kinds)
    if unknown := asked - set(KINDS):
        raise UserError(f"no kind {', '.join(sorted(unknown))}", expected=", ".join(KINDS))
    chosen = [k for k in survey(run) if k.name in asked and k.folders]
    for kind in chosen:
        _check_free(folder, kind, force)
    with ExitStack() as locks:
        phases = {LARGE[k.name].phase for k in chosen if k.name in LARGE}
        for phase in sorted(phases | {r for k in chosen for r in k.readers}):
            locks.callback(lock_phase(run, phase).release)
        for kind in chosen:
            _free(folder, kind, who)
    return chosen


def _check_free(folder: Path, kind: Kind, force: bool) -> None:
    if linked := next((p for p in kind.folders if p.is_symlink()), None):
        raise UserError(
            f"{kind.name} are a link to {linked.resolve()}, which other runs may use too",
            expected="a folder of this run alone",
            where=linked,
            next="delete what it names by hand; `eagle3 run PROFILE` makes it again",
        )
    made_by = LARGE[kind.name].phase if kind.name in LARGE else ""
    if made_by in kind.needed_by:
        raise UserError(
            f"{made_by} is not finished: it continues from its {kind.name}",
            expected="a phase that is whole",
            where=kind.folders[0],
            next=f"eagle3 run PROFILE {made_by}; or delete the folder of the phase by hand",
        )
    if kind.needed_by and not force:
        raise UserError(
            f"{kind.name} are still needed by {', '.join(kind.needed_by)}",
            expected="a run whose later phases are done",
            where=kind.folders[0],
            next=f"finish the run, or free them all the same: --what {kind.name} --yes --force",
        )


def _free(folder: Path, kind: Kind, who: str) -> None:
    event = {"kind": kind.name, "bytes": kind.bytes, "again_s": kind.again_s}
    if kind.name in LARGE:
        _say_freed(folder, kind)
        event["phase"] = LARGE[kind.name].phase
    for path in kind.folders:
        doomed = path if path.name.startswith(".") else path.with_name(f".{path.name}.freed")
        if doomed != path:
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
        shutil.rmtree(doomed)
    record(folder, "freed", who=who, **event)


def _say_freed(folder: Path, kind: Kind) -> None:
    path = folder / LARGE[kind.name].phase / "manifest.json"
    manifest: dict[str, Any] = read_json(path)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    again = f"eagle3 run PROFILE {LARGE[kind.name].phase}"
    kinds = manifest.get("freed", {})
    kinds[kind.name] = {"when": when, "bytes": kind.bytes, "again": again}
    write_json(path, manifest | {"freed": kinds})
    run_manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", run_manifest | {"phases": whole_phases(folder)})
