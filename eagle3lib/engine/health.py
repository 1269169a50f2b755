"""Is a server well? It answers /health, makes tokens for a canary, and gets on under load."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from eagle3lib.engine.access import KeyRefused, open_url
from eagle3lib.lab.finding import Finding

CANARY_S = 120.0
_TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


def healthy(url: str, timeout_s: float = 2.0) -> bool:
    """Whether /health says 200. That is not yet a server that makes tokens."""
    try:
        with open_url(f"{url}/health", timeout_s) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException, KeyRefused):
        return False


def canary(url: str, model: str, api_key: str = "", timeout_s: float = CANARY_S) -> str:
    """Ask for four tokens; "" when they came, else what came instead.

    vLLM's /health asks its engine process whether it lives, not whether its kernels return.
    """
    asked = {"model": model, "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    try:
        with open_url(f"{url}/v1/completions", timeout_s, asked, api_key) as answer:
            told = json.load(answer)
        made = int(told["usage"]["completion_tokens"])
    except KeyRefused as error:
        return error.found
    except TimeoutError:
        return f"no token in {timeout_s:.0f} s"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}: {error.read(300).decode('utf-8', errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        late = isinstance(getattr(error, "reason", None), TimeoutError)
        return f"no token in {timeout_s:.0f} s" if late else f"no answer: {error}"
    except (ValueError, KeyError, TypeError) as error:
        return f"not a completion: {error!r}"
    return "" if made > 0 else "an answer without tokens"


def check_serving(
    url: str, model: str, api_key: str = "", timeout_s: float = CANARY_S
) -> list[Finding]:
    """Health and the canary of a running server, ours or a stranger's."""
    if not healthy(url):
        return [
            Finding(
                "server_unreachable",
                "error",
                "the server does not answer /health",
                remedy="eagle3 ps shows what runs; read the server's log",
                where=url,
            )
        ]
    told = canary(url, model, api_key, timeout_s)
    if not told:
        return []
    return [
        Finding(
            "server_mute",
            "error",
            "the server answers /health and makes no tokens",
            evidence=told,
            remedy="a rank hangs: read its stacks, stop it, start it with --fallback",
            where=url,
        )
    ]


@dataclass
class LoadWatch:
    """Progress under load, from the server's own counters: requests that run must make tokens."""

    url: str
    stall_s: float
    _tokens: float = field(init=False, default=-1.0)
    _moved: float = field(init=False, default_factory=time.monotonic)

    def check(self) -> list[Finding]:
        """[] when tokens grew, nothing runs, or the server has no counters to ask."""
        told = counters(self.url)
        now = time.monotonic()
        if told is None or told["tokens"] != self._tokens or not told["running"]:
            self._tokens = told["tokens"] if told else self._tokens
            self._moved = now
            return []
        if now - self._moved < self.stall_s:
            return []
        return [
            Finding(
                "server_stalled",
                "error",
                f"{told['running']:.0f} requests run and no token was made",
                evidence=f"{self._tokens:.0f} tokens for {now - self._moved:.0f} s",
                remedy="a rank hangs: read its stacks, stop it, start it with --fallback",
                where=self.url,
            )
        ]


def counters(url: str) -> dict[str, float] | None:
    """``tokens`` made so far and requests ``running``, summed over engines; None: not told."""
    try:
        with open_url(f"{url}/metrics", 10.0) as answer:
            text = answer.read().decode("utf-8", errors="replace")
        samples = [s for f in text_string_to_metric_families(text) for s in f.samples]
    except (OSError, http.client.HTTPException, ValueError, KeyRefused):
        return None
    if not any(s.name in _TOKENS for s in samples):
        return None
    return {
        "tokens": sum(s.value for s in samples if s.name in _TOKENS),
        "running": sum(s.value for s in samples if s.name in _RUNNING),
    }
