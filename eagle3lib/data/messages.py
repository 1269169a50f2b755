"""From a row in one of the common formats to the messages that the target is asked with, and to
the answer that somebody gave."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from eagle3lib.lab.params import PromptFormat

# In this order: a row may carry its prompt a second time, as plain text or in parts.
FORMATS = ("messages", "conversations", "prompt", "instruction", "text")

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# Marks that a chat template writes and nobody types: of ChatML, Llama 2 and 3, Gemma, Phi, Kimi,
# DeepSeek, gpt-oss. Rendered once more they would be text inside a user's turn.
_TEMPLATE_MARKS = re.compile(
    r"<\|(im_(start|user|system|assistant|end)|start_header_id|eot_id|begin_of_text|start|user|"
    r"assistant|system)\|>|\[INST\]|<start_of_turn>|<\uff5c(User|Assistant)\uff5c>"
)
# An optional system prompt, then user and assistant in turn; an assistant may call tools, and
# answers after their results. At the end: the user, tool results, or an answer, to be cut off.
_TURNS = re.compile(r"s?u(?:a(?:t+a)*u)*(?:a(?:t+a)*t*)?")
# Where an answer stands beside a prompt: TRL, Alpaca and their like.
ANSWER_COLUMNS = ("completion", "response", "output", "answer")
_LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}


class BadRow(ValueError):
    """A row that is left out; ``detail`` is kept apart so that reasons can be counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Request:
    """What the target is asked, and which of ``FORMATS`` it was found in. ``answer`` is the message
    that stood at its end, None for none."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    format: str
    answer: dict[str, Any] | None


def request_of(
    row: Any, prompt_format: PromptFormat, max_prompt_chars: int, *, answered: bool = False
) -> Request:
    """Raises ``BadRow`` with the reason when the row is not usable; with ``answered``, also when
    its last answer isn't."""
    if not isinstance(row, dict):
        raise BadRow("not an object: no list of messages", f"found {type(row).__name__}")
    kind = format_of(row) if prompt_format == "auto" else prompt_format
    if not kind:
        raise BadRow(f"none of {', '.join(FORMATS)}", f"found {', '.join(map(str, row))}"[:200])
    messages = _messages_of(row, kind)
    messages += _answer_beside(row, kind) if answered else []
    cut = messages.pop() if _check_turns(messages) else None
    messages = [_checked(message) for message in messages]
    tools = _tools_of(row.get("tools"))
    _check_text(messages, tools, max_prompt_chars)
    if answered:
        cut = _checked_answer(cut, max_prompt_chars)
    return Request(messages, tools, kind, cut)


def _answer_beside(row: dict[str, Any], kind: str) -> list[Any]:
    """The answer of a row that holds it in a column of its own, as the last message."""
    if kind not in ("prompt", "instruction"):
        return []
    value = next((row[name] for name in ANSWER_COLUMNS if row.get(name) is not None), None)
    if isinstance(value, list):  # TRL: messages on both sides
        return value
    return [] if value is None else [{"role": "assistant", "content": value}]


def _checked_answer(answer: dict[str, Any] | None, max_chars: int) -> dict[str, Any]:
    if answer is None:
        raise BadRow("no answer")
    answer = _checked(answer)
    _check_text([answer], [], max_chars)
    return answer


def format_of(row: dict[str, Any]) -> str:
    """The first of ``FORMATS`` that the row has a value for, "" for none."""
    return next((kind for kind in FORMATS if row.get(kind) is not None), "")


def _messages_of(row: dict[str, Any], kind: str) -> list[Any]:
    value = row.get(kind)
    if kind == "messages":
        return list(_listed(value, kind))
    if kind == "conversations":
        messages = [_from_sharegpt(message) for message in _listed(value, kind)]
    elif kind == "prompt" and isinstance(value, list):
        messages = list(_listed(value, "messages"))
    else:
        messages = [{"role": "user", "content": _plain_text(row, kind)}]
    system = row.get("system")  # these formats often keep it in a column of its own
    has_one = isinstance(messages[0], dict) and messages[0].get("role") == "system"
    if isinstance(system, str) and system.strip() and not has_one:
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _listed(value: Any, kind: str) -> list[Any]:
    """A list, or one that is written down as JSON, as CSV files and Arrow columns hold it."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow(f"no list of {kind}") from None
    if not isinstance(value, list) or not value:
        raise BadRow(f"no list of {kind}")
    return value


def _from_sharegpt(message: Any) -> Any:
    if not isinstance(message, dict) or "from" not in message:
        return message
    role = message["from"]
    known = _SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": message.get("value")}


def _plain_text(row: dict[str, Any], kind: str) -> str:
    text = row.get(kind)
    if not isinstance(text, str):
        raise BadRow(f"no {kind}")
    # Anywhere in plain text; a prompt that is written as one may well speak of such marks.
    marks = _TEMPLATE_MARKS.search if kind == "text" else _TEMPLATE_MARKS.match
    if kind in ("text", "prompt") and marks(text.removeprefix("<s>").lstrip()):
        raise BadRow("looks preformatted: already rendered by a chat template")
    more = row.get("input") if kind == "instruction" else None
    return f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text


def _check_turns(messages: list[Any]) -> bool:
    """Whether the last message is an answer; raises where roles don't follow each other."""
    if not all(isinstance(message, dict) for message in messages):
        raise BadRow("a message without text")
    roles = [message.get("role") for message in messages]
    letters = "".join(_LETTERS.get(r, "?") if isinstance(r, str) else "?" for r in roles)
    if not _TURNS.fullmatch(letters):
        shown = ", ".join(map(str, roles[:12])) + (", ..." if len(roles) > 12 else "")
        raise BadRow("the roles are not user and assistant in turn", f"found {shown}")
    return letters.endswith("a")


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """The message as it is; one that calls tools and says nothing gets ``content: None``, which
    templates ask for and Arrow can't tell from no content."""
    content, role = message.get("content"), message["role"]
    calls = message.get("tool_calls") if role == "assistant" else None
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow("tool_calls is not a list of objects")
        if content is None:
            rest = {key: value for key, value in message.items() if key not in ("role", "content")}
            return {"role": role, "content": None, **rest}
    if not isinstance(content, str):
        raise BadRow("a message without text")
    if not content.strip() and not calls and role != "tool":  # a tool may well return nothing
        raise BadRow("an empty message")
    return message


def _tools_of(value: Any) -> list[dict[str, Any]]:
    """Tool descriptions as a list, whether the row holds a list, its JSON, or a list of JSON."""
    try:
        value = json.loads(value.strip() or "[]") if isinstance(value, str) else value
        value = [json.loads(x) if isinstance(x, str) else x for x in value or []]
    except (ValueError, TypeError, RecursionError):
        raise BadRow("tools is not a list of objects") from None
    if not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools is not a list of objects")
    return value


def _check_text(messages: list[dict[str, Any]], tools: list[Any], max_chars: int) -> None:
    try:
        whole = json.dumps([messages, tools], ensure_ascii=False, allow_nan=False)
        whole.encode()
    except UnicodeEncodeError:  # JSON can spell "\ud83d" alone, an emoji cut in two; UTF-8 can't
        raise BadRow("half a surrogate pair in the text") from None
    except (TypeError, ValueError):
        raise BadRow("a value that JSON can't hold") from None
    texts = [message["content"] or "" for message in messages]
    if any("\0" in text for text in texts):
        raise BadRow("a NUL character in the text")
    others = [*tools, *(message["tool_calls"] for message in messages if "tool_calls" in message)]
    chars = sum(map(len, texts)) + sum(len(json.dumps(x, ensure_ascii=False)) for x in others)
    if chars > max_chars:
        raise BadRow(f"longer than {max_chars} characters", f"found {chars}")
