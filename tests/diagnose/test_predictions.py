"""Token by token: every token has one kind, every round and passage its place, and the engine's
record is laid on the answer only where it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3lib.diagnose.live import LiveTarget
from eagle3lib.diagnose.passages import passages
from eagle3lib.diagnose.predictions import (
    ACCEPTED,
    BONUS,
    CHAIN,
    ENGINE,
    FIRST,
    KINDS,
    OTHER,
    OUTSIDE,
    PREFILL,
    TIE,
    TIE_NATS,
    Round,
    ToView,
    kind_counts,
    kind_of,
    parted_rounds,
    record_problem,
    step_counts,
    token_places,
    view_answer,
)
from eagle3lib.target.model import TargetHead

STEPS = 3


@pytest.fixture(scope="module")
def views(tiny_target, tiny_rows, random_drafter):
    drafter = random_drafter(draft_vocab_size=150)
    head, states_of = TargetHead(tiny_target, "float32"), LiveTarget(tiny_target, "float32")

    def view(row, **record):
        item = ToView(row.id, row.set, row.prompt_token_ids, row.answer_token_ids, **record)
        return view_answer(item, drafter, head, states_of, STEPS)

    return view, [view(row) for row in tiny_rows]


def test_the_target_chose_every_token_of_its_own_greedy_answers(views, tiny_rows):
    for view, row in zip(views[1], tiny_rows, strict=True):
        assert [t.id for t in view.tokens] == row.answer_token_ids
        assert [t.target[0][0] for t in view.tokens] == row.answer_token_ids
        assert all(t.target_p == pytest.approx(t.target[0][1]) for t in view.tokens)


def test_every_token_has_one_kind_and_a_drafted_one_what_the_drafter_held_likely(views):
    counts = kind_counts(views[1])
    assert sum(counts.values()) == sum(len(v.tokens) for v in views[1])
    assert counts[PREFILL] == len(views[1]) and counts[OUTSIDE] and counts[FIRST]
    assert counts[ENGINE] == 0  # the rounds are the simulator's own
    for token in (t for v in views[1] for t in v.tokens):
        assert bool(token.drafter) == (token.step > 0)
        if token.kind == OUTSIDE:
            assert not token.inside and token.drafter_p == 0
        if token.kind == ACCEPTED:
            assert token.drafter[0][0] == token.id


def test_rounds_give_every_token_but_the_first(views):
    for view in views[1]:
        places = list(token_places(view.rounds, len(view.tokens)))
        assert len(places) == len(view.tokens) and places[0] == (0, -1)
        for number, r in enumerate(view.rounds):
            mine = [step for step, of in places if of == number]
            assert mine == list(range(1, len(mine) + 1))
            assert len(mine) == r.accepted + 1 or number == len(view.rounds) - 1


def test_a_record_of_the_simulators_own_rounds_parts_nowhere(views, tiny_rows):
    view, mine = views
    again = [
        view(row, accepted=[r.accepted for r in v.rounds])
        for row, v in zip(tiny_rows, mine, strict=True)
    ]
    assert [replace(a, recorded=False) for a in again] == mine
    parted, compared = parted_rounds(again)
    assert parted == 0 < compared


def test_a_round_that_the_engine_accepted_more_of_is_seen(views, tiny_rows):
    view, mine = views
    row, first = tiny_rows[4], mine[4]
    assert first.rounds[0].accepted == 0
    record = [1] + [0] * (len(row.answer_token_ids) - 3)
    found = view(row, accepted=record)
    assert found.recorded and found.rounds[0].parted
    assert parted_rounds([found])[0] >= 1
    assert found.tokens[1].kind == ACCEPTED


@pytest.mark.parametrize(
    ("accepted", "drafted", "problem"),
    [
        (None, None, ""),
        ([1, 2], [3, 3], ""),
        ([1, 2], [3], "2 rounds accepted and 1 drafted"),
        ([0, 0, 0, 0, 0, 0, 0], None, "7 rounds reach beyond the answer's 6 tokens"),
        ([1], None, "the rounds give 3 of 6 tokens"),
    ],
)
def test_a_record_that_does_not_fit_says_why(accepted, drafted, problem):
    assert record_problem(ToView("a", "s", [1], [1] * 6, accepted, drafted)) == problem


@pytest.mark.parametrize(
    ("index", "inside", "margin", "simulated", "kind"),
    [
        (1, True, 9.0, 1, ACCEPTED),
        (2, True, 9.0, 2, ENGINE),
        (2, False, 9.0, 1, OUTSIDE),
        (2, True, -1.0, 1, OTHER),
        (2, True, TIE_NATS / 2, 1, TIE),
        (2, True, 9.0, 1, CHAIN),
        (4, True, 9.0, 1, BONUS),
    ],
)
def test_the_first_reason_that_fits_names_a_miss(index, inside, margin, simulated, kind):
    r = Round(0, 3 if kind == BONUS else 1, 3, simulated, True, [], [])
    assert kind_of(index, r, inside, margin) == kind


def test_the_first_step_is_told_from_later_ones():
    assert kind_of(1, Round(0, 0, 3, 0, True, [], []), True, 9.0) == FIRST
    assert kind_of(0, None, True, 9.0) == PREFILL
    assert set(KINDS) >= {FIRST, CHAIN, TIE, OTHER, OUTSIDE, ENGINE, BONUS, ACCEPTED, PREFILL}


def test_passages_hold_every_round_once_the_worst_first(views):
    found = passages(views[1], rounds=4)
    for number, view in enumerate(views[1]):
        mine = sorted((p for p in found if p.answer == number), key=lambda p: p.first)
        assert sum(p.rounds for p in mine) == len(view.rounds)
        covered = [i for p in mine for i in range(p.first, p.last + 1)]
        assert covered == list(range(1, len(view.tokens)))
    for turn in {p.turn for p in found}:
        lengths = [p.length for p in found if p.turn == turn]
        assert lengths == sorted(lengths)


def test_ten_bad_passages_of_one_answer_do_not_hide_those_of_others(views):
    """A drafter that accepts nothing in one long answer: ordered by length alone, nothing else
    would be seen for screens."""

    def answer(accepted, p):
        starts = range(0, 40, accepted + 1)
        rounds = [Round(at, accepted, 3, accepted, True, [], []) for at in starts]
        kinds = [PREFILL] + ([ACCEPTED] * accepted + [FIRST]) * len(rounds)
        tokens = [replace(views[1][0].tokens[0], kind=kind, target_p=p) for kind in kinds]
        return replace(views[1][0], rounds=rounds, tokens=tokens)

    found = passages([answer(1, 0.9), answer(0, 0.5), answer(0, 0.8)], rounds=4)
    assert [p.answer for p in found[:3]] == [2, 1, 0]  # the surer target first, then the longer
    assert [p.answer for p in found[3:6]] == [2, 1, 0]
    assert found[0].missed_p == pytest.approx(0.8)


def test_a_round_tells_the_drafters_size_at_every_step_that_it_drafted(views, tiny_rows):
    view, mine = views
    for r in (r for v in mine for r in v.rounds):
        assert len(r.drafter_rms) == STEPS and len(r.state_rms) == 3
        assert all(x > 0 for x in r.drafter_rms) and len(set(r.drafter_rms)) > 1
    rounds = mine[4].rounds
    narrow = view(tiny_rows[4], accepted=[r.accepted for r in rounds], drafted=[1] * len(rounds))
    if all(r.accepted <= 1 for r in rounds):
        assert [r.drafter_rms for r in narrow.rounds] == [r.drafter_rms[:1] for r in rounds]


def test_a_step_is_checked_only_behind_the_steps_before_it(views):
    lines = step_counts(views[1], STEPS)
    checked = [sum(n for key, n in line.items() if key != "step") for line in lines]
    for line, after in zip(lines, checked[1:], strict=False):
        assert after <= line[ACCEPTED]
    assert checked[0] == sum(len(v.rounds) for v in views[1])
