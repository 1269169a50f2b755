"""SGLang's generate API, of a server that answers in its shapes and is as strict as it is."""

import random

import openai
import pytest
from chat_formats import template_of
from stub_server import StubServer, own_words, prompt_of

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.renderer import TargetRenderer
from eagle3lib.data.rows import read_answers, read_rejects
from eagle3lib.data.turns import Sampling
from eagle3lib.engine.client import BadReply, Client, NotExact
from eagle3lib.engine.pool import Pool, RequestFailed, RequestRefused
from eagle3lib.lab.errors import UserError

INFO = {"model_path": "/models/x", "tokenizer_path": "/models/x", "is_generation": True}
PAGES = {"/model_info": INFO, "/server_info": {"model_path": "/models/x", "version": "0.5.6"}}
TEXT = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
KNOWN = {"max_new_tokens", "temperature", "sampling_seed", *TEXT}
MAX_PROMPT_TOKENS = 3000


class FakeSglang(StubServer):
    """Says ``says(prompt text)`` token by token; a text that is a fault's name is that fault."""

    def __init__(self, template, says, pages=PAGES):
        self.template, self.says, self.change = template, says, lambda body: body
        super().__init__(self.generate, version="", pages=pages)

    def generate(self, request):
        ids, sampling = request.get("input_ids"), request.get("sampling_params")
        if not ids or set(sampling) - KNOWN or len(ids) > MAX_PROMPT_TOKENS:
            return "400"
        said = self.says(self.template.decode(ids))
        if said in ("500", "429", "reset", "half a body", "no JSON"):
            return said
        output = [*self.template.ids(said), self.template.stop_ids[0]]
        cut = len(output) > sampling["max_new_tokens"]
        output = output[: sampling["max_new_tokens"]]
        finish = {"type": "length", "length": len(output)} if cut else {"type": "stop",
                  "matched": output[-1]}  # fmt: skip
        return self.change({
            "text": self.template.decode(output if cut else output[:-1]),
            "output_ids": output,
            "meta_info": {
                "id": "1", "finish_reason": finish, "prompt_tokens": len(ids),
                "completion_tokens": len(output), "cached_tokens": 0, "e2e_latency": 0.1,
                "spec_verify_ct": 3, "spec_accept_length": 1.5, "weight_version": "default",
            },
        })  # fmt: skip


@pytest.fixture
def start():
    started = []

    def start(family="smollm2", says=lambda prompt: "Yes!", **options):
        template = template_of(family)
        started.append(FakeSglang(template, says, **options))
        return started[-1]

    yield start
    for server in started:
        if not server.dead:
            server.kill()


def client_of(server, **options):
    renderer = TargetRenderer(lambda: server.template)
    return Client(server.url, **({"retries": 0, "renderer": renderer} | options))


def hello(client, **options):
    asked = {"max_tokens": 40, "temperature": 0.0} | options
    return client.chat([{"role": "user", "content": "Hello"}], **asked)


@pytest.mark.parametrize("page", ["/model_info", "/get_model_info"])
def test_ids_go_in_and_ids_come_out(start, page):
    """Both the page's old name and its new one say that it is SGLang."""
    server = start(pages={page: INFO})
    answer = hello(client_of(server), temperature=0.5, seed=7)
    template = server.template
    prompt = template.render([{"role": "user", "content": "Hello"}], prompt=True)
    assert answer.prompt_token_ids == template.ids(prompt)
    assert template.decode(answer.answer_token_ids) == "Yes!<|im_end|>"  # the stop token is there
    assert (answer.text, answer.finish_reason) == ("Yes!", "stop")
    assert answer.token_ids_from == "served" and answer.rounds is None
    assert server.paths == ["/generate"]
    assert server.requests == [{
        "input_ids": answer.prompt_token_ids, "stream": False,
        "sampling_params": {"max_new_tokens": 40, "temperature": 0.5, "sampling_seed": 7, **TEXT},
    }]  # fmt: skip


def test_a_vllm_is_asked_as_ever_also_where_a_template_is_at_hand():
    server = StubServer(own_words)
    try:
        client = Client(server.url, renderer=TargetRenderer(lambda: pytest.fail("not needed")))
        answer = hello(client)
        assert server.paths == ["/v1/chat/completions"] and answer.token_ids_from == "served"
        assert client.version() == "0.32.0"
    finally:
        server.kill()


def test_a_server_that_can_not_be_asked_what_it_is_is_not_taken_for_another(start):
    """While it starts it says 503; a guess then would render what SGLang would have told."""
    server = start(pages={"/model_info": 503})
    client = client_of(server)
    with pytest.raises(openai.InternalServerError):
        hello(client)
    assert server.paths == []
    server.pages = PAGES
    assert hello(client).token_ids_from == "served"
    assert server.paths == ["/generate"]


def test_thinking_is_switched_in_the_template(start):
    server = start("qwen3")
    prompts = {}
    for thinking in ("default", "on", "off"):
        answer = hello(client_of(server), thinking=thinking)
        prompts[thinking] = server.template.decode(answer.prompt_token_ids)
    assert prompts["default"] == prompts["on"]
    assert prompts["off"] == prompts["on"] + "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "said", "max_tokens", "expected"),
    [
        ("qwen3", "<think>\n1+1\n</think>\n\n2", 99, ("2", "1+1", "complete")),
        ("qwen3", "2", 99, ("2", "", "missing")),
        ("qwen3", "<think>\n1+1 is two", 7, ("", "1+1 i", "cut")),
        # The prompt has opened the reasoning: an answer that is cut in it has no marker at all.
        ("deepseek_r1", "1+1</think>2", 99, ("2", "1+1", "complete")),
        ("deepseek_r1", "1+1 is two</think>2", 5, ("", "1+1 i", "cut")),
    ],
)
def test_reasoning_is_told_apart_from_raw_text(start, tmp_path, family, said, max_tokens, expected):
    server = start(family, lambda prompt: said)
    sampling = Sampling(max_tokens, 0.0, train_on_cut=True)
    (row,) = generate_answers(
        [prompt_of("1+1?")], client_of(server), tmp_path, sampling,
        concurrency=1, max_reject_share=0.0,
    )  # fmt: skip
    assert (row.text, row.reasoning, row.reasoning_kind) == expected
    assert row.engine == "sglang 0.5.6"


def without(*path):
    def change(body):
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return body

    return change


DAMAGE = {
    "no answer": lambda body: {"error": {"message": "engine dead"}},
    "a list": lambda body: [body],
    "no ids": without("output_ids"),
    "no text": without("text"),
    "no meta": without("meta_info"),
    "wrong ids": lambda body: body | {"output_ids": ["a"]},
    "lost ids": lambda body: body | {"output_ids": body["output_ids"][1:]},
    "other prompt": lambda b: b | {"meta_info": b["meta_info"] | {"prompt_tokens": 3}},
    "abort": lambda b: b | {"meta_info": b["meta_info"] | {"finish_reason": {"type": "abort"}}},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_reply_that_can_not_be_right_is_refused(start, damage):
    server = start()
    server.change = DAMAGE[damage]
    if damage == "a list":  # the stub sends dicts only
        server.change = lambda body: {"replies": [body]}
    with pytest.raises(BadReply, match=server.url):
        hello(client_of(server))


def test_what_the_server_refuses_is_refused_and_what_fails_is_tried_again(start):
    said = iter(["500", "reset", "no JSON", "Yes!"])
    server = start(says=lambda prompt: next(said))
    pool = Pool([client_of(server)], back_off_s=0.01, max_back_off_s=0.02)
    pool.check()
    asked = {"max_tokens": 9, "temperature": 0.0}
    assert pool.chat([{"role": "user", "content": "x"}], **asked).answer.text == "Yes!"
    with pytest.raises(RequestRefused, match="fault 400"):
        pool.chat([{"role": "user", "content": "x" * 4000}], **asked)
    server.says = lambda prompt: "500"
    with pytest.raises(RequestFailed, match="fault 500"):
        pool.chat([{"role": "user", "content": "x"}], **asked)
    with pytest.raises(NotExact, match="the template does not take the row"):
        pool.chat([{"role": "user", "content": 3}], **asked)


def test_without_a_template_there_is_no_native_api_and_the_error_says_so(start):
    server = start()
    server.reply = lambda request: {
        "id": "1", "object": "chat.completion", "created": 0, "model": "target",
        "choices": [{"index": 0, "finish_reason": "stop",
                     "message": {"role": "assistant", "content": "Yes!"}}],
    }  # fmt: skip
    with pytest.raises(UserError, match=r"no token ids(?s:.)*SGLang"):
        hello(Client(server.url, retries=0))


def test_faults_lose_nothing_and_nothing_is_twice(start, tmp_path):
    """As with vLLM: the set is that of a server without faults."""
    faults = ["500", "429", "reset", "half a body", "no JSON"]
    prompts = [prompt_of(f"question {i}") for i in range(120)]
    chance, left = random.Random(2), {}

    def says(prompt):
        known = left.setdefault(prompt, chance.choices(faults, k=chance.randint(0, 2)))
        return known.pop() if known else f"said {hash_of(prompt)} 🙂"

    def hash_of(prompt):
        return sum(prompt.encode()) * len(prompt)

    def make(server, folder):
        pool = Pool([client_of(server)], back_off_s=0.01, max_back_off_s=0.02, tries=12)
        template = server.template
        rows = generate_answers(
            prompts, pool, tmp_path / folder, Sampling(60, 0.7, stop_ids=template.stop_ids),
            concurrency=8, max_reject_share=0.0,
        )  # fmt: skip
        assert read_rejects(tmp_path / folder) == [] and read_answers(tmp_path / folder) == rows
        assert len(rows) == len({row.id for row in rows}) == len(prompts)
        assert not any(row.kept_apart for row in rows)
        return {r.id: (r.prompt_token_ids, r.answer_token_ids, r.text, r.sampling) for r in rows}

    made = make(start(says=says), "faults")
    assert sum(map(len, left.values())) == 0 and len(left) == 120
    assert made == make(start(says=lambda prompt: f"said {hash_of(prompt)} 🙂"), "well")
