"""One engine, one K: how an arm's server is set up and how it is asked, the same for all arms."""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import openai

from eagle3lib.data.renderer import TargetRenderer, target_renderer
from eagle3lib.data.rows import AnswerRow
from eagle3lib.engine.client import Asked, BadReply, Client, NotExact, Thinking
from eagle3lib.engine.launch import EngineConfig, EngineServer
from eagle3lib.engine.records import BrokenRecord, chunk_counts
from eagle3lib.engine.settings import with_settings
from eagle3lib.engine.stream import Streamed, stream_chat, stream_ids
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.phase_params import numbers_of
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.points import Point, filled_messages

_LEAST_SEQUENCES = 4
# Read as streams at once. More, and what is measured is a client that wakes for each token of each
# request: plain decoding sends the most chunks, so speculation would seem to gain what it does not.
_MOST_STREAMS = 8
# Of an answer that comes whole nothing is seen before its end, and under load a long one takes its
# time; a server that hangs is told by its counters, and by the streams beside it.
_WHOLE_S = 4 * 3600.0


def engine_config(
    cfg: BenchmarkParams,
    target: Path,
    engine: str,
    steps: int,
    drafter: Path | None,
    threads: int | None = None,
) -> EngineConfig:
    """What an arm's server is started with; arms of one engine and K differ in the drafter alone.
    No prefix cache: a prompt asked twice costs twice."""
    config = EngineConfig(
        target,
        cfg.dtype,
        cfg.max_model_len,
        max_num_seqs=max(_LEAST_SEQUENCES, *numbers_of(cfg.concurrency, int)),
        drafter=drafter,
        num_speculative_tokens=steps,
        compile=cfg.compile,
        threads=threads,
        engine=cast(Literal["vllm", "sglang"], engine),
        trust_remote_code=cfg.trust_remote_code,
    )
    name = f"{engine}_settings"
    return with_settings(config, getattr(cfg, name), f"06_benchmark_serving.{name}")


@dataclass
class Asker:
    """``texts``: (text, tokens) that contexts are filled with."""

    cfg: BenchmarkParams
    target: Path
    engine: str
    steps: int
    texts: list[tuple[str, int]] = field(default_factory=list)
    _renderer: TargetRenderer | None = None
    _clients: dict[str, Client] = field(default_factory=dict)
    _clients_lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.engine == "sglang":  # its chat API tells no ids
            trusted = self.cfg.trust_remote_code
            self._renderer = target_renderer(self.target, trust_remote_code=trusted)

    def ask(
        self,
        server: EngineServer,
        prompt: AnswerRow,
        point: Point,
        max_tokens: int,
        seed: int | None = None,
    ) -> Streamed:
        """One request, streamed; of more than eight at once up to about eight are, the others come
        whole (no ``chunk_s``). Raises ``BadReply``.

        Tools and thinking as when the answer was made: other prompt tokens are another workload.
        """
        messages = prompt.messages
        if point.context_tokens:
            wanted = point.context_tokens - len(prompt.prompt_token_ids)
            messages = filled_messages(messages, self.texts, wanted)
        thinking = cast(Thinking, prompt.sampling.get("thinking", "default"))
        asked = Asked(messages, prompt.tools, thinking)
        options: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": point.temperature,
            "seed": seed,
        }
        if not is_streamed(prompt.id, point.concurrency):
            return self._whole(server, asked, options)
        has_drafter = server.config.drafter is not None
        if self._renderer is not None:
            steps = self.steps if has_drafter else None
            try:
                streamed = stream_ids(server.url, self._renderer, asked, steps=steps, **options)
            except NotExact as error:
                raise BadReply(f"the ids of prompt {prompt.id} can't be told: {error}") from None
        else:
            streamed = stream_chat(server.url, asked, **options)
        if streamed.counts is None and has_drafter and point.concurrency == 1:
            # Without a record of the engine a lone request's chunks are its rounds.
            with contextlib.suppress(BrokenRecord):  # merged on their way: rounds are unknown
                return replace(streamed, counts=chunk_counts(streamed.chunk_tokens, self.steps))
        return streamed

    def _whole(self, server: EngineServer, asked: Asked, options: dict[str, Any]) -> Streamed:
        told: dict[str, Any] = {"tools": asked.tools, "thinking": asked.thinking} | options
        try:
            answer = self._client(server.url).chat(asked.messages, **told)
        except NotExact as error:
            raise BadReply(f"the ids of an answer can't be told: {error}") from None
        except openai.OpenAIError as error:
            raise BadReply(f"the server at {server.url} failed: {error!r}"[:300]) from None
        return Streamed(answer, [], [], answer.counts)

    def _client(self, url: str) -> Client:
        """One a server: to make one takes some 40 ms of CPU, which no request may wait for."""
        with self._clients_lock:
            if url not in self._clients:
                options: dict[str, Any] = {"timeout_s": _WHOLE_S, "retries": 0}
                self._clients[url] = Client(url, renderer=self._renderer, **options)
            return self._clients[url]

    def row(
        self,
        server: EngineServer,
        arm: str,
        prompt: AnswerRow,
        point: Point,
        repeat: int,
        visit: int,
    ) -> RequestRow:
        """Ask and record."""
        started_s = time.time()
        seed = repeat if point.temperature > 0 else None
        streamed = self.ask(server, prompt, point, self.cfg.max_new_tokens, seed)
        answer, counts = streamed.answer, streamed.counts
        return RequestRow(
            arm=arm,
            set=prompt.set,
            prompt=prompt.id,
            repeat=repeat,
            prompt_token_ids=answer.prompt_token_ids,
            answer_token_ids=answer.answer_token_ids,
            finish_reason=answer.finish_reason,
            duration_s=answer.duration_s,
            accepted=answer.rounds.accepted if answer.rounds else None,
            drafted=answer.rounds.drafted if answer.rounds else None,
            engine=point.engine,
            steps=point.steps,
            concurrency=point.concurrency,
            temperature=point.temperature,
            context_tokens=point.context_tokens,
            visit=visit,
            started_s=round(started_s, 3),
            chunk_s=streamed.chunk_s,
            chunk_tokens=streamed.chunk_tokens,
            counts=asdict(counts) if counts is not None else None,
        )

    def counters(self, server: EngineServer) -> dict[str, float]:
        """The server's counters of speculation; {} where it has none (SGLang tells gauges)."""
        return Client(server.url).speculation_counters()


def is_streamed(prompt: str, concurrency: int) -> bool:
    """Whether a request is read as a stream, the same for every arm and repeat."""
    return zlib.crc32(prompt.encode()) % -(-concurrency // _MOST_STREAMS) == 0
