"""What the template tests share: small chat formats of public models on a tokenizer of bytes."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with full-width bars)

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lib.data.render import render_turns
from eagle3lib.data.template import ChatTemplate

FOLDER = Path(__file__).parent / "templates"
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA31 = [*LLAMA, "<|eom_id|>", "<|python_tag|>"]
CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
DEEPSEEK = [
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
]  # fmt: skip
KIMI = [
    "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
]  # fmt: skip
# Family -> its special tokens, and which of them end a turn.
FAMILIES: dict[str, tuple[list[str], list[str]]] = {
    "llama3": (LLAMA, ["<|eot_id|>"]),
    "llama31": (LLAMA31, ["<|eot_id|>", "<|eom_id|>"]),
    "qwen3": (CHATML, ["<|im_end|>", "<|endoftext|>"]),
    "smollm2": (CHATML, ["<|im_end|>"]),
    "deepseek_v3": (DEEPSEEK, ["<｜end▁of▁sentence｜>"]),
    "deepseek_r1": (DEEPSEEK, ["<｜end▁of▁sentence｜>"]),
    "kimi_k2": (KIMI, ["<|im_end|>"]),
    "kimi_k25": (KIMI, ["<|im_end|>"]),
}


def byte_tokenizer(
    specials: list[str], merges: list[tuple[str, str]] | None = None, *, thinking: bool = True
) -> Any:
    """One token a byte, the special tokens, ``<think>`` and ``</think>``, and a few merges."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    words = sorted(ByteLevel.alphabet()) + [a + b for a, b in merges or []]
    tokenizer = Tokenizer(BPE({w: i for i, w in enumerate(words)}, merges or []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    if thinking:
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    # Like Llama's: plain text gets a first token, which rendered text has already.
    first = (specials[0], tokenizer.token_to_id(specials[0]))
    tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0])


def template_of(family: str, source: str = "", **arguments: Any) -> ChatTemplate:
    """The family's format, or the template ``source`` on the family's tokenizer."""
    specials, stops = FAMILIES[family]
    tokenizer = byte_tokenizer(specials)
    tokenizer.chat_template = source or (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(stops), arguments)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, reasoning: str = "", **more: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": text, **more}
    return said | ({"reasoning_content": reasoning} if reasoning else {})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": f"functions.{name}:0", "function": function}


TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "the weather", "parameters": {}},
    }
]


def trained(template, messages, tools=None):
    """[(prompt text, trained text)] of every turn; fails on a reject."""
    turns, rejects = render_turns(messages, template, tools=tools)
    assert not rejects
    for turn in turns:
        assert template.decode(turn.answer_token_ids) == turn.text
        assert turn.answer_token_ids[-1] in template.stop_ids
        assert turn.exact == (not turn.note)
    return [(template.decode(t.prompt_token_ids), t.text) for t in turns]


def refused(template, messages, tools=None):
    """The reasons why none of the turns was taken."""
    turns, rejects = render_turns(messages, template, tools=tools, where="x.jsonl:3")
    assert not turns
    assert {r.where for r in rejects} == {"x.jsonl:3"}
    return [r.reason for r in rejects]
