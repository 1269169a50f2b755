"""One row, token by token: what is trained, where the boundary is, and whether the prompt is the
one that the target's template gives.

A row of a run carries the ids that the server saw and made; a row of text is rendered here, one
view for each assistant turn. A difference between served and rendered prompt is the first line.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3lib.data.asked import as_asked
from eagle3lib.data.render import check_mask, render_turns
from eagle3lib.data.rows import GIVEN, RENDERED, SERVED
from eagle3lib.data.template import (
    ChatTemplate,
    RefusedTurn,
    compare_prompts,
    load_chat_template,
    show_tail,
    thinking_arguments,
)
from eagle3lib.lab.errors import UserError

Piece = tuple[str, list[int]]  # text and the ids that it is made of

_BOUNDARY_TOKENS = 6
_RESET, _PROMPT = "\x1b[0m", "\x1b[2m"
_SOURCES = {
    RENDERED: "; the server told no ids, they are rendered from its text",
    GIVEN: "; the answer is not the target's own, its ids are rendered",
}
# Two shades, so that the borders between trained tokens are seen.
_TRAINED, _LEFT_OUT = ("\x1b[30;42m", "\x1b[30;102m"), ("\x1b[30;47m", "\x1b[30;107m")
_HTML_TRAINED, _HTML_LEFT_OUT = ("#b7e4c7", "#74c69d"), ("#e9e9e9", "#d6d6d6")


@dataclass(frozen=True)
class RowView:
    """What is shown of one row. ``difference`` and ``problems`` are empty when all is well."""

    title: str
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    rendered_token_ids: list[int]  # a served prompt, as the template gives it; [] if unknown
    difference: str
    problems: list[str]
    left_out: str  # why nothing of the row is trained
    note: str
    served: bool  # the server told the ids; else they are the template's own


def read_row(path: Path, number: int) -> dict[str, Any]:
    """Row ``number`` of a JSONL file, counted from 1; blank lines don't count.

    Raises ``UserError`` when there is no such file or row, or the line is no JSON object.
    """
    if not path.is_file():
        raise UserError("there is no file of rows", expected="a JSONL file", where=path)
    rows = 0
    with path.open("rb") as file:  # split at b"\n" alone: answers contain U+2028
        for line in file:
            rows += bool(line.strip())
            if rows == number and line.strip():
                return _parse(line, path, number)
    raise UserError(
        f"there is no row {number}", expected=f"--row from 1 to {rows}" if rows else "rows",
        where=path,
    )  # fmt: skip


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"row {number} is not JSON: {error}", where=path) from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UserError(
            f"row {number} has no messages",
            expected='{"messages": [{"role": ..., "content": ...}]}, answered or of a run',
            where=path,
        )
    return row


def view_row(row: dict[str, Any], template: ChatTemplate, title: str) -> list[RowView]:
    """A row of a run gives one view; a row of text one for each assistant turn.

    Raises ``UserError`` when no turn of a text row can be trained on, with the reasons.
    """
    if isinstance(row.get("prompt_token_ids"), list):
        return [_view_served(row, template, title)]
    turns, rejects = render_turns(row["messages"], template, tools=row.get("tools") or None)
    reasons = [f"{r.reason} ({r.detail})" if r.detail else r.reason for r in rejects]
    if not turns:
        raise UserError(f"{title} can't be trained on: {'; '.join(reasons)}")
    return [
        RowView(
            title=f"{title}, message {turn.turn}",
            prompt_token_ids=turn.prompt_token_ids,
            answer_token_ids=turn.answer_token_ids,
            rendered_token_ids=[],
            difference="",
            problems=reasons if turn is turns[0] else [],
            left_out="",
            note="rendered by the template, no served ids to compare with"
            + (f"; not exact: {turn.note}" if turn.note else ""),
            served=False,
        )
        for turn in turns
    ]


def _view_served(row: dict[str, Any], template: ChatTemplate, title: str) -> RowView:
    served, answer = row["prompt_token_ids"], row.get("answer_token_ids") or []
    finish = row.get("finish_reason", "")
    findings = check_mask(served, answer, template.stop_ids, finish_reason=finish)
    problems = [f"{f.title} ({f.evidence})" for f in findings]
    try:
        rendered = _rendered_prompt(row, template)
        difference = compare_prompts(rendered, served, template)
        difference += _equal_with_thinking(row, template) if difference else ""
    except RefusedTurn as error:
        rendered, difference = [], f"the prompt can't be compared: {error}"
    left_out = row.get("kept_apart") or ("looping" if row.get("looping") else "")
    left_out = "held out" if row.get("split", "train") != "train" else left_out
    source = row.get("token_ids_from", SERVED)
    note = f"finish reason {finish or 'unknown'}" + _SOURCES.get(source, "")
    told = source == SERVED
    return RowView(title, served, answer, rendered, difference, problems, left_out, note, told)


def _rendered_prompt(row: dict[str, Any], template: ChatTemplate) -> list[int]:
    """The ids that the template gives for what the row asked, with the row's own switch."""
    asked, messages = as_asked(row["messages"], row.get("sampling"), template)
    return asked.ids(asked.render(messages, prompt=True, tools=row.get("tools") or None))


def _equal_with_thinking(row: dict[str, Any], template: ChatTemplate) -> str:
    """Name the switch when it alone makes the difference: the most common cause of all."""
    for word, value in (("on", True), ("off", False)):
        switched = replace(template, arguments=template.arguments | thinking_arguments(value))
        if _rendered_prompt(row, switched) == row["prompt_token_ids"]:
            return f"\n  equal with thinking {word}: --{'' if value else 'no-'}thinking"
    return ""


def row_text(view: RowView, template: ChatTemplate, *, colour: bool) -> str:
    """The view for a terminal: trained tokens in green, an answer that is left out in grey;
    without colour in ``[[...]]`` and ``((...))``."""
    prompt = token_pieces(view.prompt_token_ids, template)
    answer = token_pieces(view.answer_token_ids, template)
    lines = [*_headlines(view), "", *_tails(view, template), "", _boundary(prompt, answer), ""]
    if colour:
        body = _PROMPT + "".join(_printable(text) for text, _ in prompt) + _RESET
        for index, (text, _) in enumerate(answer):
            code = (_LEFT_OUT if view.left_out else _TRAINED)[index % 2]
            body += code + _printable(text).replace("\n", f"{_RESET}\n{code}") + _RESET
    else:
        said = "".join(_printable(text) for text, _ in answer)
        body = "".join(_printable(text) for text, _ in prompt)
        body += f"(({said}))" if view.left_out else f"[[{said}]]"
    return "\n".join([*lines, body])


def _boundary(prompt: list[Piece], answer: list[Piece]) -> str:
    """The tokens around the boundary between what was asked and what was said."""
    left = " ".join(repr(text) for text, _ in prompt[-_BOUNDARY_TOKENS:])
    right = " ".join(repr(text) for text, _ in answer[:_BOUNDARY_TOKENS])
    return f"boundary: ... {left} || {right} ..."


def row_html(view: RowView, template: ChatTemplate) -> str:
    """The view for a notebook; each token's ids stand in its tooltip."""

    def spans(pieces: list[Piece], style: tuple[str, ...]) -> str:
        return "".join(
            f'<span style="{style[index % len(style)]}" title="{" ".join(map(str, own))}">'
            f"{html.escape(text)}</span>"
            for index, (text, own) in enumerate(pieces)
        )

    prompt = token_pieces(view.prompt_token_ids, template)
    answer = token_pieces(view.answer_token_ids, template)
    head = "\n".join([*_headlines(view), *_tails(view, template), _boundary(prompt, answer)])
    shades = _HTML_LEFT_OUT if view.left_out else _HTML_TRAINED
    return (
        f'<pre style="white-space:pre-wrap">{html.escape(head)}\n\n'
        f"{spans(prompt, ('opacity:.6',))}"
        f"{spans(answer, tuple(f'background:{shade};color:#000' for shade in shades))}</pre>"
    )


def _headlines(view: RowView) -> list[str]:
    prompt, answer = len(view.prompt_token_ids), len(view.answer_token_ids)
    lines = [view.difference] if view.difference else []
    lines += [f"PROBLEM: {problem}" for problem in view.problems]
    lines.append(
        f"{view.title}: {prompt + answer} tokens, {prompt} prompt (not trained), "
        f"{answer} answer ({f'{view.left_out}, not trained' if view.left_out else 'trained'}); "
        f"{view.note}"
    )
    if view.rendered_token_ids and not view.difference:
        lines.append("prompt ids: equal to the template's own rendering")
    return lines


def _tails(view: RowView, template: ChatTemplate) -> list[str]:
    """The last 20 prompt ids of both sides; a difference has shown them already."""
    if view.rendered_token_ids and view.difference:
        return []
    whose = "as served:      " if view.served else "as in the row:  "
    lines = [f"last prompt ids, {whose} {show_tail(view.prompt_token_ids, template)}"]
    if view.rendered_token_ids:
        rendered = show_tail(view.rendered_token_ids, template)
        lines.append(f"last prompt ids, by the template: {rendered}")
    return lines


def token_pieces(ids: list[int], template: ChatTemplate) -> list[Piece]:
    """(text, its ids): one token each, several where a character is spread over tokens."""
    pieces: list[Piece] = []
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = template.decode(waiting)
        # An unfinished character decodes to U+FFFD; four bytes are the longest, so no more wait.
        if not text.endswith("\ufffd") or len(waiting) >= 4:
            pieces.append((text, waiting))
            waiting = []
    return [*pieces, (template.decode(waiting), waiting)] if waiting else pieces


def _printable(text: str) -> str:
    """A row's own escape sequences must not steer the terminal that shows it."""
    return "".join(c if c in "\n\t" or c.isprintable() or ord(c) > 0x9F else "�" for c in text)


def show_row(
    path: Path,
    number: int,
    target_folder: Path,
    stop_ids: Sequence[int],
    *,
    trust_remote_code: bool = False,
) -> str:
    """HTML of a served row for a notebook; the reason in its place where the target's template
    can't be loaded here (a tokenizer that needs code of its own, say): the row itself is none the
    worse."""
    row = read_row(path, number)
    try:
        template = load_chat_template(target_folder, stop_ids, trust_remote_code=trust_remote_code)
    except UserError as error:
        return f"<pre>{html.escape(str(error))}</pre>"
    return row_html(view_row(row, template, f"row {number}")[0], template)
