"""Ask a server: token ids as served, the engine's own record of rounds, and its counters."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import openai
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families

from eagle3lib.engine.vllm import SERVED_NAME
from eagle3lib.lab.errors import UserError

Message = dict[str, Any]
Thinking = Literal["default", "on", "off"]  # default: as the chat template has it


class BadReply(UserError):
    """A server answered, but not with what was asked for: no token ids, half a JSON, no choice."""


@dataclass(frozen=True)
class RoundRecord:
    """The engine's account of one answer: what each verify round was given and accepted."""

    accepted: list[int]  # accepted drafts of each round
    drafted: list[int]  # drafts offered in each round


@dataclass(frozen=True)
class Answer:
    """One answer, token-exact as the server saw and made it."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    text: str
    finish_reason: str
    duration_s: float
    rounds: RoundRecord | None
    reasoning: str | None = None  # None: the server told no reasoning apart from the text
    tool_calls: list[dict[str, Any]] = field(default_factory=list)


class Client:
    """An OpenAI client of one server. Retries of lost connections and 429/5xx are the client's
    own."""

    def __init__(self, url: str, *, timeout_s: float = 600.0, retries: int = 3):
        self.url = url.rstrip("/")
        self._openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=timeout_s, max_retries=retries
        )

    def model(self) -> str:
        """Name of the served model; a server that can't be reached is a ``UserError``."""
        try:
            served = [m.id for m in self._openai.models.list()]
        except openai.OpenAIError as error:
            raise UserError(
                f"no server answers at {self.url}: {error}",
                expected="an OpenAI-compatible server",
                next="check the address, or leave parameter 'server' empty to start one",
            ) from None
        if not served:
            raise UserError(f"the server at {self.url} serves no model")
        return _served_name(served)

    def probe(self, timeout_s: float = 10.0) -> str:
        """Name of the served model, asked once and shortly. Raises ``openai.OpenAIError``."""
        quick = self._openai.with_options(timeout=timeout_s, max_retries=0)
        return _served_name([m.id for m in quick.models.list()])

    def version(self) -> str:
        """The engine's version as /version tells it (vLLM does), "" where nothing tells it."""
        try:
            with urllib.request.urlopen(f"{self.url}/version", timeout=10) as answer:
                told = json.load(answer)
        except (OSError, ValueError):  # no such page, or one for people: the version is a courtesy
            return ""
        return str(told.get("version", "")) if isinstance(told, dict) else ""

    def chat(
        self,
        messages: list[Message],
        *,
        model: str = SERVED_NAME,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
        thinking: Thinking = "default",
    ) -> Answer:
        """One chat request. Raises ``BadReply``, a ``UserError``, when the server returns no token
        ids or ids that can't be right, and ``openai.OpenAIError`` when it returns nothing."""
        started = time.perf_counter()
        extra: dict[str, Any] = {"return_token_ids": True}
        if thinking != "default":
            # Templates don't agree on the name: Qwen3 reads the first, DeepSeek and Kimi the
            # second, and each ignores the other.
            switch = thinking == "on"
            extra["chat_template_kwargs"] = {"enable_thinking": switch, "thinking": switch}
        try:
            reply = self._openai.chat.completions.create(
                model=model,
                messages=messages,  # type: ignore[arg-type]
                max_completion_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
                extra_body=extra,
                **({"tools": list(tools)} if tools else {}),  # type: ignore[arg-type]
            )
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadReply(f"the server at {self.url} sent no JSON: {error}") from None
        return self._answer(reply, time.perf_counter() - started)

    def _answer(self, reply: Any, duration_s: float) -> Answer:
        whole = isinstance(reply, ChatCompletion) and reply.choices
        if not whole or getattr(reply.choices[0], "message", None) is None:
            raise BadReply(f"the server at {self.url} sent a reply without an answer")
        choice, extra = reply.choices[0], reply.model_extra or {}
        message = choice.message
        answer_ids = (choice.model_extra or {}).get("token_ids")
        prompt_ids = extra.get("prompt_token_ids")
        self._check_ids(prompt_ids, answer_ids, reply.usage)
        told = message.model_extra or {}
        reasoning = told.get("reasoning")
        return Answer(
            prompt_token_ids=list(prompt_ids),
            answer_token_ids=list(answer_ids),
            text=message.content or "",
            finish_reason=choice.finish_reason or "",
            duration_s=duration_s,
            rounds=_round_record(extra.get("metrics")),
            reasoning=told.get("reasoning_content") if reasoning is None else reasoning,
            tool_calls=[call.model_dump(exclude_none=True) for call in message.tool_calls or []],
        )

    def _check_ids(self, prompt_ids: Any, answer_ids: Any, usage: Any) -> None:
        """The ids must be there, be token ids, and be as many as the server itself counted."""
        if answer_ids is None or prompt_ids is None:
            raise BadReply(
                f"the server at {self.url} returned no token ids",
                expected="prompt_token_ids and token_ids (vLLM answers 'return_token_ids')",
                next="serve the target with vLLM 0.10.2 or newer",
            )
        for what, ids, counted in (
            ("prompt", prompt_ids, usage and usage.prompt_tokens),
            ("answer", answer_ids, usage and usage.completion_tokens),
        ):
            if not isinstance(ids, list) or any(type(i) is not int or i < 0 for i in ids):
                raise BadReply(f"the server at {self.url} returned {what} ids that are no ids")
            if counted and counted != len(ids):
                raise BadReply(
                    f"the server at {self.url} returned {len(ids)} {what} ids, counted {counted}"
                )

    def speculation_counters(self) -> dict[str, float]:
        """Counters of /metrics that concern speculation, summed over engines; see formats in docs.

        Keys ``drafts``, ``draft_tokens``, ``accepted_tokens`` and ``accepted_at_N`` (N from 0).
        They only grow: take differences.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        return parse_speculation_counters(text)


def _served_name(served: list[str]) -> str:
    """Our own name where it is served, else the first; "" when nothing is."""
    return SERVED_NAME if SERVED_NAME in served else (served or [""])[0]


_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def parse_speculation_counters(text: str) -> dict[str, float]:
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = _COUNTERS.get(sample.name)
            if sample.name == _PER_POSITION:
                key = f"accepted_at_{sample.labels['position']}"
            if key:
                counts[key] = counts.get(key, 0.0) + sample.value
    return counts


def _round_record(metrics: Any) -> RoundRecord | None:
    record = (metrics or {}).get("speculative_decoding") if isinstance(metrics, dict) else None
    if not record or "per_step_accepted" not in record:
        return None
    return RoundRecord(list(record["per_step_accepted"]), list(record["per_step_drafted"]))
