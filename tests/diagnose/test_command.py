"""``eagle3 diagnose``: what it can't use it says, and what it found it prints."""

from __future__ import annotations

import json

import pytest

from eagle3lib.cli_diagnose import causes_text, diagnose
from eagle3lib.diagnose.asked import asked_rows, with_steps
from eagle3lib.diagnose.cause import Cause
from eagle3lib.lab.errors import UserError
from eagle3lib.measure.arms import OWN, PLAIN


def rows_file(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_a_run_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    with pytest.raises(UserError, match="no run 'nowhere'"):
        diagnose(run="nowhere", drafter=None)


def asked(path, *rows):
    live = None  # rows that were answered before ask nobody
    return asked_rows(rows_file(path / "p.jsonl", *rows), live, "", 8)


def test_rows_with_a_record_are_read_without_a_server(tmp_path):
    row = {"id": "a", "prompt_token_ids": [1], "answer_token_ids": [2, 3], "accepted": [0],
           "drafted": [3]}  # fmt: skip
    found = asked(tmp_path, row)
    (only,) = found.rows
    assert (only.prompt, only.accepted, only.drafted, found.by) == ("a", [0], [3], "engine")
    assert with_steps(found.rows, 0)[1] == 3, "K is that of the record"
    assert with_steps(found.rows, 2)[1] == 2, "K as asked for"


def test_rows_of_a_benchmark_keep_their_arm(tmp_path):
    ids = {"prompt_token_ids": [1], "answer_token_ids": [2, 3]}
    found = asked(tmp_path, ids | {"arm": PLAIN, "set": "general", "repeat": 1}, ids)
    assert [(r.arm, r.set, r.repeat) for r in found.rows] == [
        (PLAIN, "general", 1), (OWN, "workload", 0)]  # fmt: skip


def test_k_that_nothing_tells_is_asked_for(tmp_path):
    rows = asked(
        tmp_path, {"prompt_token_ids": [1], "answer_token_ids": [2, 3], "accepted": [1]}
    ).rows
    with pytest.raises(UserError, match="K is not known: row row-1"):
        with_steps(rows, 0)
    assert with_steps(rows, 4)[0][0].drafted == [4]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "is empty"),
        ([{"messages": []}], "p.jsonl:1 can't be used"),
        ([{"prompt_token_ids": [], "answer_token_ids": [2]}], "p.jsonl:1 can't be used"),
        ([{"prompt_token_ids": [1], "answer_token_ids": "two"}], "answer_token_ids"),
        ([{"prompt_token_ids": [1], "answer_token_ids": [2], "accepted": [-1]}], "accepted"),
        ([{"prompt_token_ids": [1], "answer_token_ids": [2]}, {"prompt": "x"}],
         "p.jsonl:2 is not answered yet"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_used_are_refused_by_their_place(tmp_path, rows, said):
    with pytest.raises(UserError, match=said):
        asked(tmp_path, *rows)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="no file of prompts"):
        asked_rows(tmp_path / "none.jsonl", None, "", 8)


def test_every_cause_is_printed_with_proof_and_remedy():
    text = causes_text([Cause("map", "error", "the map is wrong", "3 of 9", "export it", cost=0.4,
                              experiment="side by side", command="eagle3 run x 05")])  # fmt: skip
    for word in ("the map is wrong", "3 of 9", "costs 0.40", "side by side", "export it", "x 05"):
        assert word in text
