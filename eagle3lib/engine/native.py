"""SGLang's own generate API: prompt ids go in, answer ids come out.

Its chat API tells no token ids, so prompts are rendered by the target's own template on this side
and sent as ids: the server sees exactly those. Facts (SGLang 0.5, ``/generate``)::

    request   input_ids, sampling_params {max_new_tokens, temperature, sampling_seed,
                                           skip_special_tokens}
    reply     text       without the stop token; other special tokens stay if they are not skipped
              output_ids with the stop token
              meta_info  {prompt_tokens, completion_tokens, finish_reason: {type: stop | length |
                          abort, matched: ...}, spec_verify_ct, ...}

``sampling_seed`` counts only where the server runs with ``--enable-deterministic-inference``. Calls
of tools stay in the text as the target wrote them. The record of rounds there is counts and a
histogram, not an account round by round: ``Answer.counts`` has them, ``Answer.rounds`` is None.
"""

from __future__ import annotations

from typing import Any

import openai

_INFO_PAGES = ("/model_info", "/get_model_info")  # the older name goes away some day
_SERVER_PAGES = ("/server_info", "/get_server_info")
_THINK, _END_THINK = "<think>", "</think>"


def is_sglang(client: openai.OpenAI, url: str) -> bool:
    """Whether SGLang answers at ``url``, by a page that it alone has.

    Raises ``openai.OpenAIError`` when the server can't be asked: then nobody knows.
    """
    told = _first_page(client, url, _INFO_PAGES)
    return "model_path" in told and "is_generation" in told


def sglang_version(client: openai.OpenAI, url: str) -> str:
    """``sglang 0.5.6``, or "" where the server is another or does not tell."""
    try:
        told = _first_page(client, url, _SERVER_PAGES)
    except openai.OpenAIError:  # the version is a courtesy
        return ""
    version = told.get("version")
    return f"sglang {version}" if version and "model_path" in told else ""


def _first_page(client: openai.OpenAI, url: str, pages: tuple[str, ...]) -> dict[str, Any]:
    for page in pages:
        try:
            told = client.get(f"{url}{page}", cast_to=object)
        except (openai.RateLimitError, openai.InternalServerError, openai.APIConnectionError):
            raise
        except (openai.APIStatusError, ValueError):  # 404, or no JSON: the page is another's
            continue
        if isinstance(told, dict):
            return told
    return {}


def request_body(
    prompt_ids: list[int],
    *,
    max_tokens: int,
    temperature: float,
    seed: int | None,
) -> dict[str, Any]:
    """Body of a request. Unlike a chat API, this one takes nothing out of the target's
    ``generation_config.json``: the sampling is what is asked for, as with our own vLLM."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": temperature,
        # Where the end of reasoning is a special token, the text would lose it.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if seed is not None:
        sampling["sampling_seed"] = seed
    return {"input_ids": prompt_ids, "sampling_params": sampling, "stream": False}


def reasoning_apart(prompt: str, text: str) -> tuple[str, str | None]:
    """(text, reasoning) of an answer whose prompt opens the reasoning and that never closes it.

    Such an answer carries no marker at all. Everything else is left to who reads the text.
    """
    if prompt.rstrip().endswith(_THINK) and _END_THINK not in text:
        return "", text
    return text, None


def finish_of(meta: dict[str, Any]) -> str:
    """``stop``, ``length`` or ``abort``; "" when nothing is told."""
    told = meta.get("finish_reason")
    kind = told.get("type") if isinstance(told, dict) else told
    return kind if isinstance(kind, str) else ""


def record_of(meta: dict[str, Any]) -> dict[str, Any] | None:
    """What ``meta_info`` says of speculation, None when the server did not speculate."""
    told = {name: value for name, value in meta.items() if name.startswith("spec_")}
    kept = told | {"completion_tokens": meta.get("completion_tokens")}
    return kept if told.get("spec_verify_ct") else None
