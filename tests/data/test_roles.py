"""Tokens by role: every token of a row counts once, for whose words it is."""

from __future__ import annotations

from collections import Counter

import pytest
from chat_formats import FAMILIES, TOOLS, assistant, byte_tokenizer, call, template_of, user

from eagle3lib.data.asked import as_asked
from eagle3lib.data.render import render_turns
from eagle3lib.data.roles import (
    ROLES,
    SCAFFOLDING,
    UNKNOWN,
    answer_roles,
    prompt_roles,
    tokens_by_role,
)
from eagle3lib.data.rows import AnswerRow
from eagle3lib.data.template import ChatTemplate

SYSTEM = {"role": "system", "content": "Be brief."}
DRY = {"role": "tool", "content": "dry 🙂", "tool_call_id": "functions.weather:0"}
TWO_TURNS = [SYSTEM, user("Hi there"), assistant("Hello! 🙂"), user("Why? é")]
WORDS = {"system": "Be brief.", "user": "Hi thereWhy? é", "assistant": "Hello! 🙂"}


def row_of(template, messages, answer="Because.", **more):
    """A row as served: the prompt's ids are the template's own."""
    row = {
        "id": "0", "set": "workload", "split": "train", "messages": messages, "text": answer,
        "prompt_token_ids": [], "answer_token_ids": template.ids(answer), "finish_reason": "stop",
    } | more  # fmt: skip
    asked, said = as_asked(messages, row.get("sampling"), template)
    text = asked.render(said, prompt=True, tools=row.get("tools"))
    return AnswerRow(**({**row, "prompt_token_ids": asked.ids(text)}))


def length(row):
    return len(row.prompt_token_ids) + len(row.answer_token_ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_has_one_role_and_words_are_whole(family):
    """On a tokenizer of bytes the tokens of a role are the bytes of its words, in every format."""
    template = template_of(family)
    row = row_of(template, TWO_TURNS)
    counts = prompt_roles(row, template)
    assert counts.total() == len(row.prompt_token_ids)
    assert counts == Counter(
        {role: len(words.encode()) for role, words in WORDS.items()}
        | {SCAFFOLDING: len(row.prompt_token_ids) - sum(len(w.encode()) for w in WORDS.values())}
    )
    (total,) = tokens_by_role([row], template).values()
    assert total.total() == length(row)
    assert set(total) <= set(ROLES)


class SlowTokenizer:
    """As Kimi's: it says nothing of places, and has no ``is_fast``."""

    def __init__(self, fast):
        self._fast = fast
        self.apply_chat_template, self.decode = fast.apply_chat_template, fast.decode

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_that_tells_no_places_gives_the_same_roles(family):
    template = template_of(family)
    slow = ChatTemplate(SlowTokenizer(template.tokenizer), template.stop_ids)
    row = row_of(template, TWO_TURNS)
    assert prompt_roles(row, slow) == prompt_roles(row, template)


# A call, from the first to the last character that depends on what the message says.
CALLED = {
    "llama31": 'weather", "parameters": {"city": "Rome',
    "qwen3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Rome',
}


@pytest.mark.parametrize("family", CALLED)
def test_calls_are_the_assistants_and_results_the_tools(family):
    said = [user("Rain?"), assistant("", tool_calls=[call("weather", city="Rome")]), DRY]
    template = template_of(family)
    row = row_of(template, said, tools=TOOLS)
    counts = prompt_roles(row, template)
    assert counts.total() == len(row.prompt_token_ids)
    assert (counts["user"], counts["tool"]) == (len("Rain?"), len("dry 🙂".encode()))
    assert counts["assistant"] == len(template.ids(CALLED[family]))


def test_the_descriptions_of_tools_are_scaffolding():
    template = template_of("qwen3")
    plain, offered = (row_of(template, [SYSTEM, user("Hi")], tools=t) for t in ([], TOOLS))
    more = len(offered.prompt_token_ids) - len(plain.prompt_token_ids)
    before, after = (prompt_roles(row, template) for row in (plain, offered))
    assert more > 0
    assert after == before + Counter({SCAFFOLDING: more})


def test_words_that_the_template_changes_are_still_the_messages():
    """The template trims, doubles, moves: no search for the words would find them."""
    source = (
        "{%- for m in messages -%}{%- if m.role == 'system' -%}{{- m.content | upper -}}"
        "{%- endif -%}{%- endfor -%}{%- for m in messages -%}{%- if m.role != 'system' -%}"
        "{{- '<|im_start|>' + m.content | trim + '!' -}}{%- endif -%}{%- endfor -%}"
    )
    template = template_of("qwen3", source)
    row = row_of(template, [SYSTEM, user("  Hi  ")])
    assert prompt_roles(row, template) == {"system": 9, "user": 2, SCAFFOLDING: 2}


def test_a_message_that_repeats_the_scaffolding_keeps_its_own_tokens_alone():
    template = template_of("qwen3")
    row = row_of(template, [user("user\nuser\n"), assistant("\n"), user("assistant")])
    counts = prompt_roles(row, template)
    assert (counts["user"], counts["assistant"]) == (len("user\nuser\nassistant"), 1)


def test_an_empty_result_of_a_tool_has_no_tokens():
    template = template_of("qwen3")
    said = [user("Rain?"), assistant("", tool_calls=[call("weather")]), DRY | {"content": ""}]
    assert prompt_roles(row_of(template, said), template)["tool"] == 0


def test_the_rows_own_thinking_switch_is_used():
    template = template_of("qwen3")
    row = row_of(template, [user("Hi")], sampling={"thinking": "off"})
    assert prompt_roles(row, template)["user"] == 2
    other = row_of(template, [user("Hi")])
    assert len(row.prompt_token_ids) > len(other.prompt_token_ids)


def test_a_think_block_beyond_the_generation_prompt_is_scaffolding():
    """Rows of text whose turn has no reasoning carry it in their prompt (``data/render.py``)."""
    template = template_of("qwen3")
    (turn,), _ = render_turns([user("Hi"), assistant("Hello!")], template)
    row = AnswerRow("0", "workload", "train", [user("Hi")], turn.prompt_token_ids,
                    turn.answer_token_ids, "Hello!", "stop", token_ids_from="given")  # fmt: skip
    scaffolding = len(turn.prompt_token_ids) - 2
    assert prompt_roles(row, template) == {"user": 2, SCAFFOLDING: scaffolding}


def test_a_prompt_that_the_template_does_not_give_is_counted_as_unknown():
    template = template_of("qwen3")
    row = row_of(template, [user("Hi")])
    doubled = AnswerRow(
        **{**row.__dict__, "prompt_token_ids": [row.prompt_token_ids[0], *row.prompt_token_ids]}
    )
    refused = AnswerRow(**{**row.__dict__, "messages": [user(None)]})
    for bad, known in ((doubled, template), (refused, template), (row, None)):
        assert prompt_roles(bad, known) == {UNKNOWN: len(bad.prompt_token_ids)}
        (total,) = tokens_by_role([bad], known).values()
        assert total.total() == length(bad)


@pytest.mark.parametrize(
    ("answer", "reasoning", "kind", "tokens"),
    [
        ("Because.", "", "missing", 0),
        ("A.\n</think>\n\nHello!", "A.", "complete", len("A.\n") + 1),
        ("<think>A.</think>Hello!", "A.", "complete", 1 + 2 + 1),
        ("<think>\n\n</think>Hello!", "", "empty", 1 + 2 + 1),
        ("<think>A. B.", "A. B.", "cut", 1 + 5),
        ("[ponder] A. [/]Hello!", "A.", "complete", len("[ponder] A.")),
    ],
)
def test_reasoning_ends_with_its_marker(answer, reasoning, kind, tokens):
    template = template_of("qwen3")
    row = row_of(template, [user("Hi")], answer, reasoning=reasoning, reasoning_kind=kind)
    counts = answer_roles(row, template)
    assert counts["reasoning"] == tokens
    assert counts.total() == len(row.answer_token_ids)


def test_a_marker_of_several_tokens_is_found_too():
    specials, _ = FAMILIES["qwen3"]
    tokenizer = byte_tokenizer(specials, thinking=False)
    template = ChatTemplate(tokenizer, [])
    ids = template.ids("A.</think>B")
    row = AnswerRow("0", "s", "train", [], [], ids, "B", "stop", reasoning_kind="complete")
    assert len(ids) == 11
    assert answer_roles(row, template) == {"reasoning": 10, "answer": 1}
