"""The knock-out's bars: what a slot is worth comes with an interval over the same conversations."""

from __future__ import annotations

import pytest

from eagle3lib.report.explore_figures_states import knock_out_bars


def line(name, accepted):
    """Ten rounds in every conversation."""
    sums = [(10, n) for n in accepted]
    rounds, total = 10 * len(accepted), sum(accepted)
    return {"slots": name, "rounds": rounds, "accepted": total, "conversations": sums,
            "acceptance_length": 1 + total / rounds}  # fmt: skip


WHOLE = [2, 9, 4, 15, 7, 1, 12, 6]


def test_a_loss_that_is_the_same_in_every_conversation_is_sure():
    """Conversations differ far more from each other than the two variants do: unpaired, the
    interval would reach from a loss to a gain."""
    less = [n - 1 for n in WHOLE]
    figure = knock_out_bars([line("as trained", WHOLE), line("without 2", less)])
    (bars,) = figure.data
    assert list(bars.x) == pytest.approx([1.7, 1.6])
    assert list(figure.layout.yaxis.ticktext) == ["as trained: 1.70", "without 2: 1.60"]
    assert bars.error_x.array[1] == pytest.approx(0, abs=1e-9)
    assert bars.error_x.arrayminus[1] == pytest.approx(0, abs=1e-9)
    assert "-0.100 from as trained" in bars.customdata[1][2]


def test_a_loss_that_one_conversation_makes_is_not():
    one = [*WHOLE[:3], 0, *WHOLE[4:]]
    (bars,) = knock_out_bars([line("as trained", WHOLE), line("none of them", one)]).data
    low = bars.x[1] - bars.error_x.arrayminus[1]
    high = bars.x[1] + bars.error_x.array[1]
    assert low < bars.x[1] < high == pytest.approx(bars.x[0])
    assert "8 conversations" in bars.customdata[1][2]
    assert list(bars.customdata[1][:2]) == [sum(one), 80]


def test_four_conversations_give_no_interval():
    lines = [line("as trained", WHOLE[:4]), line("without 2", [1, 2, 3, 4])]
    (bars,) = knock_out_bars(lines).data
    assert list(bars.error_x.array) == list(bars.error_x.arrayminus) == [0, 0]
    assert " to " not in bars.customdata[1][2]
