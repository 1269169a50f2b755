"""Whose words the tokens of a row are: system, user, earlier answers, tools, the template's own.

A character of the prompt belongs to a message when it changes with what this message says. So the
template is asked once more for each message, with one unlikely character in place of its words; all
between the common beginning and the common end of the two renders is the message's::

    as asked    <|im_start|>user\\nWhy?<|im_end|>\\n<|im_start|>assistant\\n
    with "X"    <|im_start|>user\\nX<|im_end|>\\n<|im_start|>assistant\\n
    the user's                    Why?

What no message changes is scaffolding: headers, stop tokens, a system prompt of the template's own,
the descriptions of tools, the fixed marks around a call, an opened or empty think block. Neither a
template that rewrites history nor one that moves the system prompt is in the way. A token counts
where it begins. Cost: one render a message and two tokenisations a row.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from typing import Any

from eagle3lib.data.asked import as_asked
from eagle3lib.data.render import END_THINK
from eagle3lib.data.rows import AnswerRow
from eagle3lib.data.template import ChatTemplate, Message, RefusedTurn
from eagle3lib.data.tokens_view import token_pieces

SCAFFOLDING, UNKNOWN = "scaffolding", "prompt of unknown parts"
# Earlier answers are "assistant"; the row's own answer is "reasoning" and "answer".
ROLES = ("system", "user", "assistant", "tool", SCAFFOLDING, UNKNOWN, "reasoning", "answer")
_FILLER = "\ue000"  # of the private use area: no text begins or ends with it


def tokens_by_role(
    rows: Iterable[AnswerRow], template: ChatTemplate | None
) -> dict[str, Counter[str]]:
    """Tokens of each of ``ROLES`` by set; together they are all tokens of the rows.

    Without a template, all prompt tokens are of unknown parts.
    """
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        count = counts.setdefault(row.set, Counter())
        count.update(prompt_roles(row, template))
        count.update(answer_roles(row, template))
    return counts


def prompt_roles(row: AnswerRow, template: ChatTemplate | None) -> Counter[str]:
    """Prompt tokens by role. All are of unknown parts where the row's ids do not begin with those
    that the template gives for its messages, or where its tokens begin can't be told."""
    unknown = Counter({UNKNOWN: len(row.prompt_token_ids)})
    if template is None:
        return unknown
    asked, messages = as_asked(row.messages, row.sampling, template)
    try:
        text = asked.render(messages, prompt=True, tools=row.tools or None)
        ids = asked.ids(text)
        begins = _begins(text, ids, asked)
        if not begins or row.prompt_token_ids[: len(ids)] != ids:
            return unknown
        owners = _owners(text, messages, asked, row.tools)
    except RefusedTurn:
        return unknown
    # Beyond the generation prompt no message can stand: an empty think block, say, of a row that
    # was rendered, or of a server that switches thinking off by itself.
    beyond = len(row.prompt_token_ids) - len(ids)
    return Counter(owners[begin] for begin in begins) + Counter({SCAFFOLDING: beyond})


def _begins(text: str, ids: list[int], template: ChatTemplate) -> list[int]:
    """The character at which each token of ``text`` begins; [] where that can't be told."""
    if getattr(template.tokenizer, "is_fast", False):
        given = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = [begin for begin, _ in given["offset_mapping"]]
    else:  # Kimi's tokenizer, say, tells no places: they follow from what the tokens say
        pieces = token_pieces(ids, template)
        if "".join(piece for piece, _ in pieces) != text:
            return []
        begins, at = [], 0
        for piece, own in pieces:
            begins += [at] * len(own)
            at += len(piece)
    return [min(begin, len(text) - 1) for begin in begins]


def answer_roles(row: AnswerRow, template: ChatTemplate | None) -> Counter[str]:
    """Answer tokens as reasoning, up to and with its closing marker, and the rest."""
    total = len(row.answer_token_ids)
    reasoning = 0
    if row.reasoning_kind == "cut":
        reasoning = total
    elif row.reasoning_kind != "missing" and template is not None:
        reasoning = _reasoning_tokens(row, template)
    return +Counter({"reasoning": reasoning, "answer": total - reasoning})


def _owners(
    text: str, messages: list[Message], template: ChatTemplate, tools: list[Any]
) -> list[str]:
    """The role of each character of ``text``, the render of ``messages``."""
    owners = [SCAFFOLDING] * len(text)
    for index, message in enumerate(messages):
        changed = [*messages[:index], _saying(message, _FILLER), *messages[index + 1 :]]
        other = template.render(changed, prompt=True, tools=tools or None)
        begin = _common_length(text, other)
        end = len(text) - _common_length(text[begin:][::-1], other[begin:][::-1])
        owners[begin:end] = [_role(message)] * (end - begin)
    return owners


def _role(message: Message) -> str:
    role = str(message.get("role"))
    return {"ipython": "tool", "developer": "system"}.get(role, role)


def _saying(message: Message, words: str) -> Message:
    """The message with other words, and other calls to other functions."""
    changed = message | {"content": words}
    for key in ("reasoning_content", "reasoning"):
        changed |= {key: words} if message.get(key) else {}
    if message.get("tool_calls"):
        function = {"name": words, "arguments": {words: words}}
        changed["tool_calls"] = [call | {"function": function} for call in message["tool_calls"]]
    return changed


def _common_length(a: str, b: str) -> int:
    """Characters that both begin with; by halving, since prompts may be long."""
    longest = min(len(a), len(b))
    return bisect.bisect_left(range(longest), True, key=lambda n: a[: n + 1] != b[: n + 1])


def _reasoning_tokens(row: AnswerRow, template: ChatTemplate) -> int:
    """Tokens up to the end of the reasoning: the fewest whose text holds its closing marker, or all
    of it where the target marks it otherwise."""
    ids, marker = row.answer_token_ids, template.ids(END_THINK)
    if len(marker) == 1 and marker[0] in ids:
        return ids.index(marker[0]) + 1
    whole = template.decode(ids)
    end = END_THINK if END_THINK in whole else row.reasoning.strip()
    if not end or end not in whole:
        return 0
    return bisect.bisect_left(range(len(ids)), True, key=lambda n: end in template.decode(ids[:n]))
