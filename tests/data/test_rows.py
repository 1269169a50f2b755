"""Rows as files: exact for any text, in JSONL and in Arrow, and old rows still read."""

import json
from dataclasses import asdict

import pytest

from eagle3lib.data.export import export_dataset, read_dataset
from eagle3lib.data.prompts import Reject, write_read_rejects
from eagle3lib.data.rows import AnswerRow, json_line, read_answers, read_rejects, row_id
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"  # one picture out of five code points
ODD = ["", "\u2028\u2029\x85", "\x00\x1f\x7f", "🙂" + FAMILY, "\ufeff bom", "a\r\nb\rc", "\ufffd",
       "\U0010ffff", "e\u0301 \u202e", '"\\/\b', "\x1c", "\x1e", "\ud7ff", "\ue000"]  # fmt: skip


def row(index=0, text="x", **more):
    values = {
        "id": f"row-{index}", "set": "workload", "split": "train",
        "messages": [{"role": "user", "content": text}], "prompt_token_ids": [1, 2],
        "answer_token_ids": [3, index], "text": text, "finish_reason": "stop",
    }  # fmt: skip
    return AnswerRow(**(values | more))


def write(folder, rows):
    (folder / "answers.jsonl").write_bytes(b"".join(json_line(asdict(r)) for r in rows))
    return folder


def test_jsonl_is_exact_for_any_text_even_half_an_emoji(tmp_path):
    rows = [row(i, text, reasoning=text) for i, text in enumerate([*ODD, "half \ud83d", "\udc00"])]
    assert read_answers(write(tmp_path, rows)) == rows


def test_a_dataset_reads_back_equal_with_rows_of_different_shapes(tmp_path):
    call = {"id": "1", "function": {"name": "f", "arguments": '{"b": 1, "a": [null]}'}}
    rows = [row(i, text, reasoning=text) for i, text in enumerate(ODD)]
    rows += [
        row(90, messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]),
        row(91, tools=[{"function": {"parameters": {"x": {}}}}, {"other": 1}], tool_calls=[call]),
        row(92, looping=True, repeat=2, turn=1, sampling={"temperature": 0.5, "seed": 7}),
        row(93, answer_token_ids=[], prompt_token_ids=[2**31]),
    ]
    path = export_dataset(write(tmp_path, rows))
    assert path == tmp_path / "dataset" and read_dataset(path) == rows
    assert export_dataset(tmp_path, tmp_path / "elsewhere") == tmp_path / "elsewhere"


def test_datasets_of_any_rows_have_one_schema(tmp_path):
    from datasets import Dataset, concatenate_datasets

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    bare = row(0, answer_token_ids=[], messages=[])
    one = export_dataset(write(tmp_path / "a", [bare]))
    two = export_dataset(write(tmp_path / "b", [row(1, tools=[{"x": 1}])]))
    both = concatenate_datasets([Dataset.load_from_disk(str(p)) for p in (one, two)])
    assert len(both) == 2


def test_what_arrow_cannot_hold_is_named_and_nothing_is_written(tmp_path):
    write(tmp_path, [row(0), row(1, "half \ud83d")])
    with pytest.raises(UserError, match="text of row row-1 holds half a surrogate"):
        export_dataset(tmp_path)
    assert not (tmp_path / "dataset").exists()
    with pytest.raises(UserError, match="no answers"):
        export_dataset(tmp_path / "empty")


def test_rows_of_before_still_read_and_their_looping_ones_stay_untrained(tmp_path):
    old = {
        "id": "1", "set": "workload", "split": "train", "messages": [], "prompt_token_ids": [1],
        "answer_token_ids": [2], "text": "x", "finish_reason": "length", "looping": False,
    }  # fmt: skip
    lines = [old, old | {"id": "2", "looping": True}, old | {"id": "3", "split": "heldout"}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    rows = read_answers(tmp_path)
    assert [r.trained for r in rows] == [True, False, False]
    assert [r.usable_tokens for r in rows] == [1, 0, 1]
    assert [r.kept_apart for r in rows] == ["", "looping", ""]


def test_ids_of_turns_and_repeats_are_all_different():
    ids = {row_id("ab", r, t, turns=3) for r in range(3) for t in range(3)}
    assert len(ids) == 9 and {"ab", "ab-1", "ab-2", "ab.0", "ab-1.1"} <= ids
    assert row_id("ab", 0, 0, turns=1) == "ab"


def test_rows_that_could_not_be_read_are_no_refusals(tmp_path):
    """They stand in the same file as what the server refused, which alone counts in its share."""
    write_read_rejects(tmp_path, [Reject("p.jsonl:2", "not UTF-8"), Reject("p.jsonl:3", "empty")])
    assert read_rejects(tmp_path) == []
    assert len(read_jsonl(tmp_path / "rejects.jsonl")) == 2
