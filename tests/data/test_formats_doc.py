"""docs/formats.md against the code: a field that nobody wrote down helps no stranger."""

from __future__ import annotations

import json
import re
from dataclasses import fields

import pytest

from eagle3lib.data.describe import data_report
from eagle3lib.data.prompts import Reject
from eagle3lib.data.rows import REASONING_KINDS, TOKEN_IDS_FROM, AnswerRow
from eagle3lib.lab.machine import ROOT

TEXT = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")


def section(title):
    return re.split(r"^#+ ", TEXT.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def test_every_field_of_an_answer_is_in_the_table_and_no_other():
    first_cells = re.findall(r"^\| (`[^|]*) \|", section("answers.jsonl"), re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == {field.name for field in fields(AnswerRow)}


@pytest.mark.parametrize("word", [*REASONING_KINDS, *TOKEN_IDS_FROM])
def test_every_value_of_a_field_with_few_values_is_told(word):
    assert f"`{word}`" in section("answers.jsonl")


def test_the_rejects_that_are_shown_are_rejects():
    lines = re.findall(r"^    (\{.*\})$", section("rejects.jsonl"), re.MULTILINE)
    assert len(lines) == 2
    for line in map(json.loads, lines):
        assert Reject(**{k: v for k, v in line.items() if k != "stage"})


def test_every_part_of_the_data_report_is_told(tmp_path):
    named = set(re.findall(r"^- `(\w+)`:", section("The data report"), re.MULTILINE))
    assert named | {"template_problem"} == set(data_report([], tmp_path, []))
