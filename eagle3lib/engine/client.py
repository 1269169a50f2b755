"""Ask a server: token ids as served, the engine's own record of rounds, and its counters."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

from eagle3lib.engine.vllm import SERVED_NAME
from eagle3lib.lab.errors import UserError

Message = dict[str, Any]


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
        return SERVED_NAME if SERVED_NAME in served else served[0]

    def chat(
        self,
        messages: list[Message],
        *,
        model: str = SERVED_NAME,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
    ) -> Answer:
        """One chat request. Raises ``UserError`` when the server returns no token ids."""
        started = time.perf_counter()
        reply = self._openai.chat.completions.create(
            model=model,
            messages=messages,  # type: ignore[arg-type]
            max_completion_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            extra_body={"return_token_ids": True},
        )
        duration_s = time.perf_counter() - started
        choice, extra = reply.choices[0], reply.model_extra or {}
        answer_ids = (choice.model_extra or {}).get("token_ids")
        prompt_ids = extra.get("prompt_token_ids")
        if answer_ids is None or prompt_ids is None:
            raise UserError(
                f"the server at {self.url} returned no token ids",
                expected="prompt_token_ids and token_ids (vLLM answers 'return_token_ids')",
                next="serve the target with vLLM 0.10.2 or newer",
            )
        return Answer(
            prompt_token_ids=list(prompt_ids),
            answer_token_ids=list(answer_ids),
            text=choice.message.content or "",
            finish_reason=choice.finish_reason or "",
            duration_s=duration_s,
            rounds=_round_record(extra.get("metrics")),
        )

    def speculation_counters(self) -> dict[str, float]:
        """Counters of /metrics that concern speculation, summed over engines; see formats in docs.

        Keys ``drafts``, ``draft_tokens``, ``accepted_tokens`` and ``accepted_at_N`` (N from 0).
        They only grow: take differences.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        return parse_speculation_counters(text)


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
