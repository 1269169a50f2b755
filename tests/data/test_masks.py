"""Golden loss masks token by token, for every written-down chat format.

Written by hand: tokens are parted by spaces, ``⏎`` is a newline and ``␣`` a space. What stands in
``asked`` must have mask 0, what stands in ``trained`` mask 1. The tokenizer knows the words of
its case alone, so that any other rendering shows as an unknown token.
"""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with full-width bars)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_formats import FAMILIES, FOLDER, TOOLS, assistant, call, user

from eagle3lib.data.render import render_turns
from eagle3lib.data.template import ChatTemplate

SYSTEM = {"role": "system", "content": "Be brief."}
DRY = {"role": "tool", "content": "dry", "tool_call_id": "functions.weather:0"}
TWO_TURNS = [SYSTEM, user("Hi"), assistant("Hello!"), user("Why?"), assistant("So.")]
REASONED = [user("Hi"), assistant("Hello!", "Greet."), user("Why?"), assistant("So.", "Think.")]
RAIN = call("weather", city="Rome")
ASKED_TOOL = [user("Rain?"), assistant("", tool_calls=[RAIN]), DRY, assistant("No.")]


@dataclass(frozen=True)
class Golden:
    """The last row of a conversation; ``asked`` and ``trained`` as the module's docstring says."""

    family: str
    messages: list[dict[str, Any]]
    asked: str
    trained: str
    tools: list[Any] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


def tokens_of(written):
    return [token.replace("⏎", "\n").replace("␣", " ") for token in written.split()]


def word_template(case: Golden) -> ChatTemplate:
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    specials, stops = FAMILIES[case.family]
    known = dict.fromkeys(["<unk>", *tokens_of(case.asked), *tokens_of(case.trained)])
    words = {word: i for i, word in enumerate(known)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"\w+|\s|[^\w\s]"), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=specials[0])
    fast.chat_template = (FOLDER / f"{case.family}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(fast, fast.convert_tokens_to_ids(stops), case.arguments)


LLAMA_USER = "<|start_header_id|> user <|end_header_id|> ⏎ ⏎"
LLAMA_ASSISTANT = "<|start_header_id|> assistant <|end_header_id|> ⏎ ⏎"
LLAMA31_SYSTEM = (
    "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎ ⏎ {} Cutting ␣ Knowledge ␣ "
    "Date : ␣ December ␣ 2023 ⏎ Today ␣ Date : ␣ 26 ␣ Jul ␣ 2024 ⏎ ⏎ {} <|eot_id|> "
)
IPYTHON = "Environment : ␣ ipython ⏎"
WEATHER = (
    "{ ⏎ ␣ ␣ ␣ ␣ \" type \" : ␣ \" function \" , ⏎ ␣ ␣ ␣ ␣ \" function \" : ␣ { ⏎ "
    "␣ ␣ ␣ ␣ ␣ ␣ ␣ ␣ \" name \" : ␣ \" weather \" , ⏎ "
    "␣ ␣ ␣ ␣ ␣ ␣ ␣ ␣ \" description \" : ␣ \" the ␣ weather \" , ⏎ "
    "␣ ␣ ␣ ␣ ␣ ␣ ␣ ␣ \" parameters \" : ␣ { } ⏎ ␣ ␣ ␣ ␣ } ⏎ } ⏎ ⏎"
)  # fmt: skip
LLAMA31_ASKED = (
    LLAMA31_SYSTEM.format(IPYTHON, "")
    + f"{LLAMA_USER} Given ␣ the ␣ following ␣ functions , ␣ please ␣ respond ␣ with ␣ a ␣ JSON ␣ "
    f"for ␣ a ␣ function ␣ call . ⏎ ⏎ {WEATHER} Rain ? <|eot_id|> {LLAMA_ASSISTANT}"
)
LLAMA31_CALL = '{ " name " : ␣ " weather " , ␣ " parameters " : ␣ { " city " : ␣ " Rome " } } '
LLAMA31_DRY = '<|start_header_id|> ipython <|end_header_id|> ⏎ ⏎ " dry " <|eot_id|> '
SEARCH = [user("Rain?"), assistant("", tool_calls=[call("brave_search", query="Rome")])]
SEARCH_ASKED = (
    LLAMA31_SYSTEM.format(f"{IPYTHON} Tools : ␣ brave_search ⏎ ⏎", "")
    + f"{LLAMA_USER} Rain ? <|eot_id|> {LLAMA_ASSISTANT}"
)
SEARCH_CALL = '<|python_tag|> brave_search . call ( query = " Rome " ) <|eom_id|>'
BUILTIN = {"builtin_tools": ["brave_search", "code_interpreter"]}

QWEN_HI = "<|im_start|> user ⏎ Hi <|im_end|> ⏎ <|im_start|> assistant ⏎ "
QWEN_WHY = "<|im_end|> ⏎ <|im_start|> user ⏎ Why ? <|im_end|> ⏎ <|im_start|> assistant ⏎ "
QWEN_RAIN = (
    "<|im_start|> system ⏎ # ␣ Tools ⏎ ⏎ < tools > ⏎ "
    '{ " type " : ␣ " function " , ␣ " function " : ␣ { " name " : ␣ " weather " , ␣ '
    '" description " : ␣ " the ␣ weather " , ␣ " parameters " : ␣ { } } } ⏎ < / tools > <|im_end|> '
    "⏎ <|im_start|> user ⏎ Rain ? <|im_end|> ⏎ <|im_start|> assistant ⏎ "
)
QWEN_CALL = (
    '< tool_call > ⏎ { " name " : ␣ " weather " , ␣ " arguments " : ␣ { " city " : ␣ " Rome " } } '
    "⏎ < / tool_call > <|im_end|> "
)
QWEN_DRY = (
    "⏎ <|im_start|> user ⏎ < tool_response > ⏎ dry ⏎ < / tool_response > <|im_end|> ⏎ "
    "<|im_start|> assistant ⏎ "
)

KIMI_SYSTEM = (
    "<|im_system|> system <|im_middle|> You ␣ are ␣ Kimi , ␣ an ␣ AI ␣ assistant ␣ created ␣ by ␣ "
    "Moonshot ␣ AI . <|im_end|> "
)
KIMI_ASSISTANT = "<|im_assistant|> assistant <|im_middle|> "
KIMI_TOOLS = (
    '<|im_system|> tool_declare <|im_middle|> [ { " type " : ␣ " function " , ␣ " function " : ␣ '
    '{ " name " : ␣ " weather " , ␣ " description " : ␣ " the ␣ weather " , ␣ " parameters " : ␣ '
    "{ } } } ] <|im_end|> "
)
KIMI_RAIN = f"<|im_user|> user <|im_middle|> Rain ? <|im_end|> {KIMI_ASSISTANT}"
K2_RAIN, K25_RAIN = (f"{KIMI_TOOLS} {KIMI_SYSTEM} {end} {KIMI_RAIN}" for end in ("⏎", ""))
KIMI_CALL = (
    "<|tool_calls_section_begin|> <|tool_call_begin|> functions . weather : 0 "
    '<|tool_call_argument_begin|> { " city " : ␣ " Rome " } <|tool_call_end|> '
    "<|tool_calls_section_end|> <|im_end|> "
)
KIMI_DRY = (
    "<|im_system|> tool <|im_middle|> # # ␣ Return ␣ of ␣ functions . weather : 0 ⏎ dry <|im_end|> "
)

ONE_CALL = (
    "<｜tool▁call▁begin｜> function <｜tool▁sep｜> weather ⏎ ` ` ` json ⏎ "
    '{ " city " : ␣ " Rome " } ⏎ ` ` ` <｜tool▁call▁end｜> '
)
R1_WHY = [
    user("Hi"), assistant("Greet.\n</think>\n\nHello!"), user("Why?"),
    assistant("<think>\nThink.\n</think>\n\nSo."),
]  # fmt: skip

GOLDEN = {
    "Llama-3, two turns": Golden(
        "llama3", TWO_TURNS,
        "<|begin_of_text|> <|start_header_id|> system <|end_header_id|> ⏎ ⏎ Be ␣ brief . "
        f"<|eot_id|> {LLAMA_USER} Hi <|eot_id|> {LLAMA_ASSISTANT} Hello ! <|eot_id|> "
        f"{LLAMA_USER} Why ? <|eot_id|> {LLAMA_ASSISTANT}",
        "So . <|eot_id|>",
    ),
    "Llama-3.1, two turns": Golden(
        "llama31", TWO_TURNS,
        LLAMA31_SYSTEM.format("", "Be ␣ brief .")
        + f"{LLAMA_USER} Hi <|eot_id|> {LLAMA_ASSISTANT} Hello ! <|eot_id|> "
        f"{LLAMA_USER} Why ? <|eot_id|> {LLAMA_ASSISTANT}",
        "So . <|eot_id|>",
    ),
    "Llama-3.1, a call ends with eot": Golden(
        "llama31", ASKED_TOOL[:2], LLAMA31_ASKED, f"{LLAMA31_CALL} <|eot_id|>", TOOLS,
    ),
    "Llama-3.1, the answer after a tool": Golden(
        "llama31", ASKED_TOOL,
        f"{LLAMA31_ASKED} {LLAMA31_CALL} <|eot_id|> {LLAMA31_DRY} {LLAMA_ASSISTANT}",
        "No . <|eot_id|>", TOOLS,
    ),
    "Llama-3.1, a built-in call ends with eom": Golden(
        "llama31", SEARCH, SEARCH_ASKED, SEARCH_CALL, None, BUILTIN,
    ),
    "Llama-3.1, the answer after a built-in call ends with eot": Golden(
        "llama31", [*SEARCH, DRY, assistant("No.")],
        f"{SEARCH_ASKED} {SEARCH_CALL} {LLAMA31_DRY} {LLAMA_ASSISTANT}",
        "No . <|eot_id|>", None, BUILTIN,
    ),
    "Qwen3, reasoning gone from history": Golden(
        "qwen3", REASONED, f"{QWEN_HI} Hello ! {QWEN_WHY}",
        "<think> ⏎ Think . ⏎ </think> ⏎ ⏎ So . <|im_end|>",
    ),
    "Qwen3, thinking off": Golden(
        "qwen3", [user("Hi"), assistant("Hello!")], f"{QWEN_HI} <think> ⏎ ⏎ </think> ⏎ ⏎",
        "Hello ! <|im_end|>", None, {"enable_thinking": False},
    ),
    "Qwen3, the call after reasoning": Golden(
        "qwen3", [user("Rain?"), assistant("", "Ask.", tool_calls=[RAIN])], QWEN_RAIN,
        f"<think> ⏎ Ask . ⏎ </think> ⏎ ⏎ {QWEN_CALL}", TOOLS,
    ),
    "Qwen3, the answer after a tool, reasoning kept": Golden(
        "qwen3",
        [user("Rain?"), assistant("", "Ask.", tool_calls=[RAIN]), DRY, assistant("No.", "Dry.")],
        f"{QWEN_RAIN} <think> ⏎ Ask . ⏎ </think> ⏎ ⏎ {QWEN_CALL} {QWEN_DRY}",
        "<think> ⏎ Dry . ⏎ </think> ⏎ ⏎ No . <|im_end|>", TOOLS,
    ),
    "SmolLM2, its own system prompt": Golden(
        "smollm2", [user("Hi"), assistant("Hello!"), user("Why?"), assistant("So.")],
        "<|im_start|> system ⏎ You ␣ are ␣ a ␣ helpful ␣ AI ␣ assistant ␣ named ␣ SmolLM , ␣ "
        f"trained ␣ by ␣ Hugging ␣ Face <|im_end|> ⏎ {QWEN_HI} Hello ! {QWEN_WHY}",
        "So . <|im_end|>",
    ),
    "DeepSeek-V3, two turns": Golden(
        "deepseek_v3", TWO_TURNS,
        "<｜begin▁of▁sentence｜> Be ␣ brief . <｜User｜> Hi <｜Assistant｜> Hello ! "
        "<｜end▁of▁sentence｜> <｜User｜> Why ? <｜Assistant｜>",
        "So . <｜end▁of▁sentence｜>",
    ),
    "DeepSeek-V3, two calls": Golden(
        "deepseek_v3", [user("Rain?"), assistant(None, tool_calls=[RAIN, RAIN])],
        "<｜begin▁of▁sentence｜> <｜User｜> Rain ? <｜Assistant｜>",
        f"<｜tool▁calls▁begin｜> {ONE_CALL} ⏎ {ONE_CALL} <｜tool▁calls▁end｜> "
        "<｜end▁of▁sentence｜>",
    ),
    "DeepSeek-R1, the prompt opens the reasoning, history has none": Golden(
        "deepseek_r1", R1_WHY,
        "<｜begin▁of▁sentence｜> <｜User｜> Hi <｜Assistant｜> ⏎ ⏎ Hello ! <｜end▁of▁sentence｜> "
        "<｜User｜> Why ? <｜Assistant｜> <think> ⏎",
        "Think . ⏎ </think> ⏎ ⏎ So . <｜end▁of▁sentence｜>",
    ),
    "Kimi-K2, the call": Golden(
        "kimi_k2", ASKED_TOOL[:2], K2_RAIN, KIMI_CALL, TOOLS,
    ),
    "Kimi-K2, the answer after a tool": Golden(
        "kimi_k2", ASKED_TOOL,
        f"{K2_RAIN} {KIMI_CALL} {KIMI_DRY} {KIMI_ASSISTANT}", "No . <|im_end|>",
        TOOLS,
    ),
    "Kimi-K2.5, the prompt opens the reasoning": Golden(
        "kimi_k25", [user("Hi"), assistant("Greet.</think>Hello!")],
        f"{KIMI_SYSTEM} <|im_user|> user <|im_middle|> Hi <|im_end|> {KIMI_ASSISTANT} <think>",
        "Greet . </think> Hello ! <|im_end|>",
    ),
    "Kimi-K2.5, thinking off": Golden(
        "kimi_k25", [user("Hi"), assistant("Hello!")],
        f"{KIMI_SYSTEM} <|im_user|> user <|im_middle|> Hi <|im_end|> {KIMI_ASSISTANT} "
        "<think> </think>",
        "Hello ! <|im_end|>", None, {"thinking": False},
    ),
    "Kimi-K2.5, the call after reasoning": Golden(
        "kimi_k25", [user("Rain?"), assistant("", "Ask.", tool_calls=[RAIN])],
        f"{K25_RAIN} <think>", f"Ask . </think> {KIMI_CALL}", TOOLS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_the_mask_is_the_one_written_down_token_by_token(name):
    case = GOLDEN[name]
    template = word_template(case)
    turns, _ = render_turns(case.messages, template, tools=case.tools)
    row = turns[-1]
    assert row.turn == len(case.messages) - 1
    ids = row.prompt_token_ids + row.answer_token_ids
    mask = [0] * len(row.prompt_token_ids) + [1] * len(row.answer_token_ids)
    asked, trained = tokens_of(case.asked), tokens_of(case.trained)
    words = [template.decode([token]) for token in ids]
    assert list(zip(words, mask, strict=True)) == (
        [(word, 0) for word in asked] + [(word, 1) for word in trained]
    )


def test_every_format_that_is_written_down_has_a_golden_mask():
    assert {case.family for case in GOLDEN.values()} == set(FAMILIES)
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FAMILIES)


def test_llama31_takes_one_call_a_turn():
    case = GOLDEN["Llama-3.1, a call ends with eot"]
    two = [user("Rain?"), assistant("", tool_calls=[RAIN, RAIN])]
    turns, rejects = render_turns(two, word_template(case), tools=TOOLS)
    assert not turns
    assert [r.reason for r in rejects] == ["the template does not take the row"]
    assert "single tool-calls" in rejects[0].detail
