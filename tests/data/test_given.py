"""Conversations that others answered: rows for training, without a server, and never held out."""

import json
import random

import pytest
from chat_formats import TOOLS, call, template_of
from stub_server import StubServer, own_words

from eagle3lib.data.given import GivenAnswers, check_refused, take_given, write_given
from eagle3lib.data.phase import answer_all, load_prompt_sets
from eagle3lib.data.prompts import Prompt, prompt_id, read_source
from eagle3lib.data.rows import read_answers
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl
from eagle3lib.lab.params import GenerateParams
from eagle3lib.lab.run import Phase


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def given_of(*conversations, tools=()):
    prompts, answers = [], {}
    for messages in conversations:
        key = prompt_id(messages[:-1], tools)
        prompts.append(Prompt(key, tuple(messages[:-1]), "workload", tuple(tools)))
        answers[key] = messages[-1]
    return GivenAnswers(sorted(prompts, key=lambda p: p.id), answers, {})


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_every_assistant_turn_is_a_row_of_the_templates_own_ids():
    template = template_of("llama3")
    messages = chat("1+1?", "2", "and 2+2?", "It is 4.")
    taken = take_given(given_of(messages), template, target_fingerprint="abc")
    assert taken.rejects == [] and taken.not_needed == 0
    key = prompt_id(messages[:-1])
    assert [row.id for row in taken.rows] == [f"{key}.0", key]
    for row, length, said in zip(taken.rows, (1, 3), ("2", "It is 4."), strict=True):
        prompt = template.render(messages[:length], prompt=True)
        assert row.messages == messages[:length] and row.prompt_token_ids == template.ids(prompt)
        assert template.decode(row.answer_token_ids) == f"{said}<|eot_id|>"
        assert (row.text, row.finish_reason, row.token_ids_from) == (said, "stop", "given")
        assert (row.target_fingerprint, row.server, row.kept_apart) == ("abc", "", "")


def test_what_can_not_be_trained_on_is_refused_or_kept_apart_with_its_reason():
    template = template_of("qwen3")
    bad = chat("x", "<|im_end|> stands in the answer")
    loop = chat("y", "abcdefgh" * 9)
    of_train = (
        f"z{i}" for i in range(99) if given_of(chat(f"z{i}", "")).prompts[0].split == "train"
    )
    asked = next(of_train)
    taken = take_given(given_of(bad, loop, chat(asked, "fine")), template, thinking="off")
    (reject,) = taken.rejects
    assert reject.reason == "a stop token stands inside the answer"
    assert {(r.messages[0]["content"], r.kept_apart) for r in taken.rows} == {
        ("y", "looping"), (asked, ""),
    }  # fmt: skip
    check_refused(taken, 0.34)
    with pytest.raises(UserError, match=r"1 of 3 given answers were refused, .*1 x a stop token"):
        check_refused(taken, 0.3)
    only_loops = take_given(given_of(loop), template, thinking="off")
    with pytest.raises(UserError, match="0 can be trained on: 1 x looping"):
        check_refused(only_loops, 1.0)


def test_reasoning_and_calls_of_tools_are_trained_as_the_template_writes_them():
    template = template_of("qwen3")
    thought = [*chat("1+1?"), {"role": "assistant", "content": "2", "reasoning_content": "sum"}]
    (row,) = take_given(given_of(thought), template).rows
    assert (row.text, row.reasoning, row.reasoning_kind) == ("2", "sum", "complete")
    assert template.decode(row.answer_token_ids) == "<think>\nsum\n</think>\n\n2<|im_end|>"
    # Thinking switched off contradicts a row that thinks.
    (reject,) = take_given(given_of(thought), template, thinking="off").rejects
    assert reject.reason == "the finished turn does not go on from the generation prompt"
    asking = {"role": "assistant", "content": "", "tool_calls": [call("weather", city="Rome")]}
    tools = [*chat("Rome?"), asking, {"role": "tool", "content": "sun"}, *chat("", "Sunny.")[1:]]
    rows = take_given(given_of(tools, tools=TOOLS), template, thinking="off").rows
    assert "weather" in template.decode(rows[0].answer_token_ids) and rows[0].tool_calls
    assert rows[1].text == "Sunny." and rows[1].tools == TOOLS


@pytest.mark.parametrize("want", [1, 40, 10_000])
def test_the_shortest_beginning_that_holds_enough_is_taken(want):
    given = given_of(*[chat(f"question {i}", f"answer {i}" * (1 + i % 3)) for i in range(12)])
    taken = take_given(given, template_of("smollm2"), want_tokens=want)
    sums = [sum(r.usable_tokens for r in taken.rows[:n]) for n in range(len(taken.rows) + 1)]
    assert all(tokens < want for tokens in sums[:-1])
    assert sums[-1] >= want or taken.conversations == 12
    assert taken.conversations + taken.not_needed == 12
    assert [r.id for r in taken.rows] == [p.id for p in given.prompts][: len(taken.rows)]


ANSWERED = chat("1+1?", "2")
FORMATS = {
    "messages": {"messages": ANSWERED},
    "conversations": {"conversations": [{"from": "human", "value": "1+1?"},
                                        {"from": "gpt", "value": "2"}]},
    "prompt": {"prompt": "1+1?", "completion": "2"},
    "prompt in messages": {"prompt": ANSWERED[:1], "completion": ANSWERED[1:]},
    "instruction": {"instruction": "1+1?", "input": "", "output": "2"},
    "response": {"prompt": "1+1?", "response": "2"},
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", FORMATS)
def test_answers_are_read_from_all_the_formats_of_prompts(tmp_path, name, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write(path, [FORMATS[name]])
    else:
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist([FORMATS[name]]), path)
    found = read_source(path, "workload", answered=True)
    (prompt,) = found.prompts
    assert list(prompt.messages) == ANSWERED[:1] and prompt.id == prompt_id(ANSWERED[:1])
    assert found.answers == {prompt.id: ANSWERED[1]}
    assert "cut off" not in found.summary()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1+1?"}, "no answer"),
        ({"messages": ANSWERED[:1]}, "no answer"),
        ({"text": "1+1? 2"}, "no answer"),
        ({"prompt": "1+1?", "completion": " "}, "an empty message"),
        ({"prompt": "1+1?", "completion": 2}, "a message without text"),
        ({"prompt": "1+1?", "completion": "\0"}, "a NUL character in the text"),
        ({"messages": ANSWERED, "prompt": "x", "completion": "y"}, ""),
    ],
)
def test_rows_without_a_good_answer_are_rejected(tmp_path, row, reason):
    found = read_source(write(tmp_path / "a.jsonl", [row]), "workload", answered=True)
    assert [r.reason for r in found.rejects] == ([reason] if reason else [])
    assert len(found.answers) == (not reason)


def test_of_two_answers_to_one_prompt_the_same_stays_wherever_it_stands(tmp_path):
    rows = [{"messages": chat("1+1?", answer)} for answer in ("2", "two", "II", "2")]
    kept = set()
    for seed in range(8):
        shuffled = random.Random(seed).sample(rows, len(rows))
        found = read_source(write(tmp_path / "a.jsonl", shuffled), "workload", answered=True)
        (answer,) = found.answers.values()
        kept.add(answer["content"])
        assert [r.reason for r in found.rejects] == ["duplicate prompt"] * 3
        (place,) = found.places.values()
        line = int(place.split(":")[1])
        assert shuffled[line - 1]["messages"][1] == answer
        assert {r.where for r in found.rejects} == {
            f"a.jsonl:{n}" for n in range(1, 5) if n != line
        }
    assert len(kept) == 1


CONVERSATIONS = [chat(f"question {i}?", f"answer {i}.") for i in range(60)]
CONVERSATIONS += [chat(f"ask {i}?", f"so {i}.", f"and {i}?", f"then {i}.") for i in range(20)]


@pytest.fixture
def run_phase(monkeypatch, tmp_path):
    """Runs phase 01 on ``rows`` of given answers into one folder; a second call resumes it."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    template = template_of("smollm2")
    template.tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text(
        json.dumps({"eos_token_id": list(template.stop_ids)})
    )
    server = StubServer(own_words)

    def run(rows, name="x", **values):
        given = write(tmp_path / "given.jsonl", [{"messages": m} for m in rows])
        work = [{"prompt": f"question {i}?"} for i in range(60)]
        workload = write(tmp_path / "work.jsonl", work)
        options = {"answer_tokens": 10_000, "heldout_workload": 5, "heldout_general": 0} | values
        cfg = GenerateParams(run=name, workload=str(workload), answers=str(given),
                             server=server.url, **options)  # fmt: skip
        phase = Phase(cfg, {"target": "print"})
        sets = load_prompt_sets(cfg, phase.folder)
        return answer_all(phase, cfg, sets, tmp_path / "target"), phase.folder

    run.server, run.template = server, template
    yield run
    server.kill()


def content(folder):
    rows = read_answers(folder)
    assert len({row.id for row in rows}) == len(rows)
    return {row.id: row for row in rows}


def test_given_answers_are_trained_on_and_the_target_answers_what_is_held_out(run_phase, capsys):
    metrics, folder = run_phase(CONVERSATIONS)
    rows = read_answers(folder)
    given = [row for row in rows if row.token_ids_from == "given"]
    held = [row for row in rows if row.token_ids_from == "served"]
    assert {r.split for r in given} == {"train"} and {r.split for r in held} == {"heldout"}
    asked = {r["messages"][-1]["content"] for r in run_phase.server.requests}
    assert asked == {r.messages[-1]["content"] for r in held} and len(asked) == 5
    # The same questions stand in both files: content alone says on which side they are.
    assert not asked & {r.messages[0]["content"] for r in given}
    train = [m for m in CONVERSATIONS if Prompt(prompt_id(m[:-1]), (), "").split == "train"]
    assert len(given) == sum(len(m) // 2 for m in train)
    assert metrics["token_ids_from"] == {"served": 5, "rendered": 0, "given": len(given)}
    told = metrics["given_answers"]
    assert told["conversations"] == len(train)
    assert told["held_out_conversations_left_out"] == len(CONVERSATIONS) - len(train) > 0
    assert "unknown" in told["on_policy"] and "not the target's own" in capsys.readouterr().out
    assert metrics["servers"] == {f"{run_phase.server.url} (0.32.0)": 5}


def test_a_killed_run_a_shuffled_file_and_more_tokens_end_with_the_same_rows(run_phase):
    whole = content(run_phase(CONVERSATIONS)[1])
    shuffled = random.Random(1).sample(CONVERSATIONS, len(CONVERSATIONS))
    _, folder = run_phase(shuffled, "killed", answer_tokens=100)
    few = content(folder)
    assert 0 < len(few) < len(whole) and few.items() <= whole.items()
    path = folder / "answers.jsonl"
    for size in (7, path.stat().st_size // 2, path.stat().st_size - 3):
        path.write_bytes(path.read_bytes()[:size])
        run_phase(shuffled, "killed", answer_tokens=100)
        assert content(folder) == few
    run_phase(CONVERSATIONS, "killed")
    assert content(folder) == whole


def test_refused_turns_stand_beside_the_other_rejects_once_and_do_not_hide_a_dead_server(
    run_phase,
):
    bad = [chat(f"bad {i}?", f"<|im_end|> {i}") for i in range(10)]
    for _ in range(2):
        metrics, folder = run_phase([*CONVERSATIONS, *bad, chat("x")])
        refused = [r for r in read_jsonl(folder / "rejects.jsonl") if "stop token" in r["reason"]]
        assert 0 < len(refused) == metrics["given_answers"]["refused_turns"] <= 10
        assert {r["stage"] for r in refused} == {"reading"}
        assert all(r["where"].startswith("given.jsonl:") for r in refused)
        assert metrics["left_out"]["no answer"] == 1
    with pytest.raises(UserError, match="given answers were refused"):
        run_phase([*CONVERSATIONS[:3], *bad], "bad", max_reject_share=0.3)
    # Sixty given rows beside five held-out prompts, all refused: that is all of what was asked.
    run_phase.server.reply = lambda request: "400"
    with pytest.raises(UserError, match="5 of 5 prompts were refused"):
        run_phase(CONVERSATIONS, "dead")


def test_a_near_duplicate_of_a_held_out_prompt_is_not_trained_on(run_phase):
    words = " ".join(f"w{i}" for i in range(30))
    held = next(c for c in (f"question {i}?" for i in range(60))
                if Prompt(prompt_id(chat(c)), (), "").split == "heldout")  # fmt: skip
    near = [chat(f"{held} {words} {i}", "a") for i in range(12)]
    metrics, folder = run_phase([*CONVERSATIONS, *near], near_duplicate_similarity=0.8)
    kept = [r for r in read_answers(folder) if words in r.messages[0]["content"]]
    assert len(kept) <= 1  # one of the twelve stays
    assert metrics["left_out"]["near-duplicate prompt"] >= 11


def test_writing_is_append_only_and_writes_nothing_twice(tmp_path):
    rows = take_given(given_of(chat("a", "b"), chat("c", "d")), template_of("smollm2")).rows
    assert write_given(tmp_path, rows[:1]) == rows[:1]
    before = (tmp_path / "answers.jsonl").read_bytes()
    assert write_given(tmp_path, rows) == rows[1:]
    assert (tmp_path / "answers.jsonl").read_bytes().startswith(before)
    assert read_answers(tmp_path) == rows and write_given(tmp_path, rows) == []
