"""What answers are made of, by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from eagle3lib.data.describe import data_report, lengths, script_of, text_counts, top_ngrams
from eagle3lib.data.near import near_duplicate_answers
from eagle3lib.data.rows import AnswerRow


def answer(text, name="workload"):
    return AnswerRow(id=text[:9], set=name, split="train", messages=[], prompt_token_ids=[1],
                     answer_token_ids=[2], text=text, finish_reason="stop")  # fmt: skip


@pytest.mark.parametrize(
    ("letter", "script"), [("é", "LATIN"), ("ж", "CYRILLIC"), ("語", "CJK"), ("ひ", "HIRAGANA")]
)
def test_scripts(letter, script):
    assert script_of(letter) == script


def test_every_character_is_code_a_letter_of_a_script_or_neither():
    rows = [
        answer("ab ```Python x=1``` c"),
        answer("no ```x``` ```x``` !"),
        answer("дом", "general"),
    ]
    counts = text_counts(rows)
    assert counts["workload"] == {
        "answers": 2, "with_code": 2,
        "characters": {"code": 30, "digits, marks, spaces": 6, "Latin": 5},
        "languages": {"x": 2, "python": 1},
    }  # fmt: skip
    assert counts["general"]["characters"] == {"Cyrillic": 3}
    for name, part in counts.items():
        texts = [row.text for row in rows if row.set == name]
        assert sum(part["characters"].values()) == sum(map(len, texts))


def test_a_fence_that_the_limit_cut_is_code_to_the_end():
    assert text_counts([answer("```\nprint(1)")])["workload"]["characters"] == {"code": 12}
    assert text_counts([answer("```\nprint(1)")])["workload"]["languages"] == {"not named": 1}


def test_lengths_are_those_of_rows():
    rows = [replace(answer("x"), prompt_token_ids=[1] * n) for n in (9, 1, 5, 30)]
    found = lengths([*rows, replace(rows[0], split="heldout")])
    assert found["workload train"]["prompt"] == {
        "least": 1, "median": 9, "p90": 30, "most": 30, "all": 45,
    }  # fmt: skip
    assert found["workload heldout"]["answer"]["all"] == 1


TEN = "one two three four five six seven eight nine ten"


def test_near_duplicates_among_answers_are_counted_and_shown():
    """Case and marks make no difference; d and e share 6 of 8 5-grams, 0.75."""
    rows = [
        replace(answer(text), id=name, messages=[{"role": "user", "content": asked}])
        for name, asked, text in (
            ("a", "p", f"{TEN} {TEN} end"), ("b", "q", f"{TEN} {TEN} END!"),
            ("c", "p", f"{TEN} {TEN} end"), ("d", "p", TEN), ("e", "p", f"{TEN} other words"),
            ("f", "p", "?!"), ("g", "p", "?!"),
        )
    ]  # fmt: skip
    near = near_duplicate_answers(rows, 0.8)
    assert near.pairs == [(1.0, "b", "a"), (1.0, "c", "a")]
    assert (near.answers, near.same_prompt) == (7, 1)
    assert [pair[1:] for pair in near_duplicate_answers(rows, 0.75).pairs] == [
        ("b", "a"), ("c", "a"), ("e", "d"),
    ]  # fmt: skip
    assert near.as_dict()["pairs"] == [[1.0, "b", "a"], [1.0, "c", "a"]]


def test_an_answer_that_has_only_its_reasoning_is_compared_by_that():
    first, second = (replace(answer(""), id=i, reasoning=TEN) for i in "ab")
    assert near_duplicate_answers([first, second]).pairs == [(1.0, "b", "a")]


def test_the_report_of_a_target_without_a_template_says_so_and_counts_on(tmp_path):
    report = data_report([answer("a b c d e")], tmp_path, [2])
    assert "tokenizer can't be loaded" in report["template_problem"]
    assert report["tokens_by_role"] == {"workload": {"prompt of unknown parts": 1, "answer": 1}}
    assert report["common_runs"] == [{"words": "a b c d e", "answers": 1, "share": 1.0}]
    assert json.loads(json.dumps(report)) == report


def test_of_many_rows_some_are_looked_at_evenly_and_lengths_are_of_all(tmp_path):
    rows = [answer(f"word{i} b c d e") for i in range(10)]
    report = data_report(rows, tmp_path, [2], most_rows=5)
    assert (report["rows"], report["rows_looked_at"]) == (10, 5)
    seen = {run["words"].split()[0] for run in report["common_runs"]}
    assert seen == {"word0", "word2", "word4", "word6", "word8"}
    assert report["lengths"] == lengths(rows)


def test_a_run_counts_once_an_answer_however_often_it_stands_there():
    rows = [answer("a b c d e " * 9), answer("x a b c d e"), answer("something else")]
    table = top_ngrams(rows, size=5, most=1)
    assert table.to_dict("records") == [{"words": "a b c d e", "answers": 2, "share": 2 / 3}]


def test_no_answers_are_no_runs():
    assert len(top_ngrams([])) == 0
    assert text_counts([]) == lengths([]) == {}
    assert near_duplicate_answers([]).as_dict()["near_an_earlier_one"] == 0
