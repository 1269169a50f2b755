"""What an answer is: one row with the token ids that the server saw and made, and how it is judged.

Ids say what was asked, not where it stood in a file::

    PROMPT_ID              the last answer to a prompt, asked for the first time
    PROMPT_ID-2            the same, asked for the third time (repeat 2)
    PROMPT_ID.0  .1  ...   the answers before the last, in a conversation of several turns
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.data.prompts import READING
from eagle3lib.lab.files import read_jsonl

CUT, LOOPING, EMPTY = "cut by the length limit", "looping", "empty"  # why a row is kept apart
# Where a row's ids come from: told by the server; rendered from its text by the target's template
# and checked against it; rendered from somebody else's text, which the target never said.
SERVED, RENDERED, GIVEN = TOKEN_IDS_FROM = ("served", "rendered", "given")
REASONING_KINDS = ("complete", "missing", "cut", "empty")
GAVE_UP = "failed on every try"  # a reject that is asked again when the phase is run again
_LOOP_TOKENS, _LOOP_REPEATS = 8, 6
# A generation prompt may supply the opening marker itself: then only the closing one is served.
_THOUGHT = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*(.*)", re.DOTALL)
_CUT_THOUGHT = re.compile(r"\s*<think>(.*)", re.DOTALL)


@dataclass(frozen=True)
class AnswerRow:
    """One answer of the target: ``messages`` are what was asked, ``text`` what it said then.

    ``kept_apart`` is the reason why a row is not trained on ("": it is). Fields with defaults are
    younger than the others: rows without them still read.
    """

    id: str
    set: str
    split: str
    messages: list[dict[str, Any]]
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    text: str
    finish_reason: str
    looping: bool = False
    repeat: int = 0  # 0 for the first answer to a prompt
    turn: int = 0  # which of the target's answers in its conversation
    reasoning: str = ""
    reasoning_kind: str = "missing"  # one of REASONING_KINDS
    tool_calls: list[dict[str, Any]] = field(default_factory=list)  # the target's own, as served
    tools: list[dict[str, Any]] = field(default_factory=list)  # those that it was offered
    sampling: dict[str, Any] = field(default_factory=dict)
    target_fingerprint: str = ""
    server: str = ""  # address
    engine: str = ""  # version that the server reports, "" when it reports none
    kept_apart: str = ""
    token_ids_from: str = SERVED  # one of TOKEN_IDS_FROM
    loop_tokens: int = 0  # cut off the ids where the answer began to loop; the text is whole

    def __post_init__(self) -> None:
        if self.looping and not self.kept_apart:  # rows of before kept_apart
            object.__setattr__(self, "kept_apart", LOOPING)

    @property
    def usable_tokens(self) -> int:
        """Answer tokens that may be trained on, 0 for a row kept apart."""
        return 0 if self.kept_apart else len(self.answer_token_ids)

    @property
    def trained(self) -> bool:
        return self.split == "train" and not self.kept_apart


def base_id(prompt_id: str, repeat: int) -> str:
    return f"{prompt_id}-{repeat}" if repeat else prompt_id


def row_id(prompt_id: str, repeat: int, turn: int, turns: int) -> str:
    """Id of answer ``turn`` of ``turns`` in the conversation of a prompt."""
    base = base_id(prompt_id, repeat)
    return base if turn == turns - 1 else f"{base}.{turn}"


def read_answers(folder: Path) -> list[AnswerRow]:
    return [AnswerRow(**row) for row in read_jsonl(folder / "answers.jsonl")]


def read_rejects(folder: Path) -> list[dict[str, str]]:
    """Refused prompts with their reasons, the last word on each: some were asked again later."""
    rows: dict[str, dict[str, str]] = {}
    for number, row in enumerate(read_jsonl(folder / "rejects.jsonl")):
        if row.get("stage") != READING:  # what could not be read was never asked
            rows[row.get("id") or f"row {number}"] = row
    return list(rows.values())


def json_line(row: dict[str, Any]) -> bytes:
    """One line of a JSONL file, exact for any text.

    Half a surrogate pair, which JSON can spell and UTF-8 can't, is written as an escape.
    """
    try:
        return (json.dumps(row, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(row) + "\n").encode()


def before_loop(ids: list[int]) -> int:
    """Tokens of a looping answer before a stretch that it repeats six times comes again, 0 where
    fewer than eight are left."""
    grams: dict[tuple[int, ...], list[int]] = {}
    for i in range(len(ids) - _LOOP_TOKENS + 1):
        grams.setdefault(tuple(ids[i : i + _LOOP_TOKENS]), []).append(i)
    first = min(at[1] for at in grams.values() if len(at) >= _LOOP_REPEATS)
    return first if first >= _LOOP_TOKENS else 0


def is_looping(ids: list[int]) -> bool:
    """Whether one stretch of 8 tokens stands six times or more in an answer."""
    grams = Counter(tuple(ids[i : i + _LOOP_TOKENS]) for i in range(len(ids) - _LOOP_TOKENS + 1))
    return bool(grams) and max(grams.values()) >= _LOOP_REPEATS


def split_reasoning(text: str, reasoning: str | None, finish_reason: str) -> tuple[str, str, str]:
    """(answer text, reasoning text, kind of reasoning) of a reply.

    ``reasoning`` is what the server told apart (None: nothing); without it, reasoning is what
    stands before ``</think>``. Kinds: ``cut`` ended at the length limit before any answer,
    ``empty`` is a reasoning block without words, ``missing`` is none at all.
    """
    closed = True
    if reasoning is None:
        if found := _THOUGHT.fullmatch(text):
            reasoning, text = found[1].strip("\n"), found[2]
        elif found := _CUT_THOUGHT.fullmatch(text):
            reasoning, text, closed = found[1].strip("\n"), "", False
        else:
            return text, "", "missing"
    else:
        closed = bool(text) or finish_reason != "length"
    if not reasoning.strip():
        return text, reasoning, "empty" if closed else "cut"
    return text, reasoning, "complete" if closed else "cut"


def reason_apart(
    text: str, tool_calls: list[Any], looping: bool, finish_reason: str, *, train_on_cut: bool
) -> str:
    """Why an answer is not trained on, "" when it is. A looping answer that ran into the limit
    loops: a longer limit would not help it."""
    if looping:
        return LOOPING
    if finish_reason == "length":
        return "" if train_on_cut else CUT
    return "" if text.strip() or tool_calls else EMPTY
