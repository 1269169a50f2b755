"""What a row asked, as the server that answered it gave it to the target's template."""

from __future__ import annotations

import contextlib
import copy
import json
from dataclasses import replace
from typing import Any

from eagle3lib.data.template import ChatTemplate, Message


def as_asked(
    messages: list[Message], sampling: Any, template: ChatTemplate
) -> tuple[ChatTemplate, list[Message]]:
    """Template and messages as the server that answered had them: the row's own thinking switch,
    without an answer at the end, and the arguments of calls, in requests a JSON string, as the
    object that vLLM hands to the template."""
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    switch = sampling.get("thinking") if isinstance(sampling, dict) else None
    own = thinking_arguments({"on": True, "off": False}.get(switch))
    return replace(template, arguments=own | template.arguments), _with_objects(messages)


def thinking_arguments(thinking: bool | None) -> dict[str, Any]:
    """Qwen3 reads ``enable_thinking``, DeepSeek-V3.1 and Kimi-K2.5 ``thinking``; templates leave
    unknown names alone."""
    return {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}


def _with_objects(messages: list[Message]) -> list[Message]:
    read = copy.deepcopy(messages)
    for call in [c for m in read for c in m.get("tool_calls") or [] if isinstance(c, dict)]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(json.JSONDecodeError):
                function["arguments"] = json.loads(function["arguments"])
    return read
