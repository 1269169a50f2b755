"""Rows that come as text become token ids by the target's own chat template, never by a pattern.

Other people's conversations hold words; a drafter is trained on ids. For each assistant turn j the
template is asked twice, for the prompt that a server would have seen and for the finished turn::

    prompt = render(messages[:j], generation prompt)   <|im_start|>assistant\\n
    whole  = render(messages[:j + 1])                  <|im_start|>assistant\\nHi<|im_end|>\\n
    answer = whole beyond prompt, to the stop token                             Hi<|im_end|>

What the generation prompt supplies (a header, an opening ``<think>``, an empty think block) is thus
in the prompt and never trained; what the template writes after the stop token is in neither. One
row a turn, since templates take the reasoning out of earlier turns. Where the two renders do not
agree, or the answer is not the message's own words, the turn is refused with the reason: a mask is
never guessed. Rows that a server answered with ids need none of this. Cost: three renders a turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lib.data.prompts import Reject
from eagle3lib.data.template import ChatTemplate, Message, RefusedTurn
from eagle3lib.lab.finding import Finding

# What opens and closes reasoning in the templates of Qwen3, DeepSeek and Kimi alike.
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class RenderedTurn:
    """One training row. ``text`` is what ``answer_token_ids`` say, stop token included.

    ``exact``: the ids of both renders agree up to the boundary and the message's words stand in
    the answer as they are; else ``note`` says what is not so.
    """

    turn: int  # index of the assistant message
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    text: str
    exact: bool
    note: str


def render_turns(
    messages: list[Message],
    template: ChatTemplate,
    *,
    tools: list[Any] | None = None,
    where: str = "",
) -> tuple[list[RenderedTurn], list[Reject]]:
    """One row for each assistant turn of a conversation, and the turns that were refused."""
    turns: list[RenderedTurn] = []
    rejects: list[Reject] = []
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            turns.append(render_turn(messages, index, template, tools=tools))
        except RefusedTurn as error:
            detail = f"message {index}" + (f": {error.detail}" if error.detail else "")
            rejects.append(Reject(where=where, reason=error.reason, detail=detail))
    if not turns and not rejects:
        rejects.append(Reject(where=where, reason="no assistant turn to train on"))
    return turns, rejects


def render_turn(
    messages: list[Message], index: int, template: ChatTemplate, *, tools: list[Any] | None = None
) -> RenderedTurn:
    """The assistant turn ``messages[index]`` as a training row. Raises ``RefusedTurn``."""
    said = _what_was_said(messages[index])
    if index == 0:
        raise RefusedTurn("nothing is asked before the answer")
    history = template.render(messages[:index], prompt=False, tools=tools)
    prompt = template.render(messages[:index], prompt=True, tools=tools)
    whole = template.render(messages[: index + 1], prompt=False, tools=tools)
    try:
        prompt, answer, notes = _answer_of_template(history, prompt, whole, said, template)
    except RefusedTurn:
        answer = _answer_as_served(history, prompt, whole, said, template)
        if not answer:
            raise
        notes = ["the template takes the reasoning out; the message's own text is trained"]
    prompt_ids, answer_ids, merged = _token_boundary(prompt, answer, template)
    notes += [merged] if merged else []
    if answer_ids[-1] not in template.stop_ids:
        raise RefusedTurn("no stop token after the answer", f"the last id is {answer_ids[-1]}")
    errors = check_mask(prompt_ids, answer_ids, template.stop_ids, finish_reason="stop")
    if errors:
        raise RefusedTurn(errors[0].title, errors[0].evidence)
    return RenderedTurn(index, prompt_ids, answer_ids, answer, not notes, "; ".join(notes))


@dataclass(frozen=True)
class _Said:
    """What an assistant message says, apart from how a template writes it."""

    raw: str  # the content as it stands in the row
    reasoning: str
    words: str
    calls: list[str]  # names of the functions called
    inline: bool  # the reasoning stood in the content

    def unchanged_in(self, answer: str) -> bool:
        parts = [self.raw] if self.inline else [self.reasoning, self.words]
        return all(part in answer for part in parts)


def _what_was_said(message: Message) -> _Said:
    raw = message.get("content")
    raw = "" if raw is None else raw
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    if not isinstance(raw, str) or not isinstance(reasoning, str):
        raise RefusedTurn("an assistant message that is not text", f"{type(raw).__name__}")
    inline, words = not reasoning and END_THINK in raw, raw
    if inline:
        reasoning, _, words = raw.rpartition(END_THINK)
        reasoning = reasoning.strip().removeprefix(THINK)
    calls = [_function_name(call) for call in message.get("tool_calls") or []]
    if not words.strip() and not calls:
        raise RefusedTurn("an empty answer")
    return _Said(raw, reasoning, words, calls, inline)


def _function_name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RefusedTurn("a tool call without a function's name")
    return name


def _answer_of_template(
    history: str, prompt: str, whole: str, said: _Said, template: ChatTemplate
) -> tuple[str, str, list[str]]:
    """(prompt, answer, notes) where the template's two renders agree and say what was said."""
    if not whole.startswith(prompt):
        if not whole.startswith(history):
            raise RefusedTurn("the template rewrites history", _difference(history, whole))
        raise RefusedTurn(
            "the finished turn does not go on from the generation prompt",
            f"prompt {prompt[len(history) :]!r}, turn {whole[len(history) :][:80]!r}",
        )
    if said.reasoning and prompt.rstrip().endswith(END_THINK):
        raise RefusedTurn("the turn reasons, its prompt has thinking switched off")
    rest = whole[len(prompt) :]
    answer, stop = _up_to_stop(rest, template)
    lead = _match_words(answer.removesuffix(stop), rest, said)
    notes = []
    if lead:  # the prompt of thinking switched off: that is how this answer would have been asked
        prompt, answer = prompt + lead, answer.removeprefix(lead)
        notes.append(f"{lead!r} is the template's own and counts as prompt")
    if not said.unchanged_in(answer):
        notes.append("the template changes the message's white space")
    return prompt, answer, notes


def _up_to_stop(text: str, template: ChatTemplate) -> tuple[str, str]:
    """``text`` up to and with its first stop token, and that token."""
    found = [(text.find(stop), stop) for stop in template.stop_texts() if stop in text]
    if not found:
        wanted = " or ".join(template.stop_texts()) or "none is known"
        raise RefusedTurn("no stop token after the answer", f"{wanted}, found {text[-40:]!r}")
    at, stop = min(found)
    return text[: at + len(stop)], stop


def _match_words(answer: str, rest: str, said: _Said) -> str:
    """Refuse an answer that is not reasoning, words and calls in this order and nothing else.

    Returns the empty think block before the words, if the template wrote one on its own.
    """
    reasoning, words = said.reasoning.strip(), said.words.strip()
    if reasoning:
        before = rf"\s*(?:{THINK})?\s*{re.escape(reasoning)}\s*{END_THINK}\s*"
    else:
        before = rf"(?P<block>\s*(?:{THINK})?\s*{END_THINK}\s*)?\s*"
    match = re.match(before + re.escape(words), answer)
    if match is None:
        if reasoning and reasoning not in answer:
            raise RefusedTurn("the template drops the turn's reasoning", f"renders {answer[:80]!r}")
        if words not in answer and words in rest:
            raise RefusedTurn("a stop token stands inside the answer", f"{answer[-40:]!r}")
        if words not in answer:
            raise RefusedTurn("the template changes the answer's words", f"renders {answer[:80]!r}")
        raise RefusedTurn("the template writes text before the answer", f"{answer[:80]!r}")
    after = answer[match.end() :]
    missing = [name for name in said.calls if name not in after]
    if missing:
        raise RefusedTurn("the template drops a tool call", ", ".join(missing))
    if after.strip() and not said.calls:
        raise RefusedTurn("the template writes text after the answer", repr(after[:80]))
    return "" if reasoning else match["block"] or ""


def _answer_as_served(
    history: str, prompt: str, whole: str, said: _Said, template: ChatTemplate
) -> str:
    """The message's own text where it goes on from an opening ``<think>`` of the prompt, or "".

    DeepSeek-R1 and Kimi-K2.5 open the reasoning in the generation prompt and take it out of every
    finished turn, so no template shows what was served. The content can: ``...</think>words``.
    """
    words, turn = said.words.strip(), whole.removeprefix(history)
    opened = prompt.rstrip().endswith(THINK)
    if not (opened and said.inline and whole.startswith(history) and words in turn):
        return ""
    try:
        tail, stop = _up_to_stop(turn[turn.rindex(words) + len(words) :], template)
    except RefusedTurn:
        return ""
    if tail.strip() != stop:  # a tool call, or text of the template's own
        return ""
    opening = prompt[prompt.rindex(THINK) :]  # with the newline that some templates add
    raw = said.raw.removeprefix(opening)
    return raw.removeprefix(THINK) + stop


def _token_boundary(
    prompt: str, answer: str, template: ChatTemplate
) -> tuple[list[int], list[int], str]:
    """Ids of prompt and answer; the note is empty when their joint ids have the same boundary."""
    prompt_ids, both = template.ids(prompt), template.ids(prompt + answer)
    if both[: len(prompt_ids)] == prompt_ids and len(both) > len(prompt_ids):
        return prompt_ids, both[len(prompt_ids) :], ""
    # A server never merges across the boundary: the prompt's ids are fixed when the answer starts.
    answer_ids = template.ids(answer)
    if template.decode(prompt_ids + answer_ids) != template.decode(both):
        raise RefusedTurn(
            "the answer has other ids alone than after its prompt",
            f"tokenised alone: {template.decode(answer_ids)[:80]!r}",
        )
    return prompt_ids, answer_ids, "tokens merge across the boundary; both sides tokenised alone"


def _difference(left: str, right: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), 0)
    at = at or min(len(left), len(right))
    start = max(0, at - 20)
    return f"as prompt {left[start : at + 40]!r}, as history {right[start : at + 40]!r}"


def check_mask(
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    stop_ids: Sequence[int],
    *,
    finish_reason: str = "",
    where: str = "",
) -> list[Finding]:
    """What is wrong with a row whose answer is trained and whose prompt is not.

    ``finish_reason`` "stop" asks for a stop token at the end; "length" has none.
    """
    findings: list[Finding] = []

    def error(code: str, title: str, evidence: str, remedy: str = "leave the row out") -> None:
        findings.append(Finding(code, "error", title, evidence, remedy, where))

    stops = set(stop_ids)
    if not prompt_ids:
        evidence = f"0 prompt ids, {len(answer_ids)} answer ids"
        error("mask-all-ones", "the row has no prompt: everything would be trained", evidence)
    if not answer_ids or (len(answer_ids) == 1 and answer_ids[0] in stops):
        evidence = f"{len(prompt_ids)} prompt ids, answer ids {list(answer_ids)}"
        error("mask-all-zeros", "the row has no answer: nothing would be trained", evidence)
    elif finish_reason == "stop" and answer_ids[-1] not in stops:
        evidence = f"the last id is {answer_ids[-1]}, stop ids are {sorted(stops)}"
        remedy = "check that data and target are of the same family"
        error("mask-no-stop", "no stop token after the answer", evidence, remedy)
    inside = [i for i, token in enumerate(answer_ids[:-1]) if token in stops]
    if inside:
        evidence = f"at {inside[0]} of {len(answer_ids)} answer ids"
        error("mask-stop-inside", "a stop token stands inside the answer", evidence)
    return findings
