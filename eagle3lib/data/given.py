"""Conversations that somebody else answered, as training rows without any server.

Each assistant turn is rendered by the target's own template (``data/render.py``), so its ids are
those that the target would have been given and would have had to say. But it never said them: such
a drafter learns to guess other words than those that it will be asked to guess, and nothing here
can tell how far the two are apart. That is why the rows are marked and never held out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from eagle3lib.data.prompts import Prompt, Reject
from eagle3lib.data.render import RenderedTurn, render_turns
from eagle3lib.data.rows import (
    GIVEN,
    AnswerRow,
    is_looping,
    json_line,
    read_answers,
    reason_apart,
    row_id,
    split_reasoning,
)
from eagle3lib.data.template import (
    ChatTemplate,
    as_servers_read,
    thinking_arguments,
)
from eagle3lib.lab.errors import UserError


@dataclass(frozen=True)
class GivenAnswers:
    """Answered conversations of the training side, in the order of their ids."""

    prompts: list[Prompt]
    answers: dict[str, dict[str, Any]]  # prompt id -> the last assistant message
    places: dict[str, str]
    held_out: int = 0  # conversations that their content holds out: never trained on


@dataclass(frozen=True)
class TakenAnswers:
    """What became of them: ``rows`` in order, ``rejects`` of turns that can't be trained on, and
    how many conversations stand behind the tokens that were wanted."""

    rows: list[AnswerRow]
    rejects: list[Reject]
    conversations: int
    not_needed: int


def take_given(
    given: GivenAnswers,
    template: ChatTemplate,
    *,
    want_tokens: int = 0,
    thinking: Literal["default", "on", "off", "mixed"] = "default",
    target_fingerprint: str = "",
) -> TakenAnswers:
    """Rows of the shortest beginning of ``given`` that holds ``want_tokens`` tokens that can be
    trained on (0: of all). The same input gives the same rows, so a killed run repeats it.

    ``thinking`` "on" and "off" are the template's switch; with "mixed" each turn is rendered as it
    stands. Turns that the template does not render exactly as they were said are refused.
    """
    switch = thinking_arguments({"on": True, "off": False}.get(thinking))
    template = replace(template, arguments=template.arguments | switch)
    rows: list[AnswerRow] = []
    rejects: list[Reject] = []
    tokens = taken = 0
    for prompt in given.prompts:
        if want_tokens and tokens >= want_tokens:
            break
        taken += 1
        messages = [*prompt.messages, given.answers[prompt.id]]
        place = given.places.get(prompt.id, "")
        made, refused = _rows_of(prompt, messages, template, place, target_fingerprint)
        tokens += sum(row.usable_tokens for row in made)
        rows += made
        rejects += refused
    return TakenAnswers(rows, rejects, taken, len(given.prompts) - taken)


def _rows_of(
    prompt: Prompt,
    messages: Sequence[dict[str, Any]],
    template: ChatTemplate,
    place: str,
    target_fingerprint: str,
) -> tuple[list[AnswerRow], list[Reject]]:
    read, tools = as_servers_read(messages), list(prompt.tools)
    turns, rejects = render_turns(read, template, tools=tools or None, where=place)
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    rows = []
    for turn in turns:
        number = said.index(turn.turn)
        rows.append(
            AnswerRow(
                id=row_id(prompt.id, 0, number, len(said)),
                set=prompt.set,
                split=prompt.split,
                messages=list(messages[: turn.turn]),
                turn=number,
                tools=tools,
                target_fingerprint=target_fingerprint,
                **_said_in(messages[turn.turn], turn),
            )
        )
    return rows, rejects


def _said_in(message: dict[str, Any], turn: RenderedTurn) -> dict[str, Any]:
    """The fields of a row that its answer decides."""
    told = message.get("reasoning_content") or message.get("reasoning")
    text, reasoning, kind = split_reasoning(message["content"] or "", told, "stop")
    calls = message.get("tool_calls") or []
    looping = is_looping(turn.answer_token_ids)
    return {
        "prompt_token_ids": turn.prompt_token_ids,
        "answer_token_ids": turn.answer_token_ids,
        "text": text,
        "finish_reason": "stop",
        "looping": looping,
        "reasoning": reasoning,
        "reasoning_kind": kind,
        "tool_calls": calls,
        "token_ids_from": GIVEN,
        "kept_apart": reason_apart(text, calls, looping, "stop", train_on_cut=False),
    }


def check_refused(taken: TakenAnswers, max_reject_share: float, where: object = "") -> None:
    """Raise ``UserError`` when too large a share of the turns was refused, or no row is left."""
    refused, turns = len(taken.rejects), len(taken.rejects) + len(taken.rows)
    usable = sum(row.trained for row in taken.rows)
    if usable and refused <= max_reject_share * turns:
        return
    reasons = Counter(r.reason for r in taken.rejects)
    reasons += Counter(row.kept_apart for row in taken.rows if row.kept_apart)
    leading = "; ".join(f"{n} x {reason}" for reason, n in reasons.most_common(3))
    last = f"; the last: {taken.rejects[-1].detail}" if taken.rejects else ""
    raise UserError(
        f"{refused} of {turns} given answers were refused, {usable} can be trained on: "
        f"{leading}{last}",
        expected=f"at most {max_reject_share:.0%} refused (parameter max_reject_share)",
        where=where,
    )


def write_given(folder: Path, rows: Sequence[AnswerRow]) -> list[AnswerRow]:
    """Append to ``answers.jsonl`` those that are not there yet; returns them."""
    known = {row.id for row in read_answers(folder)}  # a torn last line is cut off here
    new = [row for row in rows if row.id not in known]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "answers.jsonl").open("ab") as file:
        for row in new:
            file.write(json_line(asdict(row)))
        file.flush()
        os.fsync(file.fileno())
    return new
