"""The on-policy share by kind of answer."""

from __future__ import annotations

from dataclasses import replace

from eagle3lib.target.capture import capture
from eagle3lib.target.model import TargetHead
from eagle3lib.target.on_policy import on_policy_counts
from eagle3lib.target.states import StateStore


def counts_of(folder, target, rows, **options):
    return on_policy_counts(StateStore(folder), TargetHead(target), rows, **options)


def summed(lines, part):
    return sum(line[part] for line in lines)


def test_greedy_answers_are_the_targets_own_in_every_kind(tiny_target, tiny_rows, tiny_states):
    lines = counts_of(tiny_states, tiny_target, tiny_rows, most_rows=999)
    assert [line["set"] for line in lines] == ["general", "workload"]
    assert summed(lines, "tokens") == sum(len(row.answer_token_ids) for row in tiny_rows)
    assert summed(lines, "greedy") == summed(lines, "tokens")
    assert summed(lines, "answers") == summed(lines, "of") == len(tiny_rows)


def test_kinds_are_counted_apart_and_add_up(tiny_target, tiny_rows, tiny_states):
    kinds = [
        replace(row, set="workload", token_ids_from="given" if i % 3 else "served",
                sampling={"thinking": "on" if i % 2 else "off", "temperature": 0.7})
        for i, row in enumerate(tiny_rows)
    ]  # fmt: skip
    lines = counts_of(tiny_states, tiny_target, kinds, most_rows=999)
    assert {(x["token_ids_from"], x["thinking"], x["temperature"]) for x in lines} == {
        (ids, thinking, 0.7) for ids in ("given", "served") for thinking in ("on", "off")
    }
    given = [row for row in kinds if row.token_ids_from == "given"]
    tokens = sum(line["tokens"] for line in lines if line["token_ids_from"] == "given")
    assert tokens == sum(len(row.answer_token_ids) for row in given)
    assert summed(lines, "tokens") == sum(len(row.answer_token_ids) for row in kinds)


def test_words_that_are_not_the_targets_are_not_counted_as_its_own(
    tiny_target, tiny_rows, tmp_path
):
    foreign = [
        replace(row, answer_token_ids=[(t + 1) % 64 for t in row.answer_token_ids])
        for row in tiny_rows
    ]
    capture(tiny_target, foreign, tmp_path, slots=(2, 5, 7), dtype="float32", batch_tokens=64,
            shard_rows=5)  # fmt: skip
    lines = counts_of(tmp_path, tiny_target, foreign, most_rows=999)
    assert summed(lines, "greedy") < 0.5 * summed(lines, "tokens")


def test_no_more_rows_than_asked_for_are_read_and_unknown_ones_are_left_out(
    tiny_target, tiny_rows, tiny_states
):
    lines = counts_of(tiny_states, tiny_target, tiny_rows, most_rows=3)
    assert [line["answers"] for line in lines] == [1, 3]
    assert counts_of(tiny_states, tiny_target, []) == []
