"""The figures and tables of phase 01's data report say what its counts say."""

from __future__ import annotations

import pytest

from eagle3lib.data.describe import data_report
from eagle3lib.data.roles import ROLES
from eagle3lib.data.rows import AnswerRow
from eagle3lib.report.figures import length_histograms, ngram_bars, share_bars
from eagle3lib.report.tables import (
    lengths_table,
    near_answers_table,
    on_policy_table,
    reasoning_table,
)


def answer(number, name="workload", split="train", text="```py\nx\n``` <b>one two three</b> four"):
    return AnswerRow(id=f"{number}", set=name, split=split, prompt_token_ids=[1] * number,
                     messages=[{"role": "user", "content": "<i>Why?</i>"}], text=text,
                     answer_token_ids=[2, 3], finish_reason="stop")  # fmt: skip


ROWS = [answer(3), answer(5), answer(7, split="heldout"), answer(9, "general", text="Nothing")]


def test_every_row_is_in_both_histograms():
    drawn = length_histograms(ROWS).data
    assert sorted(value for trace in drawn[:3] for value in trace.x) == [3, 5, 7, 9]
    assert sum(len(trace.x) for trace in drawn[3:]) == len(ROWS)
    assert [trace.showlegend for trace in drawn] == [True] * 3 + [False] * 3


def test_the_parts_of_every_bar_make_a_whole_and_keep_their_counts():
    counts = {"workload": {"answer": 6, "user": 3, "system": 1}, "general": {"user": 2}, "no": {}}
    drawn = share_bars(counts, "Tokens by role", "tokens").data
    names = [trace.name for trace in drawn]
    assert names == [role for role in ROLES if role in names]
    for index, (name, count) in enumerate(counts.items()):
        assert sum(trace.x[index] for trace in drawn) == pytest.approx(1.0 if count else 0.0)
        assert {t.name: t.customdata[index] for t in drawn if t.customdata[index]} == count, name
    assert len({trace.marker.color for trace in drawn}) == len(drawn)


def test_the_commonest_run_stands_on_top():
    runs = [{"words": w, "answers": n, "share": n / 4} for w, n in (("a b", 3), ("c d", 2))]
    assert list(ngram_bars(runs).data[0].y) == ["c d", "a b"]
    assert len(ngram_bars([]).data[0].y) == 0


def test_tables_show_the_reports_counts(tmp_path):
    report = data_report(ROWS, tmp_path, [2])
    lengths = lengths_table(report).data
    assert list(lengths["rows of"]) == [
        name for name in ("general train", "workload heldout", "workload train") for _ in range(2)
    ]
    assert list(lengths["all"]) == [9, 2, 7, 2, 8, 4]
    made = reasoning_table(report).data.set_index("set")
    assert dict(made["tokens made"]) == {"workload": 6, "general": 2}
    assert dict(made["with code"]) == {"workload": "100%", "general": "0%"}
    assert made.loc["workload", "code blocks"] == "py 3"
    near = near_answers_table(report, ROWS)
    assert list(near.data.value)[:3] == ["2 of 4", "2", "1.00"]


def test_the_example_of_a_near_duplicate_is_text_not_markup(tmp_path):
    """Answers hold HTML; a notebook that renders it shows another answer than the target's."""
    page = near_answers_table(data_report(ROWS, tmp_path, [2]), ROWS).to_html()
    assert "one two three" in page
    assert "<b>" not in page and "<i>" not in page


def test_a_share_is_of_the_tokens_that_were_read():
    line = {"set": "workload", "token_ids_from": "given", "thinking": "on", "temperature": None,
            "answers": 2, "of": 9, "greedy": 3, "tokens": 12}  # fmt: skip
    (shown,) = on_policy_table([line]).data.to_dict("records")
    assert shown["on-policy share"] == "25.0%"
    assert shown["answers read"] == "2 of 9"
