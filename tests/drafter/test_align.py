"""The worked row of ``align.py``, spelled out: x0..x9, a prompt of n = 4 tokens."""

import pytest
import torch

from eagle3lib.drafter.align import (
    base_positions,
    base_span,
    input_index,
    label_exists,
    label_index,
    teacher_index,
)

# At base positions 3, 4, 5, 6, 7 and by step: index of the token that enters, of the token that is
# drafted, of the target state that is the teacher, and whether the drafted token exists.
WORKED_ROW = {
    0: ([4, 5, 6, 7, 8], [5, 6, 7, 8, 9], [4, 5, 6, 7, 8], [1, 1, 1, 1, 1]),
    1: ([5, 6, 7, 8, 9], [6, 7, 8, 9, 10], [5, 6, 7, 8, 9], [1, 1, 1, 1, 0]),
    2: ([6, 7, 8, 9, 10], [7, 8, 9, 10, 11], [6, 7, 8, 9, 10], [1, 1, 1, 0, 0]),
}


def test_base_positions_of_the_worked_row():
    span = base_span(prompt_tokens=4, total_tokens=10)
    assert (span.first, span.last, span.count) == (3, 7, 5)
    assert base_positions(span).tolist() == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("step", WORKED_ROW)
def test_indices_of_the_worked_row(step):
    base = torch.tensor([3, 4, 5, 6, 7])
    enters, drafted, teacher, exists = WORKED_ROW[step]
    assert input_index(base, step).tolist() == enters
    assert label_index(base, step).tolist() == drafted
    assert teacher_index(base, step).tolist() == teacher
    assert label_exists(base, step, torch.full_like(base, 10)).tolist() == [bool(e) for e in exists]


def test_first_answer_token_is_never_drafted():
    """x4 comes from the prefill: no base position and step has it as its label."""
    base = base_positions(base_span(4, 10))
    drafted = {i for step in range(5) for i in label_index(base, step).tolist()}
    assert min(drafted) == 5


@pytest.mark.parametrize(("total", "count"), [(4, 0), (5, 0), (6, 1), (7, 2)])
def test_short_answers_have_no_base_position(total, count):
    """An answer of none or one token drafts nothing. (torch.arange refuses a span that ends two
    before its start, as a conversation without an answer has it: it used to raise.)"""
    span = base_span(4, total)
    assert span.count == count
    assert base_positions(span).tolist() == [3, 4][:count]
