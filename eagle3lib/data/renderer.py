"""The target's template at work for servers that don't tell token ids, checked against their words.

A rendered row is kept only if it can't be another than the served one, as far as the server tells:
its prompt is the template's generation prompt, its ids say the served text, and both are as many as
the server counted. A plain answer is compared letter by letter. One that the server took apart
(reasoning, calls of tools) is there only in parts, so for it the count of its tokens must be told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from eagle3lib.data.render import RenderedTurn, render_turn
from eagle3lib.data.template import (
    ChatTemplate,
    RefusedTurn,
    as_servers_read,
    load_chat_template,
    stop_ids_of,
    thinking_arguments,
)
from eagle3lib.engine.client import Asked, NotExact, Told


class TargetRenderer:
    """A ``Renderer`` (see ``eagle3lib.engine.client``) that loads its template when it is first
    needed: servers that tell ids need none. Raises ``UserError`` when there is no template."""

    def __init__(self, load: Callable[[], ChatTemplate]):
        self._load = load
        self._template: ChatTemplate | None = None
        self._lock = threading.Lock()  # tokenizers are not made for several threads

    def prompt(self, asked: Asked) -> tuple[list[int], str]:
        """(ids, text) of the prompt. Raises ``NotExact`` when the template does not take it."""
        with self._lock:
            try:
                return self._prompt(asked)
            except RefusedTurn as error:
                raise NotExact(error.reason, error.detail) from None

    def turn(self, asked: Asked, told: Told) -> tuple[list[int], list[int]]:
        """(prompt ids, answer ids) of an answer. Raises ``NotExact`` with what can't be told."""
        with self._lock:
            try:
                return self._turn(asked, told)
            except RefusedTurn as error:
                raise NotExact(error.reason, error.detail) from None

    def _template_of(self, asked: Asked) -> ChatTemplate:
        self._template = self._template or self._load()
        switch = thinking_arguments({"on": True, "off": False}.get(asked.thinking))
        return replace(self._template, arguments=self._template.arguments | switch)

    def _prompt(self, asked: Asked) -> tuple[list[int], str]:
        template = self._template_of(asked)
        messages = as_servers_read(asked.messages)
        text = template.render(messages, prompt=True, tools=list(asked.tools) or None)
        return template.ids(text), text

    def _turn(self, asked: Asked, told: Told) -> tuple[list[int], list[int]]:
        template = self._template_of(asked)
        prompt_ids, _ = self._prompt(asked)
        cut = told.finish_reason == "length"
        if cut and told.message.get("reasoning_content") and not told.message["content"]:
            raise RefusedTurn("cut inside its reasoning, which no template renders")
        _check_count("prompt", told.prompt_tokens, len(prompt_ids))
        messages = as_servers_read([*asked.messages, told.message])
        tools = list(asked.tools) or None
        turn = render_turn(messages, len(messages) - 1, template, tools=tools)
        if turn.prompt_token_ids != prompt_ids:
            raise RefusedTurn("the rendered answer does not start where the prompt ends", turn.note)
        ids = turn.answer_token_ids
        answer_ids = ids[:-1] if cut else ids
        _check_text(turn, told, template)
        # vLLM, SGLang, llama.cpp and TGI count the stop token; to allow for one that does not would
        # let words through that were split into one token less.
        _check_count("answer", told.answer_tokens, len(answer_ids))
        return prompt_ids, answer_ids


def _check_text(turn: RenderedTurn, told: Told, template: ChatTemplate) -> None:
    """The ids must say what was served, and nothing else but the stop token."""
    said = template.decode(turn.answer_token_ids[:-1])
    in_parts = told.message.get("reasoning_content") or told.message.get("tool_calls")
    if not in_parts and said != told.message["content"]:
        served = told.message["content"]
        raise RefusedTurn(
            "the rendered answer says something else than the served one",
            f"rendered {said[-60:]!r}, served {served[-60:]!r}",
        )
    if in_parts and not turn.exact:
        raise RefusedTurn("the rendered answer is not exact", turn.note)
    if in_parts and told.answer_tokens is None:
        raise RefusedTurn("an answer in parts whose tokens the server did not count")


def _check_count(what: str, served: int | None, rendered: int) -> None:
    if served is not None and served != rendered:
        raise RefusedTurn(
            f"the served {what} has another number of tokens than the rendered one",
            f"served {served}, rendered {rendered}",
        )


def target_renderer(folder: Path, *, trust_remote_code: bool = False) -> TargetRenderer:
    """The renderer of a target's folder, of which nothing is read yet."""

    def load() -> ChatTemplate:
        return load_chat_template(folder, stop_ids_of(folder), trust_remote_code=trust_remote_code)

    return TargetRenderer(load)
