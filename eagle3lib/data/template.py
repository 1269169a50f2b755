"""A target's chat template: the one way in which text becomes prompt ids, and how to compare them.

A drafter learns from what a server saw. When the ids that the template gives here differ from those
that a server was given (thinking on and off, another system prompt, a doubled first token), the
acceptance measured there says nothing of the training here: the difference is shown first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError

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
    folder: Path, stop_ids: Sequence[int], arguments: dict[str, Any] | None = None
) -> ChatTemplate:
    """The template of a target's folder. Raises ``UserError`` when there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the target's tokenizer can't be loaded: {error}",
            expected="a tokenizer that transformers reads without remote code",
            where=folder,
        ) from None
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(
            "the target has no chat template",
            expected="chat_template.jinja, or chat_template in tokenizer_config.json",
            where=folder,
            next="take the chat model, or put its template into the folder",
        )
    return ChatTemplate(tokenizer, tuple(stop_ids), arguments or {})


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
