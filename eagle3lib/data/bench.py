"""How fast our client drives a server, beside ``vllm bench serve`` on the same server.

Both ask the same prompts at the same concurrency, in turns, and are timed from the first request to
the last answer. The measure is answer tokens a second; the ratio of each pair is what counts, since
the machine drifts.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.prompts import Prompt
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.bench_serve import bench_serve
from eagle3lib.engine.client import Client
from eagle3lib.engine.config import EngineConfig


def time_client(prompts: list[Prompt], url: str, tokens: int, concurrency: int) -> dict[str, Any]:
    """Our client, as phase 01 uses it: answers written and synced to disk one by one."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        rows = generate_answers(
            prompts,
            Client(url),
            Path(folder),
            Sampling(tokens, 0.0, train_on_cut=True),
            concurrency=concurrency,
            max_reject_share=0.0,
        )
        seconds = time.perf_counter() - started
    made = sum(len(row.answer_token_ids) for row in rows)
    return {"client": "ours", "tokens": made, "seconds": seconds, "tokens_per_s": made / seconds}


def time_vllm_bench(
    prompts: list[Prompt], url: str, tokens: int, concurrency: int, config: EngineConfig
) -> dict[str, Any]:
    """``vllm bench serve`` with the chat backend; its own duration and token count."""
    texts = [p.messages[-1]["content"] for p in prompts]
    result = bench_serve(texts, url, config, tokens=tokens, concurrency=concurrency)
    made, seconds = sum(result.answer_tokens), result.seconds
    return {
        "client": "vllm bench serve",
        "tokens": made,
        "seconds": seconds,
        "tokens_per_s": made / seconds,
    }


def compare_clients(
    prompts: list[Prompt],
    url: str,
    config: EngineConfig,
    *,
    tokens: int,
    concurrency: int,
    pairs: int,
) -> list[dict[str, Any]]:
    """``pairs`` times one after the other, the order turned each time, after one unmeasured
    round."""
    time_client(prompts[:concurrency], url, tokens, concurrency)
    rows = []
    for pair in range(pairs):
        both = [
            lambda: time_client(prompts, url, tokens, concurrency),
            lambda: time_vllm_bench(prompts, url, tokens, concurrency, config),
        ]
        for ask in both if pair % 2 == 0 else reversed(both):
            rows.append({"pair": pair, **ask()})
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in rows[-1].items()})
    return rows


def median_ratio(rows: list[dict[str, Any]]) -> float:
    """Median over the pairs of our tokens a second by those of ``vllm bench serve``."""
    speed = {(row["pair"], row["client"]): row["tokens_per_s"] for row in rows}
    pairs = {row["pair"] for row in rows}
    return float(np.median([speed[p, "ours"] / speed[p, "vllm bench serve"] for p in pairs]))
