"""Read prompt files and split them, once and for all, by the hash of what is asked.

A row is ``{"messages": [{"role": ..., "content": ...}, ...]}``; other keys are carried along. The
split depends on the messages alone, so adding, removing or shuffling rows moves no prompt between
train and held-out.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError

HELDOUT_PERCENT = 20


@dataclass(frozen=True)
class Prompt:
    id: str
    messages: tuple[dict[str, Any], ...]
    set: str  # "workload" or "general"

    @property
    def split(self) -> str:
        return "heldout" if int(self.id[:8], 16) % 100 < HELDOUT_PERCENT else "train"


@dataclass(frozen=True)
class Reject:
    """A row that is left out, and why."""

    where: str
    reason: str
    id: str = ""
    detail: str = ""  # apart from the reason, so that reasons can be counted

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def prompt_id(messages: list[dict[str, Any]]) -> str:
    text = json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(path: Path, set_name: str) -> tuple[list[Prompt], list[Reject]]:
    """Prompts in file order without duplicates, and what was left out with file and line.

    Raises ``UserError`` when the file is missing, empty, or holds no usable row.
    """
    if not path.is_file():
        raise UserError("there is no prompt file", where=path, next=f"set parameter {set_name!r}")
    prompts: dict[str, Prompt] = {}
    rejects: list[Reject] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name}:{number}"
        messages, reason = _messages_of(line)
        if reason:
            rejects.append(Reject(where, reason))
            continue
        key = prompt_id(messages)
        if key in prompts:
            rejects.append(Reject(where, "duplicate prompt", key))
        else:
            prompts[key] = Prompt(key, tuple(messages), set_name)
    if not prompts:
        first = f"; first reason: {rejects[0].reason} at {rejects[0].where}" if rejects else ""
        raise UserError(
            f"no usable prompt in {len(rejects)} rows{first}",
            expected='lines like {"messages": [{"role": "user", "content": "..."}]}',
            where=path,
        )
    return list(prompts.values()), rejects


def _messages_of(line: bytes) -> tuple[list[dict[str, Any]], str]:
    """(messages, "") of a row, or ([], the reason why it is not usable)."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return [], "not UTF-8"
    except json.JSONDecodeError as error:
        return [], f"not JSON: {error.msg}"
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        return [], "no list of messages"
    roles = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return [], "a message without text"
        if not message["content"].strip():
            return [], "an empty message"
        roles.append(message.get("role"))
    body = roles[1:] if roles[0] == "system" else roles
    if not body or body != ["user" if i % 2 == 0 else "assistant" for i in range(len(body))]:
        return [], f"roles are {roles}, expected user and assistant in turn"
    if body[-1] != "user":
        return [], "the last message is not the user's"
    try:
        prompt_id(messages)
    except UnicodeEncodeError:  # JSON can spell "\ud83d" alone, an emoji cut in two; UTF-8 can't
        return [], "half a surrogate pair in the text"
    return messages, ""
