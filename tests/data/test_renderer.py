"""Servers that tell no token ids: what is rendered is what was served, or it is refused."""

from collections import Counter
from dataclasses import replace

import pytest
from chat_formats import FAMILIES, TOOLS, assistant, call, template_of, user
from stub_server import StubServer, own_words, prompt_of

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.phase import PromptSets, answer_all, describe_answers
from eagle3lib.data.renderer import TargetRenderer, target_renderer
from eagle3lib.data.rows import read_answers, read_rejects
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.client import Asked, BadReply, Client, NotExact, Told
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import GenerateParams
from eagle3lib.lab.run import Phase

# A plain answer is not what these show of one: the prompt opens the reasoning, or the finished turn
# has an empty block that no server has shown us. (DeepSeek-R1 knows no switch.)
NOT_PLAIN = {("deepseek_r1", "default"), ("deepseek_r1", "off"), ("kimi_k25", "default"),
             ("qwen3", "default")}  # fmt: skip
ASKED = Asked([user("1+1?")], (), "default")


def told(content, finish="stop", counts=(None, None), **more):
    return Told({"role": "assistant", "content": content, **more}, finish, *counts)


def renderer_of(template):
    return TargetRenderer(lambda: template)


def served_ids(template, asked, text, cut=False):
    """What a server saw and made that said ``text``: prompt ids, and the text's own to its end."""
    prompt, _ = renderer_of(template).prompt(asked)
    return prompt, template.ids(text) + ([] if cut else [template.stop_ids[0]])


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("text", ["2", "It is 2.\n\nReally: `1+1`", "中文 🙂\u2028x", " 2", "2 \n"])
@pytest.mark.parametrize("thinking", ["default", "off"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_ids_are_those_that_were_served_or_none(family, thinking, text, counted):
    """The law of this file. White space at the ends is what templates like to take away."""
    template, asked = template_of(family), replace(ASKED, thinking=thinking)
    prompt, answer = served_ids(template, asked, text)
    counts = (len(prompt), len(answer)) if counted else (None, None)
    try:
        rendered = renderer_of(template).turn(asked, told(text, counts=counts))
    except NotExact as error:
        assert text != text.strip() or (family, thinking) in NOT_PLAIN, error
    else:
        assert rendered == (prompt, answer)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"deepseek_r1"}))
def test_an_answer_cut_by_the_limit_has_no_stop_token(family, cut):
    template, asked = template_of(family), replace(ASKED, thinking="off")
    expected = served_ids(template, asked, "It is tw", cut=cut)
    finish = "length" if cut else "stop"
    assert renderer_of(template).turn(asked, told("It is tw", finish)) == expected


REASONED = "<think>\n1+1\n</think>\n\n2"


def test_reasoning_that_the_server_took_out_is_put_back_where_the_count_agrees():
    template = template_of("qwen3")
    prompt, answer = served_ids(template, ASKED, REASONED)
    turn = renderer_of(template).turn
    counts = len(prompt), len(answer)
    assert turn(ASKED, told("2", counts=counts, reasoning_content="1+1")) == (prompt, answer)
    assert turn(ASKED, told(REASONED)) == (prompt, answer)  # left in the text: no count is needed
    with pytest.raises(NotExact, match="another number of tokens"):
        turn(ASKED, told("2", counts=(len(prompt), 99), reasoning_content="1+1"))
    with pytest.raises(NotExact, match="did not count"):
        turn(ASKED, told("2", reasoning_content="1+1"))
    with pytest.raises(NotExact, match="cut inside its reasoning"):
        turn(ASKED, told("", "length", reasoning_content="1+"))


def test_reasoning_behind_a_prompt_that_opens_it_is_taken_from_the_text():
    template = template_of("deepseek_r1")
    prompt, answer = served_ids(template, ASKED, "1+1\n</think>\n\n2")
    assert renderer_of(template).turn(ASKED, told("1+1\n</think>\n\n2")) == (prompt, answer)


def test_thinking_switched_off_puts_the_empty_block_into_the_prompt():
    template = template_of("qwen3")
    asked = Asked([user("1+1?")], (), "off")
    prompt, answer = renderer_of(template).turn(asked, told("2"))
    assert template.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert template.decode(answer) == "2<|im_end|>"


def test_calls_of_tools_need_the_count_too():
    template = template_of("qwen3", enable_thinking=False)
    asked = Asked([user("Rome?")], TOOLS, "off")
    said = assistant("", tool_calls=[call("weather", city="Rome")])
    prompt = template.ids(template.render(asked.messages, prompt=True, tools=TOOLS))
    whole = template.ids(template.render([*asked.messages, said], prompt=False, tools=TOOLS))
    answer = whole[len(prompt) : whole.index(template.stop_ids[0], len(prompt)) + 1]
    as_text = call("weather") | {"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turn = renderer_of(template).turn

    def reply(counts):
        return told("", "tool_calls", counts, tool_calls=[as_text])  # as the OpenAI API has them

    assert turn(asked, reply((len(prompt), len(answer)))) == (prompt, answer)
    with pytest.raises(NotExact, match="another number of tokens"):
        turn(asked, reply((len(prompt), 3)))
    with pytest.raises(NotExact, match="did not count"):
        turn(asked, reply((None, None)))


@pytest.mark.parametrize("counts", [(3, None), (None, 1), (None, 3), (3, 99)])
def test_a_count_that_differs_refuses_the_answer(counts):
    """A doubled first token, another system prompt, words that were split in another way."""
    with pytest.raises(NotExact, match="another number of tokens than the rendered one"):
        renderer_of(template_of("smollm2")).turn(ASKED, told("2", counts=counts))


def textonly(template, text="said it", changed=0):
    """A server of the OpenAI kind that tells no ids, with this template and counts of its own."""

    def reply(request):
        prompt, answer = served_ids(template, Asked(request["messages"], (), "default"), text)
        return {
            "id": "1", "object": "chat.completion", "created": 0, "model": "target",
            "choices": [{"index": 0, "finish_reason": "stop",
                         "message": {"role": "assistant", "content": text}}],
            "usage": {"prompt_tokens": len(prompt) + changed, "completion_tokens": len(answer),
                      "total_tokens": 0},
        }  # fmt: skip

    return reply


@pytest.fixture
def start():
    started = []

    def start(reply):
        started.append(StubServer(reply))
        return started[-1]

    yield start
    for server in started:
        server.kill()


SAMPLING = Sampling(99, 0.0)


def test_rows_of_such_a_server_are_marked_and_counted(start, tmp_path):
    template = template_of("smollm2")
    client = Client(start(textonly(template)).url, renderer=renderer_of(template))
    prompts = [prompt_of("one"), prompt_of("two", "x", "three")]
    options = {"concurrency": 1, "max_reject_share": 0.0}
    rows = generate_answers(prompts, client, tmp_path, SAMPLING, **options)
    assert len(rows) == 3 and {row.token_ids_from for row in rows} == {"rendered"}
    assert read_answers(tmp_path) == rows
    for row in rows:
        prompt = template.render(row.messages, prompt=True)
        assert row.prompt_token_ids == template.ids(prompt)
        assert template.decode(row.answer_token_ids) == "said it<|im_end|>"
    counts = describe_answers(rows, [], [])
    assert counts["token_ids_from"] == {"served": 0, "rendered": 3, "given": 0}


def test_servers_of_both_kinds_are_counted_apart_and_the_console_says_which(
    start, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    template, target = template_of("smollm2"), tmp_path / "target"
    template.tokenizer.save_pretrained(target)
    (target / "config.json").write_text(f'{{"eos_token_id": {template.stop_ids[0]}}}')
    silent = start(textonly(template))

    def tells(request):
        body = textonly(template)(request)
        ids = served_ids(template, Asked(request["messages"], (), "default"), "said it")
        choice = body["choices"][0] | {"token_ids": ids[1]}
        return body | {"choices": [choice], "prompt_token_ids": ids[0]}

    prompts = [prompt_of(f"question {i}") for i in range(30)]
    held = [p for p in prompts if p.split == "heldout"]
    sets = PromptSets([p for p in prompts if p.split == "train"], held, [])
    cfg = GenerateParams(run="x", server=f"{silent.url},{start(tells).url}", answer_tokens=10_000)
    phase = Phase(cfg, {"target": "print"})
    metrics = answer_all(phase, cfg, sets, target)
    kinds = Counter(row.token_ids_from for row in read_answers(phase.folder))
    assert metrics["token_ids_from"] == {**kinds, "given": 0} and min(kinds.values()) > 0
    assert kinds["rendered"] == len(silent.requests)
    # Both kinds give the same ids here, so only the mark can tell them apart.
    assert len({tuple(r.answer_token_ids) for r in read_answers(phase.folder)}) == 1
    assert f"{silent.url} tells no token ids" in capsys.readouterr().out


def test_a_refused_answer_is_a_reject_with_its_reason_and_is_not_asked_again(start, tmp_path):
    template = template_of("smollm2")
    server = start(textonly(template, changed=1))  # say, a first token of its own
    client = Client(server.url, renderer=renderer_of(template))
    prompts = [prompt_of(f"q {i}") for i in range(3)]
    options = {"concurrency": 1, "max_reject_share": 1.0}
    for _ in range(2):
        assert generate_answers(prompts, client, tmp_path, SAMPLING, **options) == []
    assert len(server.requests) == 3
    (reason,) = {row["reason"] for row in read_rejects(tmp_path)}
    assert reason == "the served prompt has another number of tokens than the rendered one"
    with pytest.raises(UserError, match=f"3 of 3 prompts were refused: 3 x {reason}"):
        generate_answers(prompts, client, tmp_path, SAMPLING, concurrency=1, max_reject_share=0.5)


def test_a_server_that_told_ids_once_is_not_rendered_when_it_tells_none(start):
    """That is a fault of its own, to be asked again; rendering it would mix two kinds unseen."""
    template = template_of("smollm2")
    replies = iter([own_words, textonly(template), own_words])
    server = start(lambda request: next(replies)(request))
    client = Client(server.url, renderer=renderer_of(template), retries=0)
    asked = {"max_tokens": 9, "temperature": 0.0}
    assert client.chat([user("x")], **asked).token_ids_from == "served"
    with pytest.raises(BadReply, match="no token ids"):
        client.chat([user("x")], **asked)
    assert client.chat([user("x")], **asked).token_ids_from == "served"


def test_a_target_without_a_template_is_a_user_error(start, tmp_path):
    tokenizer = template_of("smollm2").tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text('{"eos_token_id": 2}')
    client = Client(
        start(textonly(template_of("smollm2"))).url, renderer=target_renderer(tmp_path / "target")
    )
    with pytest.raises(UserError, match="the target has no chat template"):
        generate_answers(
            [prompt_of("x")], client, tmp_path / "a", SAMPLING, concurrency=1, max_reject_share=0.0
        )
