"""Ask the installed engines what their own code reads in a drafter's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.engine.ask import DEADLINE_S, ask_installed
from eagle3lib.engine.config import Engine

_SCRIPT = Path(__file__).with_name("ask_reader.py")


@dataclass(frozen=True)
class Answer:
    """``said`` is what the engine's code gave (see ask_reader.py), None where it was not asked;
    ``why_not`` then says why, ``installed`` whether there was an engine to ask."""

    engine: str
    said: dict[str, Any] | None = None
    why_not: str = ""
    installed: bool = False
    slots: dict[str, list[int] | None] = field(default_factory=dict)


def ask_engine(
    engine: Engine, drafter: Path, target: Path, deadline_s: float = DEADLINE_S
) -> Answer:
    """What ``engine``'s own code reads in the folder ``drafter`` for the folder ``target``."""
    return ask_about(engine, [drafter], target, deadline_s)[0]


def ask_about(
    engine: Engine, drafters: Sequence[Path], target: Path, deadline_s: float = DEADLINE_S
) -> list[Answer]:
    """``ask_engine`` of several folders in one child; one answer a folder."""
    folders = (str(p.resolve()) for p in (target, *drafters))
    reply = ask_installed(engine, _SCRIPT, *folders, offline=True, deadline_s=deadline_s)
    if reply.why_not:
        silent = Answer(engine, why_not=reply.why_not, installed=reply.installed)
        return [silent] * len(drafters)
    return [
        Answer(engine, said, installed=True, slots=said.get("slots") or {}) for said in reply.said
    ]
