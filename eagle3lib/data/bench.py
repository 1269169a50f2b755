"""How fast our client drives a server, beside ``vllm bench serve`` on the same server.

Both ask the same prompts at the same concurrency, in turns, and are timed from the first request to
the last answer. The measure is answer tokens a second; the ratio of each pair is what counts, since
the machine drifts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.prompts import Prompt
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.client import Client
from eagle3lib.engine.vllm import SERVED_NAME, EngineConfig, engine_env
from eagle3lib.lab.errors import UserError

_DEADLINE_S = 1800


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [json.dumps({"prompt": p.messages[-1]["content"]}) for p in prompts]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        command += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        command += ["--base-url", url, "--model", SERVED_NAME, "--tokenizer", str(config.target)]
        command += ["--dataset-name", "custom", "--dataset-path", str(folder / "prompts.jsonl")]
        command += ["--num-prompts", str(len(prompts)), "--max-concurrency", str(concurrency)]
        command += ["--custom-output-len", str(tokens), "--temperature", "0", "--disable-shuffle"]
        command += ["--save-result", "--result-dir", name, "--result-filename", "result.json"]
        env = {**os.environ, **engine_env(1, config)}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
        if done.returncode or not (folder / "result.json").exists():
            raise UserError(f"vllm bench serve failed:\n{done.stderr[-1500:]}")
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if result["completed"] != len(prompts):
        raise UserError(f"vllm bench serve completed {result['completed']} of {len(prompts)}")
    made, seconds = result["total_output_tokens"], result["duration"]
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
