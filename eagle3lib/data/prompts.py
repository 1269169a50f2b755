"""Prompts of any common row format, split once and for all by the hash of what is asked.

A row becomes the messages that the target is asked with: earlier answers, tools and tool results
stay as they are, an answer to the last question is cut off, since the target gives its own. The
split depends on the messages (and tools) alone, so adding, removing or shuffling rows moves no
prompt between train and held-out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.data.messages import FORMATS, BadRow, Request, request_of
from eagle3lib.data.read import read_rows, source_name
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_json, read_jsonl, write_text
from eagle3lib.lab.params import GenerateParams, PromptFormat

HELDOUT_PERCENT = 20
DUPLICATE, NEAR_DUPLICATE = "duplicate prompt", "near-duplicate prompt"
READING = "reading"


@dataclass(frozen=True)
class Prompt:
    id: str
    messages: tuple[dict[str, Any], ...]
    set: str  # "workload" or "general"
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def split(self) -> str:
        if self.set == "general":  # never trained on, whatever its hash
            return "heldout"
        return "heldout" if int(self.id[:8], 16) % 100 < HELDOUT_PERCENT else "train"


@dataclass(frozen=True)
class Reject:
    """A row that is left out, and why."""

    where: str
    reason: str
    id: str = ""
    detail: str = ""  # apart from the reason, so that reasons can be counted

    @property
    def is_duplicate(self) -> bool:
        """Duplicates are no fault of the file: they are counted, but not in its reject share."""
        return self.reason in (DUPLICATE, NEAR_DUPLICATE)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class PromptFile:
    """What one source held: ``prompts`` in file order, each at its place in ``places``."""

    name: str
    prompts: list[Prompt] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # prompt id -> where
    formats: Counter[str] = field(default_factory=Counter)  # of the rows that are usable
    cut_answers: list[str] = field(default_factory=list)  # where a last answer was cut off
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)  # those that are kept, by id

    def summary(self) -> str:
        """One line for a reader: ``python_tasks.jsonl: messages, 520 rows``."""
        ranked = self.formats.most_common()
        shown = ", ".join(kind if len(ranked) == 1 else f"{kind} ({n})" for kind, n in ranked)
        bad = [r for r in self.rejects if not r.is_duplicate]
        notes = [f"{shown or 'no known format'}, {sum(self.formats.values()) + len(bad):,} rows"]
        doubles = Counter(r.reason for r in self.rejects if r.is_duplicate)
        notes += [f"{len(bad):,} rejected"] if bad else []
        notes += [f"{n:,} x {reason}" for reason, n in doubles.items()]
        cut = len(self.cut_answers)
        notes += [f"the last answer cut off in {cut:,} rows"] if cut else []
        return f"{self.name}: " + "; ".join(notes)

    def check(self, max_reject_share: float = 1.0, where: object = "") -> None:
        """Raise ``UserError`` when no row is usable, or when too large a share is not.

        Duplicates stand in neither side of the share.
        """
        bad = [r for r in self.rejects if not r.is_duplicate]
        rows = len(bad) + len(self.places)
        if not self.places:
            first = f"; first reason: {bad[0].reason} at {bad[0].where}" if bad else ""
            raise UserError(
                f"no usable prompt in {len(self.rejects)} rows{first}",
                expected='rows like {"messages": [{"role": "user", "content": "..."}]}, or with '
                f"one of {', '.join(FORMATS[1:])}",
                where=where or self.name,
            )
        if len(bad) > max_reject_share * rows:
            reasons = Counter(r.reason for r in bad).most_common(3)
            leading = "; ".join(f"{n} x {reason}" for reason, n in reasons)
            raise UserError(
                f"{len(bad)} of {rows} rows of {self.name} were rejected: {leading}; the first "
                f"at {bad[0].where}",
                expected=f"at most {max_reject_share:.0%} (parameter max_reject_share)",
                where=where or self.name,
            )


def prompt_id(messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> str:
    """A hash of what is asked; without tools, of the messages alone."""
    asked = {"messages": messages, "tools": list(tools)} if tools else messages
    text = json.dumps(asked, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_source(
    source: str | Path,
    set_name: str,
    prompt_format: PromptFormat = "auto",
    max_prompt_chars: int = GenerateParams.model_fields["max_prompt_chars"].default,
    *,
    answered: bool = False,
) -> PromptFile:
    """Read a file, folder or Hub id; exact duplicates are left out, the first one stays.

    With ``answered`` the last answer of each row is kept in ``answers``, and a row without one is
    rejected; of two answers to one prompt the one whose hash is less stays, wherever it stands.
    Raises ``UserError`` when the source is not there or is not what its name says.
    """
    found = PromptFile(source_name(source))
    for row in read_rows(source):
        if row.problem:
            found.rejects.append(Reject(row.where, row.problem))
            continue
        try:
            request = request_of(row.value, prompt_format, max_prompt_chars, answered=answered)
        except BadRow as error:
            found.rejects.append(Reject(row.where, error.reason, detail=error.detail))
            continue
        _add(found, row.where, request, set_name, answered)
    return found


def _add(found: PromptFile, where: str, request: Request, set_name: str, answered: bool) -> None:
    found.formats[request.format] += 1
    if request.answer is not None and not answered:
        found.cut_answers.append(where)
    key = prompt_id(request.messages, request.tools)
    before = found.places.get(key)
    if answered and request.answer is not None:
        known = found.answers.get(key)
        if known is None or hash_json(request.answer) < hash_json(known):
            found.answers[key], found.places[key] = request.answer, where
    else:
        found.places.setdefault(key, where)
    if before is None:
        found.prompts.append(Prompt(key, tuple(request.messages), set_name, tuple(request.tools)))
        return
    stays = found.places[key]
    same = f"the same as {key} at {stays}"
    found.rejects.append(Reject(where if stays == before else before, DUPLICATE, key, same))


def read_prompts(source: str | Path, set_name: str) -> tuple[list[Prompt], list[Reject]]:
    """Prompts in file order without duplicates, and what was left out with file and line.

    Raises ``UserError`` when the source is missing, empty, or holds no usable row.
    """
    found = read_source(source, set_name)
    found.check(where=source)
    return found.prompts, found.rejects


def write_read_rejects(folder: Path, rejects: Sequence[Reject]) -> Path:
    """Put what was left out while reading into ``rejects.jsonl``, in place of what an earlier
    start put there; lines about answers stay.

    Lines of reading carry ``"stage": "reading"`` and no id: an id there says that the server
    refused that prompt, and the prompt that a duplicate repeats must still be asked.
    """
    path = folder / "rejects.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    others = [row for row in read_jsonl(path) if row.get("stage") != READING]
    ours = [{**r.as_dict(), "id": "", "stage": READING} for r in rejects]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ours + others)
    # Details may quote half a surrogate pair: Python's escape for it is JSON's too.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())
    return path
