"""The journal of a run: what happened to it and what people decided, one line each, oldest first.

    outputs/RUN/journal.jsonl   {"when": UTC, "who": login name, "what": KIND, "phase": ..., ...}
    outputs/RUN/profile.yaml    the parameters that every phase last began with

Kinds: ``started`` (with ``why``, ``host`` and ``pid``), ``finished``, ``failed`` (with ``error``),
``note``, ``gate skipped`` (with ``gate`` and ``why``), ``freed``. Together the two files let
somebody else pick the run up.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl, write_text
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.phase_params import PhaseParams

DECISIONS = ("note", "gate skipped", "freed")
_LOCK_S = 30.0


def record(folder: Path, what: str, *, who: str = "", **facts: Any) -> dict[str, Any]:
    """Append an event to the journal of the run in ``folder``: whole or not at all."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    event = {"when": when, "who": who or login_name(), "what": what, **facts}
    path = folder / "journal.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".journal.lock", timeout=_LOCK_S):
        # Replaced, not appended to: who reads at this moment never meets half a line.
        lines = [json.dumps(e, ensure_ascii=False) for e in [*read_jsonl(path), event]]
        write_text(path, "\n".join(lines) + "\n")
    return event


def read_journal(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "journal.jsonl")


def login_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run as users that no passwd file knows
        return f"user {os.getuid()}"


def keep_profile(folder: Path, params: Mapping[str, PhaseParams]) -> None:
    """Bring ``profile.yaml`` in step with what these phases are run with; others stay as they
    are."""
    path = folder / "profile.yaml"
    with FileLock(folder / ".journal.lock", timeout=_LOCK_S):
        kept = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
        for name, cfg in params.items():
            kept["common"] = {"run": cfg.run, "target": cfg.target}
            followed = cfg.following()  # and will again: of whatever those phases are then
            kept[name] = cfg.model_dump(mode="json", exclude_defaults=True, exclude=followed) or {}
            for shared in ("run", "target"):
                kept[name].pop(shared, None)
        text = yaml.safe_dump(kept, sort_keys=True, allow_unicode=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(
                path, "# What this run was made with; what is not named is a default.\n" + text
            )


def run_words(folder: Path) -> str:
    """What stands after ``eagle3 run`` to go on with the run in ``folder``."""
    path = folder / "profile.yaml"
    # Runs of before have none: the person who started it knows the profile.
    return shlex.quote(shown_path(path)) if path.exists() else f"PROFILE run={folder.name}"


def shown_path(path: Path) -> str:
    """As it is typed in the repository's folder."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def skip_gate(folder: Path, gate: str, baseline: str, why: str, who: str = "") -> dict[str, Any]:
    """Record that a gate is skipped and why. Raises ``UserError`` for the baseline's."""
    if gate == baseline:
        raise UserError(
            f"the gate {gate!r} can't be skipped: every speed-up is measured against it",
            expected="the engine alone serves the target first",
            where=folder / "journal.jsonl",
            next="eagle3 serve TARGET, and read its log where it does not start",
        )
    if not why.strip():
        raise UserError(f"no reason for skipping {gate!r}", expected='--because "..."')
    return record(folder, "gate skipped", who=who, gate=gate, why=why.strip())
