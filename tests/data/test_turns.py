"""Conversations of several turns, thinking, reasoning, repeats: as the server sees them."""

import pytest
from stub_server import StubServer, chat_body, own_words, prompt_of

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.phase import describe_answers
from eagle3lib.data.prompts import Prompt, prompt_id
from eagle3lib.data.rows import CUT, EMPTY, LOOPING, read_answers, read_rejects, split_reasoning
from eagle3lib.data.turns import Conversation, Sampling
from eagle3lib.engine.client import Client
from eagle3lib.lab.errors import UserError

GREEDY = Sampling(max_new_tokens=9, temperature=0.0)


@pytest.fixture
def ask(tmp_path):
    """``ask(prompts, reply)``: the rows by id, and the requests that the server saw."""
    servers = []

    def ask(prompts, reply=own_words, sampling=GREEDY, folder="a", **options):
        servers.append(server := StubServer(reply))
        options = {"concurrency": 2, "max_reject_share": 1.0} | options
        client = Client(server.url, retries=0)
        rows = generate_answers(prompts, client, tmp_path / folder, sampling, **options)
        return {row.id: row for row in rows}, server.requests

    yield ask
    for server in servers:
        server.kill()


def test_each_earlier_answer_becomes_the_targets_own(ask):
    prompt = prompt_of("one", "THEIRS", "two", "THEIRS", "three")
    rows, requests = ask([prompt])
    assert set(rows) == {f"{prompt.id}.0", f"{prompt.id}.1", prompt.id}
    first, second, last = (rows[i] for i in Conversation(prompt).row_ids)
    assert (first.turn, second.turn, last.turn) == (0, 1, 2)
    assert last.messages == [
        {"role": "user", "content": "one"}, {"role": "assistant", "content": first.text},
        {"role": "user", "content": "two"}, {"role": "assistant", "content": second.text},
        {"role": "user", "content": "three"},
    ]  # fmt: skip
    assert first.messages == last.messages[:1] and second.messages == last.messages[:3]
    assert [r["messages"] for r in requests] == [r.messages for r in (first, second, last)]
    assert not any("THEIRS" in str(r) for r in requests)
    assert all(r.split == prompt.split and r.target_fingerprint == "" for r in rows.values())


def test_a_killed_conversation_goes_on_with_the_answers_that_it_has(ask, tmp_path):
    prompt = prompt_of("one", "THEIRS", "two", "THEIRS", "three")
    whole, _ = ask([prompt])
    path = tmp_path / "a" / "answers.jsonl"
    path.write_bytes(path.read_bytes().split(b"\n")[0] + b'\n{"torn')
    resumed, requests = ask([prompt])
    assert {i: r.answer_token_ids for i, r in resumed.items()} == {
        i: r.answer_token_ids for i, r in whole.items()
    }
    assert len(requests) == 2 and requests[0]["messages"] == whole[f"{prompt.id}.1"].messages


def test_system_prompt_tools_their_calls_and_results_pass_unchanged(ask):
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "THEIRS"},
        {"role": "user", "content": "what time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    prompt = Prompt(prompt_id(messages, [tool]), tuple(messages), "workload", (tool,))
    rows, requests = ask([prompt])
    assert len(requests) == 2 and all(r["tools"] == [tool] for r in requests)
    mine = {"role": "assistant", "content": rows[f"{prompt.id}.0"].text}
    assert requests[1]["messages"] == [*messages[:2], mine, *messages[3:]]
    assert rows[prompt.id].tools == [tool]
    plain, (request,) = ask([prompt_of("no tools")], folder="b")
    assert "tools" not in request and all(r.tools == [] for r in plain.values())


def test_a_turn_that_failed_ends_its_conversation_with_a_counted_reject(ask, tmp_path):
    def reply(request):
        asked = request["messages"][-1]["content"]
        if asked == "refuse":
            return "400"
        body = own_words(request)
        return chat_body(request, [5] * 9, "cu", "length") if asked == "cut" else body

    refused = prompt_of("one", "x", "refuse", "x", "three")
    cut = prompt_of("cut", "x", "two")
    rows, _ = ask([refused, cut], reply)
    assert set(rows) == {f"{refused.id}.0", f"{cut.id}.0"}
    assert {r["id"]: r["reason"] for r in read_rejects(tmp_path / "a")} == {
        refused.id: "refused by the server",
        cut.id: "an earlier answer was cut by the length limit",
    }
    again, requests = ask([refused, cut], reply)
    assert again == rows and requests == []
    trained = Sampling(9, 0.0, train_on_cut=True)
    assert set(ask([cut], reply, trained, folder="b")[0]) == {f"{cut.id}.0", cut.id}


PROMPTS = [prompt_of(f"question {i}") for i in range(200)]


@pytest.mark.parametrize(("mode", "sent"), [("default", None), ("on", True), ("off", False)])
def test_the_server_sees_the_switch_for_thinking(ask, mode, sent):
    rows, requests = ask(PROMPTS[:3], sampling=Sampling(9, 0.0, mode))
    kwargs = None if sent is None else {"enable_thinking": sent, "thinking": sent}
    assert [r.get("chat_template_kwargs") for r in requests] == [kwargs] * 3
    assert {r.sampling["thinking"] for r in rows.values()} == {mode}


def test_a_mix_of_thinking_is_decided_by_id_and_the_same_in_all_turns(ask):
    mixed = Sampling(9, 0.0, "mixed", 0.3)
    rows, requests = ask(PROMPTS, sampling=mixed)
    on = {i for i, row in rows.items() if row.sampling["thinking"] == "on"}
    assert 40 <= len(on) <= 80
    assert sum(r["chat_template_kwargs"]["enable_thinking"] for r in requests) == len(on)
    again, _ = ask(PROMPTS[::-1], sampling=mixed, folder="b")
    assert {i for i, row in again.items() if row.sampling["thinking"] == "on"} == on
    for share, modes in ((0.0, {"off"}), (1.0, {"on"})):
        assert {Sampling(9, 0.0, "mixed", share).thinking_of(p.id) for p in PROMPTS} == modes
    for i in range(6):
        talk = prompt_of(f"one {i}", "x", "two")
        rows, _ = ask([talk], sampling=mixed, folder=f"c{i}")
        assert len({row.sampling["thinking"] for row in rows.values()}) == 1


@pytest.mark.parametrize(
    ("text", "reasoning", "finish", "expected"),
    [
        ("4", "two and two", "stop", ("4", "two and two", "complete")),
        ("", "two and", "length", ("", "two and", "cut")),
        ("fo", "two and two", "length", ("fo", "two and two", "complete")),
        ("4", "", "stop", ("4", "", "empty")),
        ("4", None, "stop", ("4", "", "missing")),
        ("<think>\ntwo\n</think>\n\n4", None, "stop", ("4", "two", "complete")),
        ("two and two\n</think>\n4", None, "stop", ("4", "two and two", "complete")),
        ("<think>\n\n</think>\n\n4", None, "stop", ("4", "", "empty")),
        ("<think>\ntwo and", None, "length", ("", "two and", "cut")),
        ("<think>", None, "length", ("", "", "cut")),
        ("a <think> in words", None, "stop", ("a <think> in words", "", "missing")),
    ],
)
def test_kinds_of_reasoning(text, reasoning, finish, expected):
    assert split_reasoning(text, reasoning, finish) == expected


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_is_captured_and_not_put_back_into_history(ask, field):
    def reply(request):
        return chat_body(request, [1, 2], "4", **{field: "two and two"})

    prompt = prompt_of("one", "x", "two")
    rows, requests = ask([prompt], reply)
    assert [(r.reasoning, r.text) for r in rows.values()] == [("two and two", "4")] * 2
    assert requests[1]["messages"][1] == {"role": "assistant", "content": "4"}
    counts = describe_answers(list(rows.values()), [], [])
    assert counts["reasoning"] == {"complete": 2, "missing": 0, "cut": 0, "empty": 0}


def kinds_reply(request):
    kind = request["messages"][-1]["content"].split()[0]
    return {
        "cut": chat_body(request, [1, 2, 3, 4], "and so", "length"),
        "loop": chat_body(request, [1, 2, 3, 4, 5, 6, 7, 8] * 6, "lalala", "length"),
        "empty": chat_body(request, [2], " \n"),
        "thought": chat_body(request, [1, 2], None, reasoning="so"),
        "call": chat_body(request, [1, 2], None, tool_calls=[
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]),
    }.get(kind) or chat_body(request, [1, 2, 3], "fine")  # fmt: skip


def test_answers_are_kept_apart_by_reason_counted_and_not_trained_on(ask):
    kinds = {"cut": CUT, "loop": LOOPING, "empty": EMPTY, "thought": EMPTY, "call": "", "fine": ""}
    prompts = [next(p for i in range(99) if (p := prompt_of(f"{k} {i}")).split == "train")
               for k in kinds]  # fmt: skip
    rows, _ = ask(prompts, kinds_reply)
    apart = {p.messages[0]["content"].split()[0]: rows[p.id].kept_apart for p in prompts}
    assert apart == kinds
    assert all(r.trained == (r.kept_apart == "") for r in rows.values())
    counts = describe_answers(list(rows.values()), [], [])
    assert counts["kept_apart"] == {CUT: 1, LOOPING: 1, EMPTY: 2}
    assert (counts["trained_answers"], counts["cut_answers"], counts["trained_tokens"]) == (2, 2, 5)
    asked_for, _ = ask(prompts, kinds_reply, Sampling(9, 0.0, train_on_cut=True), folder="b")
    assert sum(r.trained for r in asked_for.values()) == 3  # the looping one still is not


MASKS = {
    "whole": ([1, 2, 9], "stop", ""),
    "calling": ([1, 8], "tool_calls", ""),
    "cut": ([1, 2, 3], "length", ""),
    "endless": ([1, 2, 3], "stop", "no stop token after the answer"),
    "endless call": ([1, 2], "tool_calls", "no stop token after the answer"),
    "two turns": ([1, 9, 2, 9], "stop", "a stop token stands inside the answer"),
    "nothing": ([9], "stop", "the row has no answer: nothing would be trained"),
}


def test_the_mask_of_every_answer_is_checked_and_what_fails_is_counted_and_not_trained_on(ask):
    """A server that serves another model than the target gives answers without its stop token."""
    prompts = {k: next(p for i in range(99) if (p := prompt_of(f"{k}, {i}")).split == "train")
               for k in MASKS}  # fmt: skip

    def reply(request):
        ids, finish, _ = MASKS[request["messages"][-1]["content"].split(",")[0]]
        return chat_body(request, ids, "words", finish)

    checked = Sampling(9, 0.0, train_on_cut=True, stop_ids=(8, 9))
    rows, _ = ask(list(prompts.values()), reply, checked)
    for kind, (_, _, problem) in MASKS.items():
        row = rows[prompts[kind].id]
        assert row.kept_apart == problem and row.trained == (not problem)
        assert row.usable_tokens == (0 if problem else len(row.answer_token_ids))
    counts = describe_answers(list(rows.values()), [], [])["kept_apart"]
    assert counts == {
        p: n for (_, _, p), n in zip(MASKS.values(), (0, 0, 0, 2, 2, 1, 1), strict=True) if p
    }
    unknown, _ = ask(list(prompts.values()), reply, GREEDY, folder="b")  # no stop id is known
    assert unknown[prompts["endless"].id].kept_apart == ""
    with pytest.raises(UserError, match=r"3 x no stop token(?s:.)*server serves this target"):
        ask([prompt_of(f"endless, {i}") for i in range(3)], reply, checked, "c", want_tokens=9)


def test_wanted_tokens_are_those_that_are_trained_on(ask):
    prompts = [prompt_of(f"{'cut' if i % 2 else 'fine'} {i}") for i in range(60)]
    rows, _ = ask(prompts, kinds_reply, want_tokens=30, concurrency=3)
    assert sum(r.usable_tokens for r in rows.values()) == 30
    assert set(rows) == {p.id for p in prompts[:19]}
    more, _ = ask(prompts, kinds_reply, want_tokens=36, concurrency=3)
    assert set(more) == {p.id for p in prompts[:23]}


def test_no_more_is_asked_than_is_wanted(ask):
    """One at a time: with more in flight a slow thread lets others run ahead of it."""
    prompts = [prompt_of(f"{'cut' if i % 2 else 'fine'} {i}") for i in range(60)]
    rows, requests = ask(prompts, kinds_reply, want_tokens=30, concurrency=1)
    assert set(rows) == {p.id for p in prompts[:19]} and len(requests) == 19
    more, requests = ask(prompts, kinds_reply, want_tokens=36, concurrency=1)
    assert set(more) == {p.id for p in prompts[:23]} and len(requests) == 4


def test_a_run_whose_answers_are_all_cut_stops_and_says_what_to_do(ask):
    prompts = [prompt_of(f"cut {i}") for i in range(200)]
    with pytest.raises(UserError, match=r"50 x cut by the length(?s:.)*train_on_cut"):
        ask(prompts, kinds_reply, want_tokens=1000)
    with pytest.raises(UserError, match="none of 3 answers"):
        ask(prompts[:3], kinds_reply, want_tokens=1000, folder="b")


def test_every_prompt_is_answered_once_before_any_is_answered_again(ask):
    sampled = Sampling(9, 0.8)
    rows, requests = ask(PROMPTS[:4], sampling=sampled, answers_per_prompt=3, concurrency=1)
    ids = [p.id for p in PROMPTS[:4]]
    assert list(rows) == ids + [f"{i}-1" for i in ids] + [f"{i}-2" for i in ids]
    assert len({r["seed"] for r in requests}) == 12
    assert {r.sampling["seed"] for r in rows.values()} == {r["seed"] for r in requests}
    grown, requests = ask(PROMPTS[:4], sampling=sampled, answers_per_prompt=4)
    assert len(grown) == 16 and len(requests) == 4


def test_a_row_says_how_and_by_whom_it_was_made(ask, tmp_path):
    rows, (request,) = ask(PROMPTS[:1], sampling=Sampling(9, 0.8), target_fingerprint="abc")
    (row,) = rows.values()
    assert row.sampling == {"max_new_tokens": 9, "temperature": 0.8, "seed": request["seed"],
                            "thinking": "default"}  # fmt: skip
    assert (row.target_fingerprint, row.engine) == ("abc", "0.32.0")
    assert row.server.startswith("http://127.0.0.1:")
    assert read_answers(tmp_path / "a") == [row]


def test_the_phase_asks_all_its_servers_and_tells_what_it_made(monkeypatch, tmp_path):
    from eagle3lib.data.phase import PromptSets, answer_all
    from eagle3lib.lab.params import GenerateParams
    from eagle3lib.lab.run import Phase

    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")  # no stop ids: the words here have none
    servers = [StubServer(own_words), StubServer(own_words)]
    prompts = [prompt_of(f"one {i}", "x", "two") for i in range(40)]
    sets = PromptSets(
        train=[p for p in prompts if p.split == "train"],
        heldout=[p for p in prompts if p.split == "heldout"],
        rejects=[],
    )
    cfg = GenerateParams(run="x", server=",".join(s.url for s in servers), answer_tokens=100)
    phase = Phase(cfg, {"target": "print of the target"})
    try:
        metrics = answer_all(phase, cfg, sets, tmp_path)
    finally:
        for server in servers:
            server.kill()
    rows = read_answers(phase.folder)
    assert metrics["answers"] == len(rows) == sum(metrics["servers"].values())
    assert set(metrics["servers"]) == {f"{s.url} (0.32.0)" for s in servers}
    assert metrics["trained_tokens"] >= 100 and metrics["tokens_per_s"] > 0
    assert sum(len(s.requests) for s in servers) == len(rows) + metrics["surplus_answers"]
    assert sum(r.split == "heldout" for r in rows) == 2 * len(sets.heldout)
    assert {r.target_fingerprint for r in rows} == {"print of the target"}


LOOP = [*range(20), *([50, 51, 52, 53, 54, 55, 56, 57] * 7)]


def test_a_loop_is_cut_off_what_is_trained_on_and_never_what_is_held_out(ask):
    """Its first round stays: the target says it, and does not repeat itself yet."""
    sampling = Sampling(9, 0.0, train_on_cut=True, train_before_loop=True)
    prompts = [next(p for i in range(99) if (p := prompt_of(f"ask {i}")).split == split)
               for split in ("train", "heldout")]  # fmt: skip
    rows, _ = ask(prompts, lambda r: chat_body(r, LOOP, "words", "length"), sampling)
    train, held = (rows[p.id] for p in prompts)
    assert train.trained and not train.looping
    assert train.answer_token_ids == LOOP[:28] and train.loop_tokens == len(LOOP) - 28
    assert (held.answer_token_ids, held.loop_tokens, held.kept_apart) == (LOOP, 0, LOOPING)
    earlier = prompt_of("one", "THEIRS", "two")
    found, _ = ask([earlier], lambda r: chat_body(r, LOOP, "words", "length"), sampling, "b")
    assert all(r.kept_apart == LOOPING for r in found.values())


def test_what_loops_from_the_first_token_on_has_nothing_to_train_on(ask):
    sampling = Sampling(9, 0.0, train_on_cut=True, train_before_loop=True)
    prompt = next(p for i in range(99) if (p := prompt_of(f"ask {i}")).split == "train")
    rows, _ = ask([prompt], lambda r: chat_body(r, [5] * 40, "words", "length"), sampling)
    assert rows[prompt.id].kept_apart == LOOPING and rows[prompt.id].loop_tokens == 0
