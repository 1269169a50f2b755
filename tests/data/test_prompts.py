"""Prompt files: every bad row is named with its reason, the split hangs on the content alone."""

import json
import random

import pytest

from eagle3lib.data.phase import load_prompt_sets
from eagle3lib.data.prompts import (
    DUPLICATE,
    HELDOUT_PERCENT,
    Prompt,
    prompt_id,
    read_prompts,
    read_source,
)
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import GenerateParams

SHIPPED = ROOT / "params" / "prompts"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def system(text):
    return {"role": "system", "content": text}


def row(*messages, **more):
    return json.dumps({"messages": list(messages), **more}, ensure_ascii=False).encode()


GOOD = row(user("a good one"))


@pytest.fixture
def read(tmp_path):
    def read(*lines):
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        return read_prompts(path, "workload")

    return read


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"hello", "not JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "not UTF-8"),
        (b"[]", "no list of messages"),
        (b"null", "no list of messages"),
        (b"{}", "none of messages, conversations, prompt, instruction, text"),
        (b'{"messages": null}', "none of messages"),
        (b'{"question": "x"}', "none of messages"),
        (b'{"messages": "x"}', "no list of messages"),
        (row(), "no list of messages"),
        (b'{"messages": ["x"]}', "without text"),
        (row({"role": "user"}), "without text"),
        (row(user(None)), "without text"),
        (row(user([{"type": "text", "text": "x"}])), "without text"),
        (row(user("")), "empty message"),
        (row(user(" \n\u2028")), "empty message"),
        (row(system(""), user("x")), "empty message"),
        (row({"content": "x"}), "roles"),
        (row(assistant("x"), user("y")), "roles"),
        (row(user("x"), user("y")), "roles"),
        (row(system("x")), "roles"),
        (row(user("x"), system("y"), user("z")), "roles"),
        (row(system("x"), system("y"), user("z")), "roles"),
        (row({"role": "tool", "content": "x"}), "roles"),
        (row({"role": ["user"], "content": "x"}), "roles"),
        (row(user("x"), user("y"), assistant("z")), "roles"),
        (row(user("x"), assistant("y"), assistant("z")), "roles"),
        (row(user("x"), {"role": "tool", "content": "y"}), "roles"),
        (row(user("x"), assistant(""), user("z")), "empty message"),
        (rb'{"messages": [{"role": "user", "content": "x \u0000"}]}', "NUL"),
        (b'{"messages": [{"role": "user", "content": "x", "weight": NaN}]}', "JSON can't hold"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"messages": ' + b"9" * 5000 + b"}", "too long"),
        # Half an emoji, as cutting a text at a number of UTF-16 units leaves it.
        (rb'{"messages": [{"role": "user", "content": "x \ud83d"}]}', "surrogate"),
    ],
)
def test_a_bad_row_is_left_out_with_its_line_and_reason(read, line, reason):
    prompts, rejects = read(GOOD, line, row(user("another")))
    assert [p.messages[0]["content"] for p in prompts] == ["a good one", "another"]
    assert [r.where for r in rejects] == ["prompts.jsonl:2"]
    assert reason in rejects[0].reason


@pytest.mark.parametrize(
    "messages",
    [
        [user("x")],
        [system("s"), user("x")],
        [user("x"), assistant("y"), user("z")],
        [system("s"), user("x"), assistant("y"), user("z")],
        [user("\u2028 🙂 \u0085")],
        [user(r"a backslash and a u: \u0000 \ud83d")],
        [{"role": "user", "content": "x", "name": None}],
    ],
)
def test_a_good_row_is_kept_as_it_is(read, messages):
    prompts, rejects = read(row(*messages, source="s", id="ignored"))
    assert [list(p.messages) for p in prompts] == [messages] and rejects == []
    assert prompts[0].id == prompt_id(messages) and prompts[0].set == "workload"


def test_blank_lines_and_windows_line_ends_are_no_rows(read):
    prompts, rejects = read(b"", GOOD + b"\r", b"  ", b"\r")
    assert len(prompts) == 1 and rejects == []


def test_duplicates_are_counted_and_asked_once(read):
    """The same question is a duplicate whatever stands beside it in the row."""
    prompts, rejects = read(GOOD, row(user("a good one"), source="elsewhere"), GOOD)
    assert len(prompts) == 1
    assert [(r.where, r.reason, r.id) for r in rejects] == [
        ("prompts.jsonl:2", "duplicate prompt", prompts[0].id),
        ("prompts.jsonl:3", "duplicate prompt", prompts[0].id),
    ]


def test_line_separators_inside_strings_split_no_lines(read):
    texts = [f"a{mark}b" for mark in "\u2028\u2029\u0085\x1c\x0b\x0c"]
    lines = [row(user(text)) for text in texts]
    # json escapes the control characters below U+0020; the others stand in the file as they are.
    assert "\u2028".encode() in lines[0]
    prompts, rejects = read(*lines)
    assert [p.messages[0]["content"] for p in prompts] == texts and rejects == []


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"{\n[]\n"])
def test_a_file_without_a_usable_row_is_a_user_error_that_names_it(tmp_path, content):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"prompts\.jsonl"):
        read_prompts(path, "workload")


def test_the_error_of_an_all_bad_file_gives_the_first_reason(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n" + row(assistant("x")) + b"\n{\n")
    with pytest.raises(UserError, match=r"2 rows.*roles.*prompts\.jsonl:2"):
        read_prompts(path, "workload")


def test_earlier_answers_stay_and_the_answer_to_the_last_question_is_cut_off(tmp_path):
    """The target answers itself; a row that ends with an answer was once left out."""
    long = [system("s"), user("x"), assistant("y"), user("z")]
    path = tmp_path / "p.jsonl"
    empty = row(user("once"), assistant(""))  # what is cut off need not be usable
    path.write_bytes(b"\n".join([row(*long, assistant("its own")), row(user("alone")), empty]))
    found = read_source(path, "workload")
    assert [list(p.messages) for p in found.prompts] == [long, [user("alone")], [user("once")]]
    assert found.rejects == [] and found.cut_answers == ["p.jsonl:1", "p.jsonl:3"]
    assert "the last answer cut off in 2 rows" in found.summary()


def test_two_answers_to_one_question_are_one_prompt(read):
    prompts, rejects = read(row(user("x"), assistant("a")), row(user("x"), assistant("b")))
    assert len(prompts) == 1 and [r.reason for r in rejects] == [DUPLICATE]


def test_ids_are_those_of_the_first_version():
    """They are in answer files on disk: another hash would ask for every answer again."""
    assert prompt_id([user("x")]) == "aa97aaaade8ba243"


def splits(prompts):
    return {p.messages[0]["content"]: p.split for p in prompts}


def test_the_split_depends_on_content_only(read):
    lines = [row(user(f"question {i}")) for i in range(300)]
    before = splits(read(*lines)[0])
    random.Random(0).shuffle(lines)
    assert splits(read(*lines)[0]) == before
    assert {p.id for p in read(*lines)[0]} == {prompt_id([user(text)]) for text in before}
    fewer = splits(read(*lines[:100], row(user("a new one")), b"{")[0])
    fewer.pop("a new one")
    assert fewer.items() <= before.items()
    assert set(before.values()) == {"train", "heldout"}


def test_about_as_many_as_said_are_held_out():
    """Of 5,000 hashes the share lies within 2 points of 20 but once in some 2,000 such tests."""
    held = sum(
        Prompt(prompt_id([user(str(i))]), (), "workload").split == "heldout" for i in range(5000)
    )
    assert abs(held / 50 - HELDOUT_PERCENT) < 2


def test_any_difference_of_content_role_or_order_is_another_prompt():
    a, b = user("a"), user("b")
    ids = [prompt_id(m) for m in ([a], [b], [a, b], [b, a], [system("a")], [user("a ")])]
    assert len(set(ids)) == len(ids)


def test_training_prompts_come_from_the_workload_alone_and_no_held_out_one_is_trained_on(tmp_path):
    """A general prompt that is also in the workload may be trained on: it can't be held out."""
    questions = [row(user(f"question {i}")) for i in range(60)]
    others = [row(user(f"other {i}")) for i in range(60)]
    (tmp_path / "w.jsonl").write_bytes(b"\n".join([*questions, b"{"]))
    (tmp_path / "g.jsonl").write_bytes(b"\n".join([*questions[:30], *others, b"{"]))
    cfg = GenerateParams(
        workload=str(tmp_path / "w.jsonl"), general=str(tmp_path / "g.jsonl"),
        heldout_workload=3, heldout_general=4,
    )  # fmt: skip
    sets = load_prompt_sets(cfg)
    assert {p.set for p in sets.train} == {"workload"}
    assert {p.split for p in sets.train} == {"train"}
    assert [p.set for p in sets.heldout] == ["workload"] * 3 + ["general"] * 4
    assert not {p.id for p in sets.train} & {p.id for p in sets.heldout}
    assert len({p.id for p in sets.heldout}) == 7
    assert [r.where for r in sets.rejects] == ["w.jsonl:61", "g.jsonl:91"]
    assert sets.table()["prompts"].sum() == len(sets.train) + 7


def test_the_shipped_sets_are_clean_and_apart():
    ids = {}
    for path in sorted(SHIPPED.glob("*.jsonl")):
        prompts, rejects = read_prompts(path, "workload")
        assert rejects == []
        rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        assert [r["id"] for r in rows] == [prompt_id(r["messages"]) for r in rows]
        assert [r["id"] for r in rows] == [p.id for p in prompts]
        ids[path.stem] = [p.id for p in prompts]
    assert len(ids) == 2
    together = [i for of_one in ids.values() for i in of_one]
    assert len(together) == len(set(together)) >= 400


def test_the_shipped_sets_hold_what_the_defaults_ask_for():
    cfg = GenerateParams()
    sets = load_prompt_sets(cfg)
    assert len(sets.heldout) == cfg.heldout_workload + cfg.heldout_general
    assert len(sets.train) * cfg.max_new_tokens > cfg.answer_tokens
