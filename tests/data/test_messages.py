"""Rows of every common format: each is asked as it is meant, or a reason says why not."""

import json

import pytest

from eagle3lib.data.messages import BadRow, request_of
from eagle3lib.data.prompts import prompt_id


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


@pytest.mark.parametrize(
    ("line", "kind", "messages"),
    [
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "x"}]},
         "conversations", [system("s"), user("x")]),
        ({"conversations": [{"from": "human", "value": "x", "weight": 0},
                            {"from": "gpt", "value": "y"}, {"from": "human", "value": "z"},
                            {"from": "gpt", "value": "cut"}]},
         "conversations", [user("x"), assistant("y"), user("z")]),
        ({"conversations": [user("x"), assistant("cut")]}, "conversations", [user("x")]),
        ({"conversations": [{"from": "human", "value": "x"}], "system": "s"},
         "conversations", [system("s"), user("x")]),
        ({"prompt": "x"}, "prompt", [user("x")]),
        ({"prompt": "[1]"}, "prompt", [user("[1]")]),
        ({"prompt": "x", "text": "x y", "chosen": [user("x")]}, "prompt", [user("x")]),
        ({"prompt": [system("s"), user("x")]}, "prompt", [system("s"), user("x")]),
        ({"prompt": "x", "messages": [user("y")]}, "messages", [user("y")]),
        ({"prompt": "x", "messages": None}, "prompt", [user("x")]),
        ({"instruction": "Add.", "input": "1 and 2", "output": "3"},
         "instruction", [user("Add.\n\n1 and 2")]),
        ({"instruction": "Sing.", "input": " ", "text": "# Sing"}, "instruction", [user("Sing.")]),
        ({"instruction": "Sing.", "system": "s"}, "instruction", [system("s"), user("Sing.")]),
        ({"text": "What does <|x|> mean?"}, "text", [user("What does <|x|> mean?")]),
        ({"prompt": "What does <|im_start|> mean?"}, "prompt",
         [user("What does <|im_start|> mean?")]),
    ],
)  # fmt: skip
def test_every_row_format_gives_the_messages_that_it_means(line, kind, messages):
    request = request_of(line, "auto", 1000)
    assert (request.messages, request.format) == (messages, kind)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"conversations": []}, "no list of conversations"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "roles"),
        ({"conversations": [{"from": "system", "value": "s"}]}, "roles"),
        ({"conversations": [{"from": "system", "value": "s"}, {"from": "gpt", "value": "x"}]},
         "roles"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "roles"),
        ({"conversations": [{"from": "human"}]}, "without text"),
        ({"conversations": ["x"]}, "without text"),
        ({"prompt": ""}, "empty message"),
        ({"prompt": 3}, "no prompt"),
        ({"prompt": []}, "no list of messages"),
        ({"instruction": ["x"]}, "no instruction"),
        ({"text": " \n"}, "empty message"),
        ({"messages": [user("x"), {**assistant("y"), "tool_calls": "f()"}, user("z")]},
         "tool_calls is not a list"),
    ],
)  # fmt: skip
def test_every_row_format_has_its_reasons(line, reason):
    with pytest.raises(BadRow, match=reason):
        request_of(line, "auto", 1000)


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nx<|im_end|>",
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>",
        "<s>[INST] x [/INST]",
        "<bos><start_of_turn>user\nx",
        "<\uff5cUser\uff5c>x<\uff5cAssistant\uff5c>",
        "<|im_user|>user<|im_middle|>x",
        "<|start|>user<|message|>x",
    ],
)
@pytest.mark.parametrize("prompt_format", ["auto", "text"])
def test_text_that_a_template_rendered_is_refused_not_rendered_again(text, prompt_format):
    with pytest.raises(BadRow, match="looks preformatted: already rendered by a chat template"):
        request_of({"id": "1", "text": text}, prompt_format, 1000)


def test_a_prompt_that_begins_with_a_templates_mark_is_refused_too():
    with pytest.raises(BadRow, match="preformatted"):
        request_of({"prompt": "<s> [INST] x [/INST]"}, "auto", 1000)


def test_the_format_can_be_said():
    line = {"messages": [user("x")], "prompt": "y", "text": "z"}
    said = {kind: request_of(line, kind, 1000).messages for kind in ("messages", "prompt", "text")}
    assert said == {"messages": [user("x")], "prompt": [user("y")], "text": [user("z")]}
    with pytest.raises(BadRow, match="no instruction"):
        request_of(line, "instruction", 1000)


def test_a_prompt_longer_than_the_limit_is_left_out():
    messages = [system("12"), user("345"), assistant("6" * 50)]
    assert request_of({"messages": messages}, "auto", 5).messages == messages[:2]
    with pytest.raises(BadRow, match="longer than 4 characters") as caught:
        request_of({"messages": messages}, "auto", 4)
    assert caught.value.detail == "found 5"
    with pytest.raises(BadRow, match="longer than 5"):
        request_of({"messages": messages, "tools": [TOOL]}, "auto", 5)


CALL = {"id": "1", "type": "function", "function": {"name": "weather"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": [2]}}}


def calling(arguments, **more):
    call = {**CALL, "function": {**CALL["function"], "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call], **more}


def result(text):
    return {"role": "tool", "tool_call_id": "1", "content": text}


@pytest.mark.parametrize("arguments", [{"city": "Rome", "at": None}, '{"city": "Rome"}'])
def test_tools_their_calls_and_their_results_pass_through_unchanged(arguments):
    """Some rows hold the arguments of a call as an object, some as text: neither is rewritten."""
    call = calling(arguments, content="")
    messages = [user("x"), call, result("sun"), assistant("y"), user("z"), call, result("")]
    line = {"messages": messages, "tools": [TOOL]}
    request = request_of(line, "auto", 1000)
    kept = {"messages": request.messages, "tools": request.tools}
    assert json.dumps(kept) == json.dumps(line)  # the order of keys too
    line["messages"] = [*messages, assistant("the answer")]
    answered = request_of(line, "auto", 1000)
    assert (
        answered.answer == assistant("the answer") and answered.messages == messages
    )  # ends with the results


def test_a_call_that_says_nothing_has_content_none():
    """Templates ask ``content is none``, which a missing key does not satisfy."""
    for call in (calling("{}"), calling("{}", content=None)):
        line = {"messages": [user("x"), call, result("sun")]}
        said = request_of(line, "auto", 1000).messages[1]
        assert said == {"role": "assistant", "content": None, **calling("{}")}
        assert list(said) == ["role", "content", "tool_calls"]


@pytest.mark.parametrize(
    "tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]], ids=["list", "text", "list of texts"]
)
def test_tools_are_one_list_however_they_are_written_down(tools):
    assert request_of({"prompt": "x", "tools": tools}, "auto", 1000).tools == [TOOL]


def test_other_tools_make_another_prompt():
    ids = {prompt_id([user("x")], tools) for tools in ([], [TOOL], [TOOL, TOOL], [{}])}
    assert len(ids) == 4


@pytest.mark.parametrize("tools", [None, [], "", " ", "[]", "null"])
def test_no_tools_leave_the_id_to_the_messages(tools):
    request = request_of({"prompt": "x", "tools": tools}, "auto", 1000)
    assert request.tools == []
    assert prompt_id(request.messages, request.tools) == prompt_id([user("x")])


@pytest.mark.parametrize("tools", ["weather", ["weather"], {"name": "x"}, [3], 3, True])
def test_tools_that_are_no_list_of_objects_are_a_reason(tools):
    with pytest.raises(BadRow, match="tools is not a list of objects"):
        request_of({"prompt": "x", "tools": tools}, "auto", 1000)
