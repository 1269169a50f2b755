"""Ask for one answer as a stream: when each chunk came and how many tokens it held.

vLLM's chat API tells the prompt's ids in the first chunk, the new ids in each, and its record of
rounds in the last one (with ``include_usage``); SGLang's generate API tells the ids and meta_info
so far, or the new ones (``--incremental-streaming-output``). Times are seconds since the request.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eagle3lib.engine import native
from eagle3lib.engine.access import open_url
from eagle3lib.engine.client import Answer, Asked, BadReply, Renderer, RoundRecord
from eagle3lib.engine.records import RoundCounts, sglang_counts, vllm_counts
from eagle3lib.engine.vllm import SERVED_NAME

_DATA, _END = "data:", "[DONE]"


@dataclass(frozen=True)
class Streamed:
    """One answer with its arrival. ``chunk_s[i]``: when chunk i came; empty chunks are left out."""

    answer: Answer
    chunk_s: list[float]
    chunk_tokens: list[int]
    counts: RoundCounts | None = None

    @property
    def first_token_s(self) -> float | None:
        return self.chunk_s[0] if self.chunk_s else None


@dataclass
class _Chunks:
    started: float = field(default_factory=time.perf_counter)
    ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def now_s(self) -> float:
        return round(time.perf_counter() - self.started, 5)

    def add(self, new: list[int]) -> None:
        if new:
            self.ids += new
            self.at_s.append(self.now_s())
            self.tokens.append(len(new))


def stream_chat(
    url: str,
    asked: Asked,
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None = None,
    timeout_s: float = 600.0,
) -> Streamed:
    """One streamed request to vLLM's chat API. Raises ``BadReply``."""
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "messages": asked.messages,
        "max_completion_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    body |= {"tools": list(asked.tools)} if asked.tools else {}
    body |= {"seed": seed} if seed is not None else {}
    if asked.thinking != "default":
        switch = asked.thinking == "on"
        body["chat_template_kwargs"] = {"enable_thinking": switch, "thinking": switch}
    chunks, prompt, text, finish, metrics, counted = _Chunks(), None, "", "", None, None
    for event in _events(f"{url}/v1/chat/completions", body, timeout_s):
        prompt = event.get("prompt_token_ids") or prompt
        metrics = event.get("metrics") or metrics
        counted = (event.get("usage") or {}).get("completion_tokens", counted)
        for choice in event.get("choices") or []:
            chunks.add(choice.get("token_ids") or [])
            text += (choice.get("delta") or {}).get("content") or ""
            finish = choice.get("finish_reason") or finish
    if prompt is None or not chunks.ids:
        raise BadReply(
            f"the server at {url} streamed no token ids",
            expected="prompt_token_ids and token_ids (vLLM answers 'return_token_ids')",
            next="serve the target with vLLM 0.10.2 or newer",
        )
    _check_count(url, counted, chunks.ids)
    told = (metrics or {}).get("speculative_decoding") or {}
    by_round = told.get("per_step_accepted")
    rounds = RoundRecord(by_round, told["per_step_drafted"]) if by_round is not None else None
    return _streamed(chunks, prompt, text, finish, rounds, vllm_counts(metrics))


def stream_ids(
    url: str,
    renderer: Renderer,
    asked: Asked,
    *,
    max_tokens: int,
    temperature: float,
    steps: int | None = None,
    seed: int | None = None,
    timeout_s: float = 600.0,
) -> Streamed:
    """One streamed request to SGLang's generate API; ``steps`` as in ``sglang_counts``."""
    prompt, _ = renderer.prompt(asked)
    body = native.request_body(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
    chunks, meta, text = _Chunks(), {}, ""
    for event in _events(f"{url}/generate", body | {"stream": True}, timeout_s):
        if "error" in event:
            raise BadReply(f"the server at {url} says: {event['error']}"[:300])
        meta, text = event.get("meta_info") or meta, event.get("text") or text
        ids = event.get("output_ids") or []
        # Cumulative unless the server streams increments: then they start anew each time.
        grows = len(ids) >= len(chunks.ids) and ids[: len(chunks.ids)] == chunks.ids
        whole = meta.get("completion_tokens") == len(ids)
        chunks.add(ids[len(chunks.ids) :] if grows and whole else ids)
    finish = native.finish_of(meta)
    if finish == "abort" or not chunks.ids:
        raise BadReply(f"the server at {url} aborted: {meta.get('finish_reason')}"[:300])
    _check_count(url, meta.get("completion_tokens"), chunks.ids)
    return _streamed(chunks, prompt, text, finish, None, sglang_counts(meta, steps))


def _streamed(
    chunks: _Chunks,
    prompt: list[int],
    text: str,
    finish: str,
    rounds: RoundRecord | None,
    counts: RoundCounts | None,
) -> Streamed:
    # The answer is whole with its last token; the record that follows is not its time.
    answer = Answer(prompt, chunks.ids, text, finish, chunks.at_s[-1], rounds)
    return Streamed(answer, chunks.at_s, chunks.tokens, counts)


def _check_count(url: str, counted: int | None, ids: list[int]) -> None:
    if counted is not None and counted != len(ids):
        raise BadReply(f"the server at {url} streamed {len(ids)} ids, counted {counted}")


def _events(url: str, body: dict[str, Any], timeout_s: float) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event. Raises ``BadReply`` for what is no such stream."""
    try:
        with open_url(url, timeout_s, body) as reply:
            for raw in reply:
                line = raw.decode("utf-8", errors="replace")
                text = line.removeprefix(_DATA).strip()
                if not line.startswith(_DATA) or text == _END:
                    continue
                event = json.loads(text)
                if isinstance(event, dict):
                    yield event
    except urllib.error.HTTPError as error:
        said = error.read(300).decode("utf-8", errors="replace")
        raise BadReply(f"{url} answers HTTP {error.code}: {said}") from None
    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
        raise BadReply(f"the stream of {url} broke: {error!r}"[:300]) from None
