"""Where an answer starts and ends, and the templates and rows for which that can't be told."""

# ruff: noqa: RUF001 (DeepSeek's special tokens are written with full-width bars)

from __future__ import annotations

import json

import pytest
from chat_formats import (
    FAMILIES,
    assistant,
    byte_tokenizer,
    call,
    refused,
    template_of,
    trained,
    user,
)

from eagle3lib.data.render import check_mask, render_turns
from eagle3lib.data.template import (
    ChatTemplate,
    as_servers_read,
    compare_prompts,
    load_chat_template,
    stop_ids_of,
)
from eagle3lib.lab.errors import UserError

QWEN_HI = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "deepseek_r1"])
@pytest.mark.parametrize("word", ["a", "I", "user", "assistant", "think", "system", "🙂", "\\d"])
def test_one_word_turns_train_that_word_and_the_stop_token_alone(family, word):
    """speculators#865: masks one token off show at turn borders, most at short turns."""
    template = template_of(family)
    said = [user("Hi"), assistant(word), user(word), assistant(word)]
    rows = trained(template, said)
    assert [text for _, text in rows] == [word + FAMILIES[family][1][0]] * 2
    turns, _ = render_turns(said, template)
    assert [len(turn.answer_token_ids) for turn in turns] == [len(word.encode()) + 1] * 2


CHATML_START = "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
CHATML_END = (
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
HI = [user(" Hi "), assistant("Hello!")]


def chatml(body="{{- m.content -}}", end=CHATML_END):
    return template_of("qwen3", CHATML_START + body + end)


@pytest.mark.parametrize("change", ["m.content|trim", "m.content|upper", "'[' + m.content + ']'"])
def test_a_template_that_changes_the_users_text_moves_no_boundary(change):
    """speculators#774: a pattern built from sentinel texts covered the wrong span. The user's
    changed text is what the server sees too; the trained span is the answer."""
    body = "{{- (" + change + ") if m.role == 'user' else m.content -}}"
    ((_, text),) = trained(chatml(body), HI)
    assert text == "Hello!<|im_end|>"


REFUSED = {
    "upper-cases the answer": (
        chatml("{{- m.content | upper -}}"), HI, "the template changes the answer's words",
    ),
    "wraps the answer in front": (
        chatml("{{- 'Answer: ' + m.content -}}"), HI, "the template writes text before the answer",
    ),
    "wraps the answer behind": (
        chatml("{{- m.content + ' Bye' -}}"), HI, "the template writes text after the answer",
    ),
    "has no stop token": (
        chatml(end=CHATML_END.replace("<|im_end|>", "")), HI, "no stop token after the answer",
    ),
    "has no generation prompt": (
        chatml(end=CHATML_END.split("{%- if")[0]), HI, "the template writes text before the answer",
    ),
    "numbers the messages from the end": (
        chatml("{{- loop.revindex | string + m.content -}}"), HI, "the template rewrites history",
    ),
    "drops tool calls": (
        chatml(), [user("Rain?"), assistant("Look.", tool_calls=[call("weather")])],
        "the template drops a tool call",
    ),
    "raises": (
        chatml("{{- raise_exception('no user query') -}}"), HI,
        "the template does not take the row",
    ),
    "meets a content that it can't add": (
        template_of("smollm2"), [user(None), assistant("Hello!")],
        "the template does not take the row",
    ),
    "an empty answer": (chatml(), [user("Hi"), assistant(" ")], "an empty answer"),
    "an answer in parts": (
        chatml(), [user("Hi"), assistant([{"type": "text", "text": "Hello!"}])],
        "an assistant message that is not text",
    ),
    "a stop token in the words": (
        chatml(), [user("Hi"), assistant("Hello<|im_end|>there")],
        "a stop token stands inside the answer",
    ),
    "half an emoji": (
        chatml(), [user("Hi"), assistant("\ud83d")], "half a surrogate pair in the text",
    ),
    "no question": (chatml(), [assistant("Hello!")], "nothing is asked before the answer"),
    "no answer": (chatml(), [user("Hi")], "no assistant turn to train on"),
    "ChatML data, Llama's template": (
        template_of("qwen3", template_of("llama3").tokenizer.chat_template), HI,
        "no stop token after the answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_span_that_can_not_be_told_is_refused_with_the_reason(case):
    template, messages, reason = REFUSED[case]
    assert refused(template, messages) == [reason]


def test_generation_markers_are_neither_needed_nor_in_the_way():
    """Without markers one library gives an all-zero mask and another an all-one mask; with them,
    transformers' own mask is the reference."""
    marked = chatml(
        "{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>' -}}"
        "{%- endgeneration -%}{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}",
        CHATML_END.replace("<|im_end|>", "", 1),
    )
    assert trained(marked, HI) == trained(chatml(), HI)
    reference = marked.tokenizer.apply_chat_template(
        HI, return_dict=True, return_assistant_tokens_mask=True
    )
    masked = zip(reference["input_ids"], reference["assistant_masks"], strict=True)
    (turn,), _ = render_turns(HI, marked)
    assert [token for token, bit in masked if bit] == turn.answer_token_ids


def test_the_first_of_several_stop_tokens_ends_the_answer():
    template = chatml(end=CHATML_END.replace("<|im_end|>\n", "<|im_end|>\n<|endoftext|>"))
    ((_, text),) = trained(template, HI)
    assert text == "Hello!<|im_end|>"


R1_TEXT = template_of("deepseek_r1").tokenizer.chat_template


@pytest.mark.parametrize(
    ("source", "said", "reason"),
    [
        (
            R1_TEXT.replace("[-1] + '<｜end", "[-1] + ' Bye<｜end"), "A.</think>Hello!",
            "the finished turn does not go on from the generation prompt",
        ),
        (
            R1_TEXT.replace("<｜end▁of▁sentence｜>", ""), "A.</think>Hello!",
            "the finished turn does not go on from the generation prompt",
        ),
        (R1_TEXT, "A<｜end▁of▁sentence｜>.</think>Hello!", "a stop token stands inside the answer"),
    ],
)  # fmt: skip
def test_text_goes_on_from_a_think_tag_only_up_to_the_one_stop_token(source, said, reason):
    assert refused(template_of("deepseek_r1", source), [user("Hi"), assistant(said)]) == [reason]


def merging_template():
    """Two newlines are one token, as in most vocabularies; the prompt ends with one of them."""
    tokenizer = byte_tokenizer(FAMILIES["qwen3"][0], merges=[("Ċ", "Ċ")])
    tokenizer.chat_template = chatml().tokenizer.chat_template
    return ChatTemplate(tokenizer, tokenizer.convert_tokens_to_ids(["<|im_end|>"]))


def test_tokens_that_merge_across_the_boundary_are_split_as_a_server_splits_them():
    template = merging_template()
    (turn,), _ = render_turns([user("Hi"), assistant("\nHello!")], template)
    prompt = template.render([user("Hi")], prompt=True)
    assert turn.prompt_token_ids == template.ids(prompt)
    assert turn.text == template.decode(turn.answer_token_ids) == "\nHello!<|im_end|>"
    assert not turn.exact
    assert "merge across the boundary" in turn.note


def test_equal_prompts_compare_as_equal():
    template = template_of("qwen3")
    ids = template.ids(QWEN_HI)
    assert compare_prompts(ids, list(ids), template) == ""


def test_a_prompt_served_without_thinking_is_told_apart_with_both_tails():
    """dflash#133: client and training disagreed on the thinking tag; acceptance 25 % not 60 %."""
    template = template_of("qwen3")
    rendered, served = template.ids(QWEN_HI), template.ids(QWEN_HI + "<think>\n\n</think>\n\n")
    first, *rest = compare_prompts(rendered, served, template).split("\n")
    assert first.startswith(f"prompt ids differ at position {len(rendered)}: rendered ends, served")
    assert "'<think>\\n\\n</think>\\n\\n'" in first
    assert "assistant\\n" in rest[0]
    assert "</think>\\n\\n" in rest[1]


def test_a_doubled_first_token_is_named():
    template = template_of("llama3")
    ids = template.ids("<|begin_of_text|>Hi")
    assert "stands twice in the served prompt" in compare_prompts(ids, [ids[0], *ids], template)


STOP = 9
ROWS = [
    ([1, 2], [3, STOP], "stop", []),
    ([1, 2], [3, 4], "length", []),
    ([1, 2], [3, 4], "stop", ["mask-no-stop"]),
    ([1, 2], [], "stop", ["mask-all-zeros"]),
    ([1, 2], [STOP], "stop", ["mask-all-zeros"]),
    ([], [3, STOP], "stop", ["mask-all-ones"]),
    ([], [], "", ["mask-all-ones", "mask-all-zeros"]),
    ([1, 2], [3, STOP, 4, STOP], "stop", ["mask-stop-inside"]),
]


@pytest.mark.parametrize(("prompt", "answer", "finish", "codes"), ROWS)
def test_masks_of_all_zeros_all_ones_or_without_stop_are_findings(prompt, answer, finish, codes):
    findings = check_mask(prompt, answer, [STOP], finish_reason=finish, where="row 7")
    assert [f.code for f in findings] == codes
    assert {f.where for f in findings} <= {"row 7"}
    assert {f.severity for f in findings} <= {"error"}


OWN_CODE = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def test_a_tokenizer_with_code_of_its_own_is_loaded_only_where_that_is_allowed(
    tmp_path, monkeypatch
):
    """Kimi's is such a one. The message must name the parameter, and nothing may ask on a console
    that a headless run does not have."""
    import transformers.dynamic_module_utils as modules

    monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    template_of("kimi_k2").tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    auto = {"AutoTokenizer": [None, "tokenization_own.OwnTokenizer"]}
    own = json.loads(path.read_text()) | {"tokenizer_class": "OwnTokenizer", "auto_map": auto}
    path.write_text(json.dumps(own))
    (folder / "tokenization_own.py").write_text(OWN_CODE)
    with pytest.raises(UserError, match=r"next: .*set trust_remote_code to true"):
        load_chat_template(folder, [1])
    template = load_chat_template(folder, [1], trust_remote_code=True)
    assert type(template.tokenizer).__name__ == "OwnTokenizer"
    assert template.render([user("x")], prompt=True).endswith("<|im_middle|>")


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (2, 7)),
        ({"text_config": {"eos_token_id": [3, 4]}}, {}, (3, 4)),
        ({"eos_token_id": 5, "text_config": {}}, {"eos_token_id": None}, (5,)),
        ({}, None, ()),
    ],
)
def test_stop_ids_are_those_that_the_targets_files_name(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids_of(tmp_path) == expected


def test_arguments_of_calls_are_read_as_servers_read_them_and_the_row_stays_as_it_was():
    def calling(arguments):
        function = {"name": "f", "arguments": arguments}
        return [{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]

    for given, read in (('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("{torn", "{torn")):
        messages = calling(given)
        assert as_servers_read(messages) == calling(read) and messages == calling(given)
