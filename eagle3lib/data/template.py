"""A target's chat template: the one way in which text becomes prompt ids, and how to compare them.

A drafter learns from what a server saw. When the ids that the template gives here differ from those
that a server was given (thinking on and off, another system prompt, a doubled first token), the
acceptance measured there says nothing of the training here: the difference is shown first.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json

Message = dict[str, Any]

_TAIL_IDS = 20


@dataclass(frozen=True)
class ChatTemplate:
    """A target's tokenizer with its template, the ids that end a turn, and the template's own
    arguments (``{"enable_thinking": False}`` for Qwen3, ``{"thinking": False}`` for Kimi)."""

    tokenizer: Any
    stop_ids: Sequence[int]
    arguments: dict[str, Any] = field(default_factory=dict)

    def render(
        self, messages: list[Message], *, prompt: bool, tools: list[Any] | None = None
    ) -> str:
        """The conversation as text; with ``prompt``, up to where the next answer starts.

        Raises ``RefusedTurn`` when the template does not take these messages.
        """
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.arguments,
            )
        # Templates add strings and index dicts of whatever the row holds.
        except (TemplateError, TypeError, LookupError, AttributeError) as error:
            raise RefusedTurn("the template does not take the row", str(error)) from None

    def ids(self, text: str) -> list[int]:
        """Ids of rendered text: the template has written all special tokens already."""
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell "\ud83d" alone, an emoji cut in two
            raise RefusedTurn("half a surrogate pair in the text") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def stop_texts(self) -> list[str]:
        return [text for i in self.stop_ids if (text := self.tokenizer.convert_ids_to_tokens(i))]


class RefusedTurn(ValueError):
    """A turn that can't be trained on; ``reason`` is countable, ``detail`` is about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def load_chat_template(
    folder: Path,
    stop_ids: Sequence[int],
    arguments: dict[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> ChatTemplate:
    """The template of a target's folder. Raises ``UserError`` when there is none, or when the
    tokenizer needs code of the folder's own and ``trust_remote_code`` is false."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        needs_code = "trust_remote_code" in str(error)
        raise UserError(
            f"the target's tokenizer can't be loaded: {error}",
            expected="a tokenizer that transformers reads by itself",
            where=folder,
            next="read the tokenizer's code, then set trust_remote_code to true"
            if needs_code
            else "",
        ) from None
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the target has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            where=folder,
            next="take the chat model, or put its template into the folder",
        )
    return ChatTemplate(tokenizer, tuple(stop_ids), arguments or {})


def stop_ids_of(folder: Path, config: dict[str, Any] | None = None) -> tuple[int, ...]:
    """End-of-text and end-of-turn ids that a target's files name; ``config`` where it is known."""
    config = read_json(folder / "config.json") if config is None else config
    inner = config.get("text_config")  # of models that see as well
    named = [(inner if isinstance(inner, dict) else {}).get("eos_token_id")]
    named = named if named[0] is not None else [config.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.exists():
        named.append(read_json(generation).get("eos_token_id"))
    lists = [ids if isinstance(ids, list) else [ids] for ids in named if ids is not None]
    return tuple(sorted({i for ids in lists for i in ids}))


def thinking_arguments(thinking: bool | None) -> dict[str, Any]:
    """Qwen3 reads ``enable_thinking``, DeepSeek-V3.1 and Kimi-K2.5 ``thinking``; templates leave
    unknown names alone."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def as_servers_read(messages: Sequence[Message]) -> list[Message]:
    """A call's arguments, in requests a JSON string, as the object that servers hand to the
    template."""
    read = copy.deepcopy(list(messages))
    for call in [c for m in read for c in m.get("tool_calls") or [] if isinstance(c, dict)]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(json.JSONDecodeError):
                function["arguments"] = json.loads(function["arguments"])
    return read


def compare_prompts(rendered: list[int], served: list[int], template: ChatTemplate) -> str:
    """Why the ids that the template gives are not those that the server saw; "" when they are.

    The first line names the first difference, two more show the last 20 ids of both.
    """
    if rendered == served:
        return ""
    pairs = zip(rendered, served, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(rendered), len(served)))

    def here(ids: list[int]) -> str:
        return f"{template.decode(ids[at : at + 8])!r} (id {ids[at]})" if at < len(ids) else "ends"

    lines = [
        f"prompt ids differ at position {at}: rendered {here(rendered)}, served {here(served)}; "
        f"{len(rendered)} ids rendered, {len(served)} served"
    ]
    for name, longer, shorter in (("served", served, rendered), ("rendered", rendered, served)):
        if longer[:1] == shorter[:1] and longer[1:] == shorter:
            lines.append(f"  the first token stands twice in the {name} prompt")
    lines.append(f"  last {_TAIL_IDS} rendered: {show_tail(rendered, template)}")
    lines.append(f"  last {_TAIL_IDS} served:   {show_tail(served, template)}")
    return "\n".join(lines)


def show_tail(ids: list[int], template: ChatTemplate) -> str:
    """The last 20 ids and what they say."""
    tail = ids[-_TAIL_IDS:]
    return f"{' '.join(map(str, tail))}  {template.decode(tail)!r}"
