"""Acceptance along anything: every round is somewhere, once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from test_result import streamed

from eagle3lib.lab.files import write_json
from eagle3lib.measure import curves
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE, counts_of

ROWS = [
    streamed(OWN, f"p{i}", [i % 4, 3, 0, (2 * i) % 3] * (1 + i), prompt_token_ids=[7] * (1 + 9 * i),
             set="workload" if i % 3 else "general")
    for i in range(12)
]  # fmt: skip


@pytest.mark.parametrize(
    "along",
    [
        curves.by_position,
        curves.by_context,
        lambda rows: curves.by_temperature(rows, 3),
        lambda rows: curves.by_kind(rows, 3, {"p1": "code"}),
    ],
    ids=["position", "context", "temperature", "kind"],
)
def test_every_round_is_at_one_place(along):
    counts = counts_of(ROWS, 3)
    lines = along(ROWS)
    assert sum(line["rounds"] for line in lines) == counts.rounds
    assert sum(line["accepted"] for line in lines) == counts.accepted
    assert len(lines) > 1
    assert all(line["low"] is None or line["low"] <= line["acceptance_length"] <= line["high"]
               for line in lines)  # fmt: skip


def test_a_round_stands_where_it_starts():
    assert curves.round_places(streamed(OWN, "p", [2, 0, 3])) == [(1, 2), (4, 0), (5, 3)]
    row = streamed(OWN, "p", [2, 0, 3], prompt_token_ids=[1] * 60)
    assert [(x["from"], x["rounds"], x["accepted"]) for x in curves.by_position([row])] == [
        (1, 1, 2),
        (4, 2, 3),
    ]
    assert [(x["from"], x["to"], x["rounds"]) for x in curves.by_context([row])] == [
        (32, 63, 1),
        (64, 127, 2),
    ]


def test_requests_without_an_order_are_counted_and_not_placed():
    told = {"rounds": 2, "accepted": 3, "drafted": 6, "accepted_at": [2, 1, 0],
            "source": "answer"}  # fmt: skip
    row = streamed(OWN, "p", None, counts=told)
    assert curves.without_order([row, *ROWS]) == 1
    assert curves.by_position([row]) == []
    assert [x["accepted"] for x in curves.step_curves([row], 3)] == [2, 1, 0]


def test_fewer_drafts_a_round_accept_what_the_same_rounds_did():
    lines = [x for x in curves.lengths_by_k(ROWS, 3) if x["set"] == "workload"]
    lengths = [x["acceptance_length"] for x in lines]
    assert lengths == sorted(lengths)
    counts = counts_of([r for r in ROWS if r.set == "workload"], 3)
    assert lengths[-1] == pytest.approx(counts.acceptance_length)
    cut = [[min(a, 2) for a in r.accepted] for r in ROWS if r.set == "workload"]
    rounds = [a for row in cut for a in row]
    assert lengths[1] == pytest.approx(1 + sum(rounds) / len(rounds))


def test_every_arm_with_a_drafter_has_its_lengths(tmp_path):
    rows = [*ROWS, replace(ROWS[1], arm=REFERENCE, accepted=[3, 3])]
    rows.append(replace(ROWS[1], arm=PLAIN, accepted=None, drafted=None))
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
    write_json(tmp_path / "metrics.json", {"num_speculative_tokens": 3})
    found = curves.run_lengths(tmp_path)
    assert found == {
        OWN: curves.lengths_by_k(ROWS, 3), REFERENCE: curves.lengths_by_k(rows[-2:-1], 3)
    }  # fmt: skip
    assert found[REFERENCE][-1]["acceptance_length"] == 4.0


def test_an_evaluation_stands_at_the_tokens_trained_before_it(tmp_path):
    def evaluated(length):
        sets = {"workload": {"rounds": 5, "acceptance_length": length}}
        return {"kind": "evaluation", "epoch": 1, "sets": sets}

    updates = [{"kind": "train", "update": n, "tokens": 10 * n} for n in (1, 2)]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(r) + "\n" for r in [evaluated(1), *updates, evaluated(2)]))
    found = curves.training_curve(log)
    assert [(x["trained_tokens"], x["acceptance_length"]) for x in found] == [(0, 1), (30, 2)]
