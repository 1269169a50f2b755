"""Golden loss masks: which words of a conversation are trained, for the public chat formats."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with full-width bars)

from __future__ import annotations

import pytest
from chat_formats import TOOLS, assistant, call, refused, template_of, trained, user

from eagle3lib.data.render import render_turns

SYSTEM = {"role": "system", "content": "Be brief."}
KIMI_SYSTEM = (
    "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI."
    "<|im_end|>"
)
SMOL_SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)


TWO_TURNS = [SYSTEM, user("Hi"), assistant("Hello!"), user("Why?"), assistant("Because.")]
PLAIN = [
    (
        "llama3", {},
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Hello!<|eot_id|>",
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "Because.<|eot_id|>",
    ),
    (
        "smollm2", {},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
        "Hello!<|im_end|>",
        "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
        "Because.<|im_end|>",
    ),
    (
        "deepseek_v3", {},
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>",
        "Hello!<｜end▁of▁sentence｜>",
        "<｜User｜>Why?<｜Assistant｜>",
        "Because.<｜end▁of▁sentence｜>",
    ),
    (
        "kimi_k2", {},
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "Hello!<|im_end|>",
        "<|im_user|>user<|im_middle|>Why?<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "Because.<|im_end|>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "arguments", "first", "hello", "second", "because"), PLAIN, ids=lambda v: str(v)[:12]
)
def test_each_turn_is_trained_after_all_that_was_said_before(
    family, arguments, first, hello, second, because
):
    rows = trained(template_of(family, **arguments), TWO_TURNS)
    assert rows == [(first, hello), (first + hello + second, because)]


@pytest.mark.parametrize(("family", "system"), [("smollm2", SMOL_SYSTEM), ("kimi_k2", KIMI_SYSTEM)])
def test_a_system_prompt_of_the_templates_own_is_in_the_prompt(family, system):
    ((prompt, text),) = trained(template_of(family), [user("Hi"), assistant("Hello!")])
    assert prompt.startswith(system)
    assert text == "Hello!<|im_end|>"


# Qwen3: the model writes the think block itself, or finds an empty one in its prompt.
QWEN_HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
REASONED = [user("Hi"), assistant("Hello!", "Greet."), user("Why?"), assistant("So.", "Think.")]


def test_qwen3_thinking_is_trained_with_its_markers_and_dropped_from_history():
    rows = trained(template_of("qwen3"), REASONED)
    assert rows == [
        (QWEN_HI, "<think>\nGreet.\n</think>\n\nHello!<|im_end|>"),
        (
            QWEN_HI + "Hello!<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
            "<think>\nThink.\n</think>\n\nSo.<|im_end|>",
        ),
    ]


def test_qwen3_reasoning_inside_the_content_is_the_same_row():
    inline = [user("Hi"), assistant("<think>\nGreet.\n</think>\n\nHello!")]
    assert trained(template_of("qwen3"), inline) == trained(template_of("qwen3"), REASONED[:2])


@pytest.mark.parametrize("arguments", [{"enable_thinking": False}, {"enable_thinking": True}, {}])
def test_qwen3_never_trains_an_empty_think_block(arguments):
    """Thinking on, the template writes the empty block on its own: the row is asked as with
    thinking off."""
    rows = trained(template_of("qwen3", **arguments), [user("Hi"), assistant("Hello!")])
    assert rows == [(QWEN_HI + "<think>\n\n</think>\n\n", "Hello!<|im_end|>")]


def test_a_block_that_moved_into_the_prompt_is_marked():
    (turn,), _ = render_turns([user("Hi"), assistant("Hello!")], template_of("qwen3"))
    assert not turn.exact
    assert "counts as prompt" in turn.note


def test_qwen3_reasoning_with_thinking_switched_off_is_refused():
    reasons = refused(template_of("qwen3", enable_thinking=False), REASONED[:2])
    assert reasons == ["the finished turn does not go on from the generation prompt"]


CALLS = [
    user("Rain?"),
    assistant("", "Ask.", tool_calls=[call("weather", city="Rome")]),
    {"role": "tool", "content": "dry", "tool_call_id": "functions.weather:0"},
    assistant("No.", "Dry."),
]


def test_qwen3_tools_and_the_reasoning_between_them():
    rows = trained(template_of("qwen3"), CALLS, TOOLS)
    called = (
        '<think>\nAsk.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}'
        "\n</tool_call><|im_end|>"
    )
    assert [text for _, text in rows] == [called, "<think>\nDry.\n</think>\n\nNo.<|im_end|>"]
    assert rows[0][0].startswith('<|im_start|>system\n# Tools\n\n<tools>\n{"type": "function", ')
    assert rows[1][0] == rows[0][0] + called + (
        "\n<|im_start|>user\n<tool_response>\ndry\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


KIMI_HI = KIMI_SYSTEM + (
    "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
    "<|im_end|>"
)


def test_kimi_k2_tools():
    first, second = trained(template_of("kimi_k2"), CALLS_WITHOUT_REASONING, TOOLS)
    assert first[0].startswith("<|im_system|>tool_declare<|im_middle|>[{")
    assert first[1] == KIMI_CALL
    assert second == (
        first[0] + KIMI_CALL + "<|im_system|>tool<|im_middle|>## Return of functions.weather:0\ndry"
        "<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "No.<|im_end|>",
    )


CALLS_WITHOUT_REASONING = [
    {k: v for k, v in message.items() if k != "reasoning_content"} for message in CALLS
]


def test_kimi_k25_an_opened_think_tag_belongs_to_the_prompt():
    rows = trained(template_of("kimi_k25"), [user("Hi"), assistant("Greet.</think>Hello!")])
    assert rows == [(KIMI_HI + "<think>", "Greet.</think>Hello!<|im_end|>")]


@pytest.mark.parametrize("arguments", [{}, {"thinking": False}])
def test_kimi_k25_never_trains_an_empty_think_block(arguments):
    rows = trained(template_of("kimi_k25", **arguments), [user("Hi"), assistant("Hello!")])
    assert rows == [(KIMI_HI + "<think></think>", "Hello!<|im_end|>")]


def test_kimi_k25_reasoning_with_thinking_switched_off_is_refused():
    template = template_of("kimi_k25", thinking=False)
    reasons = refused(template, [user("Hi"), assistant("Greet.</think>Hello!")])
    assert reasons == ["the turn reasons, its prompt has thinking switched off"]


def test_kimi_k25_reasoning_that_the_template_drops_is_refused_not_lost():
    """slime#330: reasoning was missing from the trained tokens and nobody was told."""
    reasons = refused(template_of("kimi_k25"), [user("Hi"), assistant("Hello!", "Greet.")])
    assert reasons == ["the template drops the turn's reasoning"]


def test_kimi_k25_keeps_reasoning_while_tools_are_called_and_rewrites_it_afterwards():
    turns, rejects = render_turns(CALLS, template_of("kimi_k25"), tools=TOOLS)
    assert [t.text for t in turns] == ["Ask.</think>" + KIMI_CALL]
    assert [r.reason for r in rejects] == ["the template rewrites history"]


R1_HI = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>"


@pytest.mark.parametrize("opening", ["<think>\n", "", "<think>"])
def test_deepseek_r1_goes_on_from_the_prompts_think_tag(opening):
    """The template takes the reasoning out of every finished turn; the row's text has it."""
    said = f"{opening}Greet.\n</think>\n\nHello!"
    (turn,), _ = render_turns([user("Hi"), assistant(said)], template_of("deepseek_r1"))
    assert turn.text == "Greet.\n</think>\n\nHello!<｜end▁of▁sentence｜>"
    assert not turn.exact
    assert "takes the reasoning out" in turn.note


def test_deepseek_r1_history_is_without_reasoning():
    said = [
        user("Hi"),
        assistant("A.\n</think>\n\nHello!"),
        user("Why?"),
        assistant("B.</think>So"),
    ]
    rows = trained(template_of("deepseek_r1"), said)
    assert rows[1] == (
        R1_HI + "\n\nHello!<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>\n",
        "B.</think>So<｜end▁of▁sentence｜>",
    )


def test_deepseek_r1_turns_that_show_no_reasoning_are_refused():
    template = template_of("deepseek_r1")
    reason = "the finished turn does not go on from the generation prompt"
    assert refused(template, [user("Hi"), assistant("Hello!")]) == [reason]
    assert refused(template, [user("Hi"), assistant("Hello!", "Greet.")]) == [reason]


def test_deepseek_v3_calls_and_the_answer_after_their_results():
    both = [call("weather", city="Rome"), call("weather", city="Oslo")]
    dry = {"role": "tool", "content": "dry"}
    said = [user("Rain?"), assistant(None, tool_calls=both), dry, dry, assistant("No.")]
    rows = trained(template_of("deepseek_v3"), said)
    one = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "%s"}\n```'
    assert rows[0][1] == (
        "<｜tool▁calls▁begin｜>" + one % "Rome" + "<｜tool▁call▁end｜>\n" + one % "Oslo"
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    )  # fmt: skip
    assert rows[1][0].endswith("dry<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")
    assert rows[1][1] == "No.<｜end▁of▁sentence｜>"


def test_deepseek_v3_never_closes_a_single_call():
    said = [user("Rain?"), assistant(None, tool_calls=[call("weather", city="Rome")])]
    assert refused(template_of("deepseek_v3"), said) == ["no stop token after the answer"]


def test_kimi_k25_calls_after_inline_reasoning_are_not_lost():
    said = assistant("Ask.</think>Look.", tool_calls=[call("weather", city="Rome")])
    reasons = refused(template_of("kimi_k25"), [user("Rain?"), said], TOOLS)
    assert reasons == ["the template writes text before the answer"]
