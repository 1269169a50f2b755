"""Adapters of engines' records: every version's names, one identity, and broken records refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lib.engine.records import (
    BrokenRecord,
    RoundCounts,
    check_record,
    chunk_counts,
    counter_counts,
    sglang_counts,
    told_counts,
    vllm_counts,
)
from eagle3lib.measure.accounting import Counts, check_identity

# One request at K=3: rounds of 0, 2 and 3 accepted drafts, 1 + 3 + 5 tokens.
VLLM = {
    "acceptance_histogram": [1, 0, 1, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 5,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
    "mean_acceptance_length": 1 + 5 / 3,
}
SGLANG_NAMES = {
    "newest": ("spec_num_correct_drafts", "spec_num_proposed_drafts",
               "spec_correct_drafts_histogram"),
    "newer": ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    "0.5.5": ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
}  # fmt: skip


def sglang(version, **changes):
    accepted, drafted, histogram = SGLANG_NAMES[version]
    told = {accepted: 5, drafted: 9, histogram: [1, 0, 1, 1], "spec_verify_ct": 3}
    return told | {"completion_tokens": 9} | changes


def of_rounds(accepted, steps=3):
    counts = Counts()
    counts.add(1 + len(accepted) + sum(accepted), accepted, [steps] * len(accepted), steps)
    return counts


def same(told, counts):
    return (told.rounds, told.accepted, told.drafted, told.accepted_at) == (
        counts.rounds, counts.accepted, counts.drafted, counts.accepted_at,
    )  # fmt: skip


def test_every_source_of_one_request_gives_the_same_counts():
    expected = of_rounds([0, 2, 3])
    detailed = {"per_step_accepted": [0, 2, 3], "per_step_drafted": [3, 3, 3]}
    counters = {"drafts": 3.0, "draft_tokens": 9.0, "accepted_tokens": 5.0,
                "accepted_at_0": 2.0, "accepted_at_1": 2.0, "accepted_at_2": 1.0}  # fmt: skip
    before = dict.fromkeys(counters, 100.0)
    after = {name: value + 100 for name, value in counters.items()}
    for told in (
        vllm_counts({"speculative_decoding": VLLM}),
        vllm_counts({"speculative_decoding": VLLM | detailed}),
        vllm_counts({"speculative_decoding": detailed}),  # an older shape
        *(sglang_counts(sglang(version)) for version in SGLANG_NAMES),
        counter_counts(before, after),
        chunk_counts([1, 1, 3, 4], 3),
    ):
        assert same(told, expected), told
        assert check_record(told, 9, 3) == []


def test_pooled_counts_are_those_of_the_rounds():
    """A request known by rounds and the same one known by counts weigh alike."""
    by_rounds, by_counts = of_rounds([0, 2, 3]), Counts()
    by_counts.add_counts(9, sglang_counts(sglang("newest")), 3)
    assert by_counts == by_rounds
    assert check_identity(by_counts, 3) == []


def test_an_old_sglang_tells_the_verify_count_alone():
    """Before 0.5.5 accepted drafts are what the tokens leave over; steps are unknown, not zero."""
    told = sglang_counts({"spec_verify_ct": 3, "completion_tokens": 9}, steps=3)
    assert (told.rounds, told.accepted, told.drafted, told.accepted_at) == (3, 5, 9, None)
    pooled = Counts()
    pooled.add_counts(9, told, 3)
    assert pooled.acceptance_length == pytest.approx(1 + 5 / 3)
    assert (pooled.per_step, pooled.conditional) == ([], [])


def test_a_histogram_by_acceptance_length_is_read_as_one():
    """Some SGLang counts the target's own token in it: [0, 7] is seven rounds that accepted 0."""
    told = sglang_counts({"spec_verify_ct": 7, "spec_accept_token_num": 0,
                          "spec_draft_token_num": 21, "spec_accept_histogram": [0, 7, 0, 0, 0],
                          "completion_tokens": 8})  # fmt: skip
    assert (told.accepted, told.accepted_at) == (0, [0, 0, 0])


@pytest.mark.parametrize("version", SGLANG_NAMES)
def test_a_record_that_contradicts_itself_is_an_error(version):
    accepted, drafted, histogram = SGLANG_NAMES[version]
    for change in ({accepted: 6}, {histogram: [1, 0, 1, 2]}, {drafted: 4}):
        with pytest.raises(BrokenRecord, match="contradicts itself"):
            sglang_counts(sglang(version, **change))
    with pytest.raises(BrokenRecord):
        vllm_counts({"speculative_decoding": VLLM | {"num_spec_steps": 4}})


def test_counters_that_fell_are_of_another_server():
    with pytest.raises(BrokenRecord, match="fell: drafts"):
        counter_counts({"drafts": 100.0}, {"drafts": 3.0})


def test_cumulative_counters_need_no_zero():
    assert counter_counts({}, {"running": 1.0}) is None


def test_no_record_is_none_not_zero():
    assert sglang_counts({"completion_tokens": 9}) is None
    assert sglang_counts({"completion_tokens": 9, "spec_verify_ct": 0}) is None
    for metrics in (None, {}, {"speculative_decoding": None}):
        assert vllm_counts(metrics) is None
    assert told_counts(None) is None


@pytest.mark.parametrize("chunks", [[4, 1, 3], [1, 5, 2]], ids=["merged start", "merged rounds"])
def test_merged_chunks_are_no_rounds(chunks):
    with pytest.raises(BrokenRecord, match="streamed chunks"):
        chunk_counts(chunks, 3)


@pytest.mark.parametrize(("tokens", "right"), [(10, False), (9, True), (6, True), (5, False)])
def test_a_record_must_explain_its_tokens(tokens, right):
    """Up to K accepted drafts are cut by the end."""
    told = RoundCounts(3, 5, 9, [2, 2, 1], "test")
    assert (check_record(told, tokens, 3) == []) == right


def test_sglangs_own_records_follow_the_identity():
    """Twelve greedy requests of SGLang 0.5.15, K = 3 (docs/lab_log.md): the prefill is no verify
    round, accepted drafts beyond the end are counted, spec_accept_length is tokens / rounds."""
    counts = Counts()
    for line in (Path(__file__).parent / "records" / "sglang-0.5.15.jsonl").read_text().split("\n"):
        if line:
            meta = json.loads(line)
            told = sglang_counts(meta)
            assert check_record(told, meta["completion_tokens"], 3) == []
            length = meta["completion_tokens"] / told.rounds
            assert meta["spec_accept_length"] == pytest.approx(length)
            counts.add_counts(meta["completion_tokens"], told, 3)
    assert (counts.requests, counts.tokens, counts.rounds, counts.accepted) == (12, 1090, 690, 393)
    assert counts.cut == 5
    assert check_identity(counts, 3) == []
