"""``eagle3 diagnose``: what it can't use it says, and what it found it prints."""

from __future__ import annotations

import json

import pytest

from eagle3lib.cli_diagnose import _asked, causes_text, diagnose
from eagle3lib.diagnose.cause import Cause
from eagle3lib.lab.errors import UserError


def rows_file(path, *rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def test_a_run_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path))
    with pytest.raises(UserError, match="no run 'nowhere'"):
        diagnose(run="nowhere", drafter=None)


def test_rows_with_a_record_are_read_without_a_server(tmp_path):
    row = {"id": "a", "prompt_token_ids": [1], "answer_token_ids": [2, 3], "accepted": [0],
           "drafted": [3]}  # fmt: skip
    (found,) = _asked(rows_file(tmp_path / "p.jsonl", row), "", 8)
    assert (found.prompt, found.accepted, found.drafted) == ("a", [0], [3])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": []}, "row 1 can't be used"),
        ({"prompt_token_ids": [1], "answer_token_ids": [2]}, "record of rounds"),
    ],
)
def test_rows_that_prove_nothing_are_refused(tmp_path, row, said):
    with pytest.raises(UserError, match=said):
        _asked(rows_file(tmp_path / "p.jsonl", row), "", 8)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UserError, match="not there"):
        _asked(tmp_path / "none.jsonl", "", 8)


def test_every_cause_is_printed_with_proof_and_remedy():
    text = causes_text([Cause("map", "error", "the map is wrong", "3 of 9", "export it", cost=0.4,
                              experiment="side by side", command="eagle3 run x 05")])  # fmt: skip
    for word in ("the map is wrong", "3 of 9", "costs 0.40", "side by side", "export it", "x 05"):
        assert word in text
