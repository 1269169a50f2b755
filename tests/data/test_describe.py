"""What answers are made of, by hand."""

from __future__ import annotations

import pytest

from eagle3lib.data.describe import script_of, text_table, top_ngrams
from eagle3lib.data.rows import AnswerRow


def answer(text, name="workload"):
    return AnswerRow(id=text[:9], set=name, split="train", messages=[], prompt_token_ids=[1],
                     answer_token_ids=[2], text=text, finish_reason="stop")  # fmt: skip


@pytest.mark.parametrize(
    ("letter", "script"), [("é", "LATIN"), ("ж", "CYRILLIC"), ("語", "CJK"), ("ひ", "HIRAGANA")]
)
def test_scripts(letter, script):
    assert script_of(letter) == script


def test_code_and_scripts_are_counted_by_set():
    rows = [answer("ab ```x=1``` c"), answer("no code at all"), answer("дом", "general")]
    workload, general = text_table(rows).to_dict("records")
    assert workload["with code"] == "50%"
    assert workload["characters in code"] == f"{9 / 28:.0%}"
    assert general["letters"] == "Cyrillic 100.0%"


def test_a_fence_that_the_limit_cut_is_code_to_the_end():
    assert text_table([answer("```print(1)")]).iloc[0]["characters in code"] == "100%"


def test_a_run_counts_once_an_answer_however_often_it_stands_there():
    rows = [answer("a b c d e " * 9), answer("x a b c d e"), answer("something else")]
    table = top_ngrams(rows, size=5, most=1)
    assert table.to_dict("records") == [{"words": "a b c d e", "answers": 2, "share": 2 / 3}]


def test_no_answers_are_no_runs():
    assert len(top_ngrams([])) == 0
    assert len(text_table([])) == 0
