"""One conversation with the target: every earlier answer in it becomes the target's own.

    given:    user  assistant  user  assistant+tool_calls  tool  user
    asked:    turn 0           turn 1 ........................... as one request, tools unchanged

Each request is a row of its own, so the prompt ids of every turn are those that the server saw,
whatever its template makes of history. Reasoning of an answer is not put back into the history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle3lib.data.prompts import Prompt, Reject
from eagle3lib.data.render import check_mask
from eagle3lib.data.rows import (
    GAVE_UP,
    AnswerRow,
    base_id,
    before_loop,
    is_looping,
    reason_apart,
    row_id,
    split_reasoning,
)
from eagle3lib.engine.client import Answer, NotExact, Thinking
from eagle3lib.engine.pool import EMPTY_ANSWER, Pool, RequestFailed, RequestRefused
from eagle3lib.lab.files import hash_json


@dataclass(frozen=True)
class Sampling:
    """How the target is asked, and which of its answers are trained on."""

    max_new_tokens: int
    temperature: float
    thinking: Literal["default", "on", "off", "mixed"] = "default"
    thinking_share: float = 0.5  # of "mixed": the share of conversations with thinking on
    train_on_cut: bool = False
    train_before_loop: bool = False
    stop_ids: tuple[int, ...] = ()  # ids that end the target's turn; without them none is missed

    def thinking_of(self, base: str) -> Thinking:
        """The mode of one conversation, decided by its id: a resumed run decides the same."""
        if self.thinking != "mixed":
            return self.thinking
        # Another hash than the id itself, whose first digits already part train and held-out.
        digest = hashlib.sha256(f"thinking {base}".encode()).digest()
        return "on" if int.from_bytes(digest[:4], "big") < self.thinking_share * 2**32 else "off"


@dataclass(frozen=True)
class Conversation:
    """One prompt, asked for the ``repeat``-th time."""

    prompt: Prompt
    repeat: int = 0

    @property
    def id(self) -> str:
        return base_id(self.prompt.id, self.repeat)

    @property
    def turns(self) -> int:
        return 1 + sum(_is_regenerated(m) for m in self.prompt.messages)

    @property
    def row_ids(self) -> list[str]:
        """Ids of its rows, turn by turn; the last is the conversation's own."""
        turns = self.turns
        return [row_id(self.prompt.id, self.repeat, turn, turns) for turn in range(turns)]


def _is_regenerated(message: dict[str, Any]) -> bool:
    """A call of a tool stays as given: its results stand in the history that follows."""
    return message.get("role") == "assistant" and not message.get("tool_calls")


def hold(
    conversation: Conversation,
    pool: Pool,
    sampling: Sampling,
    target_fingerprint: str,
    known: dict[int, AnswerRow],
    on_row: Callable[[AnswerRow], None],
) -> Reject | None:
    """Ask turn after turn; ``known`` answers (of a killed run) are taken as they are.

    Calls ``on_row`` with each new row. Returns why the conversation ended early, None when it did
    not. Raises ``UserError`` when no server answers, ``PoolStopped`` when the run was stopped.
    """
    history: list[dict[str, Any]] = []
    turn = 0
    for message in (*conversation.prompt.messages, None):
        if message is not None and not _is_regenerated(message):
            history.append(message)
            continue
        row = known.get(turn)
        if row is None:
            made = _ask(conversation, turn, history, pool, sampling, target_fingerprint)
            if isinstance(made, Reject):
                return made
            row = made
            on_row(row)
        if message is None:
            break
        if row.kept_apart or row.tool_calls:
            reason = row.kept_apart or "a call of a tool that has no result"
            where = f"turn {turn} of {conversation.turns}"
            return Reject(row.set, f"an earlier answer was {reason}", conversation.id, where)
        history = [*history, {"role": "assistant", "content": row.text}]
        turn += 1
    return None


def _ask(
    conversation: Conversation,
    turn: int,
    history: list[dict[str, Any]],
    pool: Pool,
    sampling: Sampling,
    target_fingerprint: str,
) -> AnswerRow | Reject:
    prompt, row = conversation.prompt, conversation.row_ids[turn]
    asked = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        # One seed a row: at temperature > 0 a resumed run asks the same question again.
        "seed": int(hash_json(row)[:8], 16) % 2**31,
        "thinking": sampling.thinking_of(conversation.id),
    }
    tools = list(prompt.tools)
    try:
        served = pool.chat(history, tools=tools, **asked)
    except NotExact as error:
        return Reject(prompt.set, error.reason, conversation.id, error.detail)
    except RequestRefused as error:
        return Reject(prompt.set, "refused by the server", conversation.id, str(error))
    except RequestFailed as error:
        reason = EMPTY_ANSWER if str(error) == EMPTY_ANSWER else GAVE_UP
        return Reject(
            prompt.set, reason, conversation.id, "" if reason is not GAVE_UP else str(error)
        )
    return AnswerRow(
        id=row,
        set=prompt.set,
        split=prompt.split,
        messages=list(history),
        repeat=conversation.repeat,
        turn=turn,
        tools=tools,
        sampling={("max_new_tokens" if k == "max_tokens" else k): v for k, v in asked.items()},
        target_fingerprint=target_fingerprint,
        server=served.server,
        engine=served.engine,
        **_told_by(
            served.answer, sampling, prompt.split == "train" and turn == conversation.turns - 1
        ),
    )


def _told_by(answer: Answer, sampling: Sampling, last_of_train: bool) -> dict[str, Any]:
    """The fields of a row that the answer decides. A loop is cut off only where nothing follows the
    answer, and never in what is held out."""
    whole = answer.answer_token_ids
    if last_of_train and sampling.train_before_loop and is_looping(whole):
        kept = whole[: before_loop(whole)] or whole
        answer = replace(answer, answer_token_ids=kept, finish_reason="length")
    text, reasoning, kind = split_reasoning(answer.text, answer.reasoning, answer.finish_reason)
    looping = is_looping(answer.answer_token_ids)
    apart = reason_apart(
        text, answer.tool_calls, looping, answer.finish_reason, train_on_cut=sampling.train_on_cut
    )
    return dict(
        prompt_token_ids=answer.prompt_token_ids,
        answer_token_ids=answer.answer_token_ids,
        text=text,
        finish_reason=answer.finish_reason,
        looping=looping,
        reasoning=reasoning,
        reasoning_kind=kind,
        tool_calls=answer.tool_calls,
        kept_apart=apart or _mask_problem(answer, sampling.stop_ids),
        token_ids_from=answer.token_ids_from,
        loop_tokens=len(whole) - len(answer.answer_token_ids),
    )


def _mask_problem(answer: Answer, stop_ids: tuple[int, ...]) -> str:
    """Why the mask of an answer is not to be trained on, "" when it is."""
    ended = answer.finish_reason in ("stop", "tool_calls") and stop_ids
    findings = check_mask(
        answer.prompt_token_ids,
        answer.answer_token_ids,
        stop_ids,
        finish_reason="stop" if ended else "",
    )
    return findings[0].title if findings else ""
