"""``vllm bench serve`` against a running server: a load that somebody else wrote, and its result.

Its chat backend sends each prompt as one user message, which the server renders; ids, tools and
earlier turns can't be told to it. Read in vLLM 0.32 (``vllm/benchmarks``).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.engine.config import SERVED_NAME, EngineConfig, interpreter
from eagle3lib.engine.records import RoundCounts
from eagle3lib.engine.vllm import engine_env
from eagle3lib.lab.errors import UserError

_START_S, _TOKEN_S = 600, 1.0  # its imports; slower than any server that is worth a benchmark
_CHAT = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]


@dataclass(frozen=True)
class BenchServe:
    """Its result; lists are in the order of the prompts. ``seconds``: wall clock of all requests;
    ``wait_s``: between a request's chunks; ``counts``: the server's counters over the run, None
    where it has none (no drafter, or SGLang)."""

    seconds: float
    prompt_tokens: list[int]
    answer_tokens: list[int]
    first_token_s: list[float]
    latency_s: list[float]
    wait_s: list[list[float]]
    counts: RoundCounts | None


def bench_serve(
    prompts: Sequence[str],
    url: str,
    config: EngineConfig,
    *,
    tokens: int,
    concurrency: int,
    temperature: float = 0.0,
) -> BenchServe:
    """Ask every prompt once, up to ``tokens`` each. Raises ``UserError`` with its last words when
    it fails, when a request of it does, or when its result lacks something."""
    deadline_s = _START_S + _TOKEN_S * tokens * math.ceil(len(prompts) / concurrency)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"prompt": text}) for text in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        argv = [interpreter("vllm"), "-m", "vllm.entrypoints.cli.main", "bench", "serve", *_CHAT]
        argv += ["--base-url", url, "--model", SERVED_NAME, "--tokenizer", str(config.target)]
        argv += ["--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")]
        # The server applies the chat template: applied here as well, it would stand there twice.
        argv += ["--disable-shuffle", "--skip-chat-template", "--num-prompts", str(len(prompts))]
        argv += ["--max-concurrency", str(concurrency), "--temperature", str(temperature)]
        argv += ["--custom-output-len", str(tokens), "--save-result", "--save-detailed"]
        argv += ["--result-dir", name, "--result-filename", "result.json", "--disable-tqdm"]
        argv += ["--trust-remote-code"] if config.trust_remote_code else []
        env = {**os.environ, **engine_env(1, config)}
        try:
            done = subprocess.run(
                argv, env=env, capture_output=True, text=True, timeout=deadline_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            what = "no end" if isinstance(error, subprocess.TimeoutExpired) else str(error)
            raise _failed(f"{what} (deadline {deadline_s:.0f} s)") from None
        result = folder / "result.json"
        if done.returncode or not result.exists():
            raise _failed(f"exit code {done.returncode}\n{(done.stderr or done.stdout)[-1500:]}")
        return read_result(result.read_text(encoding="utf-8"), len(prompts))


def read_result(text: str, asked: int) -> BenchServe:
    """The JSON that ``--save-result --save-detailed`` writes. Raises ``UserError`` where requests
    failed, or where a key is missing or of another length than ``asked``."""
    try:
        told = json.loads(text)
        lists = {
            name: told[name] for name in ("input_lens", "output_lens", "ttfts", "latencies", "itls")
        }
        completed, seconds = told["completed"], float(told["duration"])
        counts = _counts(told)
    except (ValueError, KeyError, TypeError) as error:
        raise _failed(f"its result can't be read: {error!r}") from None
    if completed != asked:
        said = next((e for e in told.get("errors") or [] if e), "no reason told")
        raise _failed(f"{completed} of {asked} requests completed: {said.strip()[-300:]}")
    short = [name for name, values in lists.items() if len(values) != asked]
    if short:
        raise _failed(f"its result has {', '.join(short)} of another length than {asked}")
    return BenchServe(
        seconds,
        prompt_tokens=lists["input_lens"],
        answer_tokens=lists["output_lens"],
        first_token_s=lists["ttfts"],
        latency_s=lists["latencies"],
        wait_s=lists["itls"],
        counts=counts,
    )


def _counts(told: dict[str, Any]) -> RoundCounts | None:
    rounds = told.get("spec_decode_num_drafts")
    if not rounds:
        return None
    rates = told.get("spec_decode_per_position_acceptance_rates") or []
    return RoundCounts(
        rounds=rounds,
        accepted=told["spec_decode_accepted_tokens"],
        drafted=told["spec_decode_draft_tokens"],
        accepted_at=[round(rate * rounds) for rate in rates],
        source="vllm bench serve",
    )


def _failed(what: str) -> UserError:
    return UserError(
        f"vllm bench serve failed: {what}",
        expected="a result of every prompt",
        next="bench_serve=false leaves this second opinion out; EAGLE3_VLLM_PYTHON names its vLLM",
    )
