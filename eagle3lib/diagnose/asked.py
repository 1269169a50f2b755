"""Requests of a file of rows, for the diagnosis of anybody's drafter: answered before, asked of a
running server now, or answered by the target itself where there is no server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

import openai

from eagle3lib.data.messages import BadRow, Request, request_of
from eagle3lib.data.read import ReadRow, read_rows
from eagle3lib.data.renderer import target_renderer
from eagle3lib.data.template import RefusedTurn, load_chat_template
from eagle3lib.diagnose.live import LiveTarget
from eagle3lib.diagnose.material import recorded_steps
from eagle3lib.engine.client import Client, NotExact
from eagle3lib.lab.errors import UserError
from eagle3lib.measure.arms import OWN, RequestRow

_ANY_LENGTH = 10**9  # characters: whoever asks chose the prompts
_FIELDS = {f.name for f in fields(RequestRow)}
_IDS = ("prompt_token_ids", "answer_token_ids")
_DEFAULT_STEPS = 3
Answerer = Callable[[str, Request], RequestRow]


@dataclass(frozen=True)
class AskedRows:
    """``by``: "engine" or "target"; ``counters``: by what the server's own grew meanwhile."""

    rows: list[RequestRow]
    by: str
    counters: dict[str, float] = field(default_factory=dict)


def asked_rows(prompts: str | Path, live: LiveTarget, server: str, max_tokens: int) -> AskedRows:
    """Rows of ids (those of ``requests.jsonl``, or any with ``prompt_token_ids`` and
    ``answer_token_ids``) are taken as they are; all others are prompts in any format that phase 01
    reads, asked of ``server``, or of the target itself without one.

    Raises ``UserError`` with the row's place for one that is neither, and for a file that mixes the
    two.
    """
    rows = list(read_rows(prompts))
    if not rows:
        raise UserError("the file of prompts is empty", where=prompts)
    answered = [isinstance(r.value, dict) and all(k in r.value for k in _IDS) for r in rows]
    if any(answered):
        if server or not all(answered):
            odd = rows[answered.index(bool(server))]
            raise UserError(
                f"{odd.where} is {'answered already' if server else 'not answered yet'}",
                expected="prompts alone with --server, or rows of ids alone without it",
                where=prompts,
                next="eagle3 diagnose --help",
            )
        found = [_answered(row, number) for number, row in enumerate(rows, start=1)]
        return AskedRows(found, "engine")
    asked = [(_name(row, number), _request(row)) for number, row in enumerate(rows, start=1)]
    if not server:
        ask = _of_target(live, max_tokens)
        return AskedRows([ask(name, request) for name, request in asked], "target")
    client = Client(server.rstrip("/"), renderer=target_renderer(live.target.folder))
    ask, before = _of_server(client, max_tokens), _counters(client)
    found = [ask(name, request) for name, request in asked]
    after = _counters(client)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return AskedRows(found, "engine", grown)


def _counters(client: Client) -> dict[str, float]:
    """The server's counters of speculation; {} where it tells none."""
    try:
        return client.speculation_counters()
    except (OSError, HTTPException, UnicodeDecodeError):
        return {}


def _name(row: ReadRow, number: int) -> str:
    named = row.value.get("id") if isinstance(row.value, dict) else None
    return str(named or f"row-{number}")


def _request(row: ReadRow) -> Request:
    try:
        if row.problem:
            raise BadRow(row.problem)
        return request_of(row.value, "auto", _ANY_LENGTH)
    except BadRow as error:
        raise UserError(
            f"{row.where} can't be used: {error.reason}",
            expected="a prompt in a format that phase 01 reads, or prompt_token_ids and "
            "answer_token_ids" + (f"; {error.detail}" if error.detail else ""),
            next="eagle3 prompts --help",
        ) from None


def _answered(row: ReadRow, number: int) -> RequestRow:
    """A row of ids. Without an arm it is our drafter's, on the workload."""
    value = row.value
    name = str(value.get("prompt") or value.get("id") or f"row-{number}")
    whole: dict[str, Any] = {
        "arm": OWN, "set": "workload", "repeat": 0, "finish_reason": "", "duration_s": 0.0,
        "accepted": None, "drafted": None,
    }  # fmt: skip
    whole |= {k: v for k, v in value.items() if k in _FIELDS} | {"prompt": name}
    lists = [k for k in (*_IDS, "accepted", "drafted") if not _counts(whole[k], k in _IDS)]
    if lists or not whole["prompt_token_ids"]:
        raise UserError(
            f"{row.where} can't be used: {', '.join(lists) or 'no prompt_token_ids'}",
            expected="lists of whole numbers from 0: token ids, and drafts by round",
        )
    return RequestRow(**whole)


def _counts(value: Any, wanted: bool) -> bool:
    if value is None:
        return not wanted
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _of_server(client: Client, max_tokens: int) -> Answerer:
    name = client.model()

    def ask(prompt: str, asked: Request) -> RequestRow:
        try:
            a = client.chat(
                asked.messages, model=name, tools=asked.tools, max_tokens=max_tokens,
                temperature=0.0,
            )  # fmt: skip
        except NotExact as error:
            raise UserError(f"the ids of the answer to {prompt} can't be told: {error}") from None
        except openai.OpenAIError as error:
            raise UserError(
                f"the server at {client.url} failed at prompt {prompt}: {error}",
                next="look into its log, then ask again",
            ) from None
        counts = a.counts
        return RequestRow(
            OWN, "workload", prompt, 0, a.prompt_token_ids, a.answer_token_ids, a.finish_reason,
            a.duration_s, a.rounds.accepted if a.rounds else None,
            a.rounds.drafted if a.rounds else None, counts=asdict(counts) if counts else None,
        )  # fmt: skip

    return ask


def _of_target(live: LiveTarget, max_tokens: int) -> Answerer:
    template = load_chat_template(live.target.folder, live.target.stop_ids())

    def ask(prompt: str, asked: Request) -> RequestRow:
        try:
            text = template.render(asked.messages, prompt=True, tools=asked.tools or None)
        except RefusedTurn as error:
            raise UserError(
                f"the target's template refuses prompt {prompt}: {error}",
                where=live.target.folder,
                next="leave the prompt out",
            ) from None
        ids = template.ids(text)
        answer = live.answer(ids, max_tokens)
        return RequestRow(OWN, "workload", prompt, 0, ids, answer, "", 0.0, None, None)

    return ask


def with_steps(rows: list[RequestRow], steps: int) -> tuple[list[RequestRow], int]:
    """(rows, K): ``steps``, or for 0 what the record says; the lab's default where it says nothing.
    Of rounds whose drafts were not counted each drafted K. Raises ``UserError`` for a record that
    accepts drafts and says nowhere how many there were."""
    uncounted = [r for r in rows if r.accepted is not None and r.drafted is None]
    found = steps or recorded_steps(rows)
    if not found and uncounted:
        raise UserError(
            f"K is not known: row {uncounted[0].prompt} tells accepted drafts alone",
            expected="drafted, a number a round, or --steps K",
        )
    k = found or _DEFAULT_STEPS
    return [
        replace(r, drafted=[k] * len(r.accepted))
        if r.accepted is not None and r.drafted is None
        else r
        for r in rows
    ], k
