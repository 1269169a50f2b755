"""Ask a server: token ids as served, the engine's own record of rounds, and its counters.

Where the ids come from, by what the server can do::

    vLLM                     its chat API tells both (return_token_ids)              served
    SGLang                   its generate API, asked with ids, tells the answer's    served
    any other, with a chat   a ``Renderer`` renders them from the text and checks
    API of OpenAI's kind     them, or says that it can't (``NotExact``)              rendered

The last two need a ``Renderer``, the target's own template; without one they are an error.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import openai
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families

from eagle3lib.engine import native
from eagle3lib.engine.access import REFUSED, api_key, open_url, refusal
from eagle3lib.engine.records import RoundCounts, told_counts
from eagle3lib.engine.vllm import SERVED_NAME
from eagle3lib.lab.errors import UserError

Message = dict[str, Any]
Thinking = Literal["default", "on", "off"]  # default: as the chat template has it


class BadReply(UserError):
    """A server answered, but not with what was asked for: no token ids, half a JSON, no choice."""


class NotExact(Exception):
    """The ids of this answer can't be told for certain. ``reason`` is countable."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Asked:
    """What a template is given to make a prompt of."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    thinking: Thinking


@dataclass(frozen=True)
class Told:
    """What a server told of its answer in place of ids; counts are None where it told none."""

    message: Message
    finish_reason: str
    prompt_tokens: int | None
    answer_tokens: int | None


class Renderer(Protocol):
    """The target's own template. Both raise ``NotExact``; calls come from many threads."""

    def prompt(self, asked: Asked) -> tuple[list[int], str]:
        """(ids, text) of a prompt, up to where the answer starts."""

    def turn(self, asked: Asked, told: Told) -> tuple[list[int], list[int]]:
        """(prompt ids, answer ids) of an answer, checked against what was told of it."""


@dataclass(frozen=True)
class RoundRecord:
    """The engine's account of one answer: what each verify round was given and accepted."""

    accepted: list[int]  # accepted drafts of each round
    drafted: list[int]  # drafts offered in each round


@dataclass(frozen=True)
class Answer:
    """One answer, token-exact as the server saw and made it, or as ``token_ids_from`` says."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    text: str
    finish_reason: str
    duration_s: float
    rounds: RoundRecord | None
    reasoning: str | None = None  # None: the server told no reasoning apart from the text
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids_from: Literal["served", "rendered"] = "served"
    record: dict[str, Any] | None = None  # the engine's account of speculation, as it told it

    @property
    def counts(self) -> RoundCounts | None:
        """The record as counts, whatever the engine. Raises ``BrokenRecord``."""
        return told_counts(self.record)


class Client:
    """An OpenAI client of one server. Retries of lost connections and 429/5xx are the client's
    own. ``renderer``: for servers that don't tell all ids."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        retries: int = 3,
        renderer: Renderer | None = None,
    ):
        self.url = url.rstrip("/")
        self._renderer = renderer
        self._native: bool | None = None  # None: not yet known
        self._native_lock = threading.Lock()
        self._tells_ids = False
        self._openai = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key() or "none",  # the client wants one, a server without a key does not
            timeout=timeout_s,
            max_retries=retries,
        )

    def model(self) -> str:
        """Name of the served model; a server that can't be reached is a ``UserError``."""
        try:
            served = [m.id for m in self._openai.models.list()]
        except openai.APIStatusError as error:
            if error.status_code in REFUSED:
                raise refusal(self.url, error.status_code) from None
            raise self._unreachable(error) from None
        except openai.OpenAIError as error:
            raise self._unreachable(error) from None
        if not served:
            raise UserError(f"the server at {self.url} serves no model")
        return _served_name(served)

    def _unreachable(self, error: openai.OpenAIError) -> UserError:
        return UserError(
            f"no server answers at {self.url}: {error}",
            expected="an OpenAI-compatible server",
            next="check the address, or leave parameter 'server' empty to start one",
        )

    def probe(self, timeout_s: float = 10.0) -> str:
        """Name of the served model, asked once and shortly. Raises ``openai.OpenAIError``."""
        quick = self._openai.with_options(timeout=timeout_s, max_retries=0)
        return _served_name([m.id for m in quick.models.list()])

    def version(self) -> str:
        """The engine's version as vLLM (``0.32.0``) and SGLang (``sglang 0.5.6``) tell it, ""
        where nothing tells it."""
        try:
            with open_url(f"{self.url}/version", 10) as answer:
                told = json.load(answer)
        except (OSError, ValueError):  # no such page, one for people, or a key: a courtesy
            told = {}
        if isinstance(told, dict) and told.get("version"):
            return str(told["version"])
        quick = self._openai.with_options(timeout=10, max_retries=0)
        return native.sglang_version(quick, self.url)

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
        ids or ids that can't be right, ``NotExact`` when they can't be rendered for certain, and
        ``openai.OpenAIError`` when it returns nothing."""
        asked = Asked(messages, tools, thinking)
        if self._renderer and self._is_native():
            return self._generate(self._renderer, asked, max_tokens, temperature, seed)
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
        return self._answer(asked, reply, time.perf_counter() - started)

    def _is_native(self) -> bool:
        """Whether SGLang's own API is there. Asked until it is known: a guess would mix kinds."""
        with self._native_lock:
            if self._native is None:
                quick = self._openai.with_options(timeout=10, max_retries=1)
                self._native = native.is_sglang(quick, self.url)
            return self._native

    def _generate(
        self,
        renderer: Renderer,
        asked: Asked,
        max_tokens: int,
        temperature: float,
        seed: int | None,
    ) -> Answer:
        prompt_ids, prompt = renderer.prompt(asked)
        body = native.request_body(
            prompt_ids,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
        )
        started = time.perf_counter()
        try:
            reply = self._openai.post(f"{self.url}/generate", cast_to=object, body=body)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise BadReply(f"the server at {self.url} sent no JSON: {error}") from None
        duration_s = time.perf_counter() - started
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        if not isinstance(reply, dict) or not isinstance(meta, dict):
            raise BadReply(f"the server at {self.url} sent a reply without an answer")
        finish = native.finish_of(meta)
        if finish == "abort":
            raise BadReply(f"the server at {self.url} aborted: {meta['finish_reason']}"[:300])
        answer_ids, text = reply.get("output_ids"), reply.get("text")
        counts = meta.get("prompt_tokens"), meta.get("completion_tokens")
        self._check_ids(prompt_ids, answer_ids, *counts)
        if not isinstance(text, str):
            raise BadReply(
                f"the server at {self.url} returned ids without their text",
                expected="a server started without --skip-tokenizer-init",
            )
        text, reasoning = native.reasoning_apart(prompt, text)
        ids, record = list(answer_ids or []), native.record_of(meta)
        return Answer(prompt_ids, ids, text, finish, duration_s, None, reasoning, record=record)

    def _answer(self, asked: Asked, reply: Any, duration_s: float) -> Answer:
        whole = isinstance(reply, ChatCompletion) and reply.choices
        if not whole or getattr(reply.choices[0], "message", None) is None:
            raise BadReply(f"the server at {self.url} sent a reply without an answer")
        choice, extra = reply.choices[0], reply.model_extra or {}
        message = choice.message
        answer_ids = (choice.model_extra or {}).get("token_ids")
        prompt_ids = extra.get("prompt_token_ids")
        told = message.model_extra or {}
        reasoning = told.get("reasoning")
        reasoning = told.get("reasoning_content") if reasoning is None else reasoning
        calls = [call.model_dump(exclude_none=True) for call in message.tool_calls or []]
        usage = reply.usage
        counts = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        # One that told ids before and tells none now has a fault: that is no reason to render.
        rendered = prompt_ids is None and answer_ids is None and not self._tells_ids
        if rendered and self._renderer:
            said = {"role": "assistant", "content": message.content or ""}
            said |= {"reasoning_content": reasoning} if reasoning else {}
            said |= {"tool_calls": calls} if calls else {}
            finish = choice.finish_reason or ""
            prompt_ids, answer_ids = self._renderer.turn(asked, Told(said, finish, *counts))
        else:
            rendered = False
            self._check_ids(prompt_ids, answer_ids, *counts)
            self._tells_ids = True
        return Answer(
            prompt_token_ids=list(prompt_ids),
            answer_token_ids=list(answer_ids),
            text=message.content or "",
            finish_reason=choice.finish_reason or "",
            duration_s=duration_s,
            rounds=_round_record(extra.get("metrics")),
            reasoning=reasoning,
            tool_calls=calls,
            token_ids_from="rendered" if rendered else "served",
            record=extra.get("metrics"),
        )

    def _check_ids(
        self, prompt_ids: Any, answer_ids: Any, prompt_tokens: Any, answer_tokens: Any
    ) -> None:
        """The ids must be there, be token ids, and be as many as the server itself counted."""
        if answer_ids is None or prompt_ids is None:
            raise BadReply(
                f"the server at {self.url} returned no token ids",
                expected="prompt_token_ids and token_ids (vLLM answers 'return_token_ids'), "
                "or output_ids (SGLang's generate API)",
                next="serve the target with vLLM 0.10.2 or newer, or with SGLang 0.5",
            )
        for what, ids, counted in (
            ("prompt", prompt_ids, prompt_tokens),
            ("answer", answer_ids, answer_tokens),
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
        with open_url(f"{self.url}/metrics", 30) as answer:
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
