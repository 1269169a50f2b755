"""Forced tokens, coverage by size and by kind of text, and the rule that chooses a size."""

import json
from collections import Counter

import pandas as pd
import pytest
import torch

from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.coverage import (
    answer_counts,
    choose_size,
    coverage_by_kind,
    coverage_curve,
    coverage_table,
    estimated_speedup,
    head_cost,
    left_out,
    text_kind,
    token_kinds,
)
from eagle3lib.drafter.forced import check_forced, forced_counts, forced_ids, forced_table
from eagle3lib.drafter.phase import make_vocab
from eagle3lib.drafter.vocab import build_vocab_map
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import VocabParams
from eagle3lib.target.folder import Target

ADDED = {
    5: ("<|im_end|>", True), 6: ("<think>", False), 7: ("</think>", False),
    8: ("<tool_call>", False), 9: ("<|reserved_special_token_3|>", True),
    10: ("<|im_start|>", True),
    11: ("  ", False), 12: ("<|image_pad|>", True), 99: ("<|beyond the model|>", True),
}  # fmt: skip


@pytest.fixture
def marked_target(tmp_path):
    """A target of 50 tokens whose tokenizer files add ``ADDED``."""
    early = [i for i in ADDED if i < 9]
    tokens = [{"id": i, "content": ADDED[i][0], "special": ADDED[i][1]} for i in early]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    late = {str(i): {"content": c, "special": s} for i, (c, s) in ADDED.items() if i >= 9}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": late}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    return Target("t", tmp_path, {"vocab_size": 50, "eos_token_id": 2}, "print")


def test_forced_are_stop_reasoning_tool_and_turn_markers(marked_target):
    """Not: reserved places, placeholders, plain added text, ids without a row in the head."""
    forced = forced_ids(marked_target)
    assert forced == {
        2: "stop", 5: "stop", 6: "reasoning", 7: "reasoning", 8: "tool", 10: "special"
    }  # fmt: skip
    assert forced_counts(forced) == {"stop": 2, "reasoning": 2, "tool": 1, "special": 1}
    shown = forced_table(marked_target, forced).set_index("kind").which
    assert shown["reasoning"] == "<think>  </think>"
    assert shown["stop"] == "id 2  <|im_end|>"


def test_a_map_without_forced_tokens_is_told(marked_target):
    forced = forced_ids(marked_target)
    counts = Counter(dict.fromkeys(range(20, 50), 1))
    assert check_forced(build_vocab_map(counts, 50, 12, forced), marked_target, forced) == []
    findings = check_forced(build_vocab_map(counts, 50, 12, [2, 5, 6, 10]), marked_target, forced)
    assert [f.code for f in findings] == ["vocab-lacks-reasoning", "vocab-lacks-tool"]
    assert "</think>" in findings[0].title


def test_curve_rises_with_size_to_everything(tiny_target, tiny_rows):
    curve = coverage_curve(tiny_rows, tiny_target, tiny_target.stop_ids(), steps=3)
    assert set(curve["set"]) == {"workload", "general"}
    assert curve.draft_vocab_size.max() == 300
    for _, part in curve.groupby("set"):
        assert part.coverage.is_monotonic_increasing
        assert part.coverage.iloc[-1] == 1


def test_curve_agrees_with_the_map_that_it_stands_for(tiny_target, tiny_rows, monkeypatch):
    monkeypatch.setattr("eagle3lib.drafter.coverage.SIZES", (16, 64))
    curve = coverage_curve(tiny_rows, tiny_target, [2], steps=3)
    vocab = build_vocab_map(answer_counts(tiny_rows), 300, 16, [2])
    table = coverage_table(vocab, tiny_rows).set_index(["set", "split"])
    small = curve[(curve.draft_vocab_size == 16) & (curve["set"] == "workload")].iloc[0]
    assert small.coverage == table.loc[("workload", "heldout"), "coverage"] < 1
    assert list(small[["head_bytes", "head_flops"]]) == [16 * 64 * 2, 16 * 64 * 2]


def test_head_cost_by_hand():
    """32,768 tokens of width 4,096: 268 MB and 268 MFLOP a drafted token."""
    assert head_cost(32_768, 4096) == {"head_bytes": 268_435_456, "head_flops": 268_435_456}


def test_estimate_by_hand():
    """a = 0.75 of 0.8 inside, K = 2: 1 + 0.6 + 0.36 tokens for 1 + 2 * (10 + 15) / 100 steps."""
    assert estimated_speedup(0.8, 15, 10, 100, 2) == pytest.approx(1.96 / 1.5)


def a_curve(*lines, name="workload"):
    return pd.DataFrame(
        [{"draft_vocab_size": s, "set": name, "estimated_speedup": e} for s, e in lines]
    )


def test_the_smallest_size_that_is_as_good_as_the_best_is_chosen():
    assert choose_size(a_curve((1024, 1.2), (2048, 1.499), (4096, 1.5), (8192, 1.4))) == 2048
    assert choose_size(a_curve((1024, 1.2), (2048, 1.49), (4096, 1.5), (8192, 1.4))) == 4096


def test_without_heldout_answers_there_is_nothing_to_choose_by():
    for curve in (a_curve((1024, 1.2), name="general"), a_curve()):
        with pytest.raises(UserError, match="no held-out answer"):
            choose_size(curve)


def test_a_dear_head_makes_the_vocabulary_smaller(tiny_target, tiny_rows, monkeypatch):
    """The same coverage: what the target's own step costs decides."""
    monkeypatch.setattr("eagle3lib.drafter.coverage.SIZES", (16, 32, 64, 128))

    def chosen(target_bytes):
        curve = coverage_curve(tiny_rows, tiny_target, [2], steps=3)
        layer = 1000
        curve["estimated_speedup"] = [
            estimated_speedup(line.coverage, line.head_bytes, layer, target_bytes, 3)
            for line in curve.itertuples()
        ]
        return choose_size(curve)

    assert chosen(10**4) < chosen(10**9)


PIECES = {
    0: " the", 1: "語", 2: "ж", 3: " 42", 4: "🙂", 5: "\ufffd", 6: "```", 7: "x", 8: "``", 9: "`",
    10: "。", 11: "\n", 12: "<|im_end|>",
}  # fmt: skip


def decode(ids):
    return "".join(PIECES[i] for i in ids)


@pytest.mark.parametrize(
    ("token", "kind"),
    [(0, "Latin"), (1, "CJK"), (2, "other script"), (3, "numbers and signs"), (10, "CJK"),
     (4, "emoji, parts of characters"), (5, "emoji, parts of characters"),
     (11, "numbers and signs"), (9, "numbers and signs")],
)  # fmt: skip
def test_kinds_of_single_tokens(token, kind):
    assert text_kind(PIECES[token]) == kind


def test_code_is_what_stands_inside_fences_however_they_are_cut_into_tokens():
    ids = [0, 6, 7, 3, 8, 9, 0, 8, 9, 7, 12]
    kinds = dict(enumerate(kind for _, kind in token_kinds(ids, decode, [12])))
    code = [i for i, kind in kinds.items() if kind == "code"]
    assert code == [2, 3, 4, 5, 9]  # the closing fence is still inside, the opening one is not
    assert kinds[10] == "markers"
    assert kinds[6] == "Latin"


def test_coverage_by_kind_by_hand(make_row):
    rows = [
        make_row(0, [1], [0, 0, 1, 12], split="heldout"),
        make_row(1, [1], [1, 4, 4], split="heldout", set="general"),
        make_row(2, [1], [4, 4, 4], split="train"),
    ]
    vocab = build_vocab_map(Counter({0: 2, 1: 1}), 13, 3, [12])
    table = coverage_by_kind(vocab, rows, decode, [12])
    assert table.set_index("kind")[["tokens", "inside"]].to_dict("split")["data"] == [
        [2, 2], [2, 2], [2, 0], [1, 1]
    ]  # fmt: skip
    assert list(table.kind) == ["Latin", "CJK", "emoji, parts of characters", "markers"]
    assert left_out(vocab, rows, decode).to_dict("records") == [
        {"token": 4, "text": "'🙂'", "times": 2}
    ]


@pytest.fixture
def saved(random_drafter, tmp_path):
    drafter = random_drafter(20, draft_vocab_size=90)
    write_drafter(tmp_path, drafter, torch.float32)
    return drafter, tmp_path


@pytest.mark.parametrize("size", [0, 90])
def test_a_warm_start_keeps_the_checkpoints_map(saved, tiny_target, size):
    drafter, folder = saved
    cfg = VocabParams(draft_vocab_size=size, warm_start=str(folder))
    vocab = make_vocab(cfg, tiny_target, Counter({5: 1}), 64, {2: "stop"})
    assert torch.equal(vocab.d2t, drafter.d2t)


def test_a_warm_start_refuses_another_size(saved, tiny_target):
    cfg = VocabParams(draft_vocab_size=64, warm_start=str(saved[1]))
    with pytest.raises(
        UserError, match="draft_vocab_size is 64, the checkpoint's own map holds 90"
    ):
        make_vocab(cfg, tiny_target, Counter({5: 1}), 64, {2: "stop"})


def test_no_vocabulary_of_a_handful():
    with pytest.raises(UserError, match="at least 8"):
        VocabParams.checked({"draft_vocab_size": 7}, "here")
