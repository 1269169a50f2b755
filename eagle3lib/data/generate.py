"""Answers out of the served target, token-exact, resumable at any moment.

Every answer is one line of ``answers.jsonl`` the moment it is whole; what was refused is one line
of ``rejects.jsonl`` with its reason. A run that was killed reads both and asks for the rest.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import openai

from eagle3lib.data.prompts import Prompt, Reject
from eagle3lib.engine.client import Client
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl

_LOOP_TOKENS, _LOOP_REPEATS = 8, 6


@dataclass(frozen=True)
class AnswerRow:
    """One answered prompt, with the token ids that the server saw and made."""

    id: str
    set: str
    split: str
    messages: list[dict[str, Any]]
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    text: str
    finish_reason: str
    looping: bool

    @property
    def usable_tokens(self) -> int:
        return 0 if self.looping else len(self.answer_token_ids)

    @property
    def trained(self) -> bool:
        """Looping answers are kept, counted, and not trained on: they teach repetition alone."""
        return self.split == "train" and not self.looping


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float


def read_answers(folder: Path) -> list[AnswerRow]:
    return [AnswerRow(**row) for row in read_jsonl(folder / "answers.jsonl")]


def read_rejects(folder: Path) -> list[dict[str, str]]:
    return read_jsonl(folder / "rejects.jsonl")


def is_looping(ids: list[int]) -> bool:
    """Whether one stretch of 8 tokens stands six times or more in an answer."""
    grams = Counter(tuple(ids[i : i + _LOOP_TOKENS]) for i in range(len(ids) - _LOOP_TOKENS + 1))
    return bool(grams) and max(grams.values()) >= _LOOP_REPEATS


def generate_answers(
    prompts: Iterable[Prompt],
    client: Client,
    folder: Path,
    sampling: Sampling,
    *,
    concurrency: int,
    max_reject_share: float,
    want_tokens: int = 0,
    on_answer: Callable[[AnswerRow], None] = lambda row: None,
) -> list[AnswerRow]:
    """Answer ``prompts`` in their order, ``concurrency`` at once; returns all answers of the
    folder.

    ``want_tokens``: stop asking once the usable answers to these prompts hold so many tokens (0:
    answer all). Raises ``UserError`` when the server is gone, or when too large a share is
    refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = {row.id: row for row in read_answers(folder)}
    refused = {row["id"] for row in read_rejects(folder)}
    wanted = list(prompts)
    tokens = sum(done[p.id].usable_tokens for p in wanted if p.id in done)
    todo = iter([p for p in wanted if p.id not in done and p.id not in refused])
    model = client.model()
    with (
        (folder / "answers.jsonl").open("a", encoding="utf-8") as answers,
        (folder / "rejects.jsonl").open("a", encoding="utf-8") as rejects,
        ThreadPoolExecutor(concurrency) as pool,
    ):
        running: dict[Future[AnswerRow | Reject], Prompt] = {}
        try:
            while True:
                while len(running) < concurrency and (not want_tokens or tokens < want_tokens):
                    prompt = next(todo, None)
                    if prompt is None:
                        break
                    running[pool.submit(_ask, prompt, client, model, sampling)] = prompt
                if not running:
                    _check_share(len(refused), len(done), max_reject_share, folder, least=1)
                    return list(done.values())
                ready, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ready:
                    running.pop(future)
                    row = future.result()
                    if isinstance(row, Reject):
                        _append(rejects, row.as_dict())
                        refused.add(row.id)
                        _check_share(len(refused), len(done), max_reject_share, folder)
                        continue
                    _append(answers, asdict(row))
                    done[row.id] = row
                    tokens += row.usable_tokens
                    on_answer(row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _ask(prompt: Prompt, client: Client, model: str, sampling: Sampling) -> AnswerRow | Reject:
    try:
        answer = client.chat(
            list(prompt.messages),
            model=model,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            # One seed a prompt: at temperature > 0 a resumed run asks the same question again.
            seed=int(prompt.id[:8], 16) % 2**31,
        )
    except openai.BadRequestError as error:  # too long for the context, most often
        return Reject(prompt.set, "refused by the server", prompt.id, _short(error))
    except openai.OpenAIError as error:
        raise UserError(
            f"the server at {client.url} failed: {_short(error)}",
            expected="an answer; lost connections were already retried",
            next="look at the engine's log; then run the phase again, finished answers are kept",
        ) from None
    if not answer.answer_token_ids:
        return Reject(prompt.set, "empty answer", prompt.id)
    return AnswerRow(
        id=prompt.id,
        set=prompt.set,
        split=prompt.split,
        messages=list(prompt.messages),
        prompt_token_ids=answer.prompt_token_ids,
        answer_token_ids=answer.answer_token_ids,
        text=answer.text,
        finish_reason=answer.finish_reason,
        looping=is_looping(answer.answer_token_ids),
    )


def _short(error: Exception) -> str:
    return str(error).replace("\n", " ")[:300]


def _append(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _check_share(
    refused: int, answered: int, limit: float, folder: Path, *, least: int = 20
) -> None:
    """Raise when too many were refused, of at least ``least``: a few say nothing of a share."""
    asked = refused + answered
    if asked >= least and refused > limit * asked:
        rows = read_rejects(folder)
        reasons = Counter(row["reason"] for row in rows).most_common(3)
        raise UserError(
            f"{refused} of {asked} prompts were refused: "
            + "; ".join(f"{n} x {r}" for r, n in reasons)
            + (f"; the last: {rows[-1]['detail']}" if rows[-1]["detail"] else ""),
            expected=f"at most {limit:.0%} (parameter max_reject_share)",
            where=folder / "rejects.jsonl",
        )
