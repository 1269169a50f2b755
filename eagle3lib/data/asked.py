"""What a row asked, as the server that answered it gave it to the target's template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle3lib.data.template import ChatTemplate, Message, as_servers_read, thinking_arguments


def as_asked(
    messages: list[Message], sampling: Any, template: ChatTemplate
) -> tuple[ChatTemplate, list[Message]]:
    """The template with the row's own thinking switch, and the messages without an answer at the
    end, the arguments of their calls as objects."""
    if messages and messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    switch = sampling.get("thinking") if isinstance(sampling, dict) else None
    own = thinking_arguments({"on": True, "off": False}.get(switch))
    return replace(template, arguments=own | template.arguments), as_servers_read(messages)
