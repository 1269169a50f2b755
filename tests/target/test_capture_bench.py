"""The bench of capture compares ways that make the same states, in pairs, and says what was met."""

import pytest
import torch
from safetensors.torch import load_file

from eagle3lib.target.capture_bench import (
    Loaded,
    _padded,
    capture_rounds,
    padding_share,
    ratio_rows,
    reached,
    some_of,
)
from eagle3lib.target.forward import forward_states

SLOTS = (2, 5, 7)


def test_every_way_is_timed_in_every_round(tiny_target, tiny_rows, tmp_path):
    settings = {"slots": SLOTS, "dtype": "float32", "batch_tokens": 64, "rounds": 2}
    lines = capture_rounds(tiny_target, tiny_rows, tmp_path / "written", **settings)
    assert not (tmp_path / "written").exists()
    found = ratio_rows(lines)
    assert [(r["clock"], r["way"]) for r in found] == [
        (clock, way)
        for clock in ("cpu", "wall")
        for way in ("capture", "padded", "padded, no head", "prefill")
    ]
    assert all(r["tokens_per_s"] > 0 and r["least"] <= r["most"] for r in found)
    assert {r["capture_over_it"] for r in found if r["way"] == "capture"} == {1.0}


@pytest.mark.parametrize("head", [True, False])
def test_the_padded_way_makes_the_same_slots(tiny_target, tiny_rows, tmp_path, head):
    ids = [row.prompt_token_ids + row.answer_token_ids for row in tiny_rows]
    with Loaded(tiny_target, SLOTS, "float32", 64) as source:
        _padded(source, ids, tmp_path, head=head)
        alone = [forward_states(source.model, [row], SLOTS)[0] for row in ids]
    for number, expected in enumerate(alone):
        found = load_file(tmp_path / f"hs_{number}.safetensors")
        assert found["token_ids"].tolist() == ids[number]
        torch.testing.assert_close(
            found["hidden_states"][:, :-1], expected[:, :-1], atol=1e-4, rtol=1e-5
        )


def test_ratios_are_of_one_round():
    lines = [
        {"round": 0, "capture, cpu": 10.0, "prefill, cpu": 10.0},
        {"round": 1, "capture, cpu": 2.0, "prefill, cpu": 4.0},  # a slow machine, for both
        {"round": 2, "capture, cpu": 9.0, "prefill, cpu": 10.0},
    ]
    prefill = ratio_rows(lines)[1]
    assert (prefill["capture_over_it"], prefill["least"], prefill["most"]) == (0.9, 0.5, 1.0)


def test_padding_is_counted():
    assert padding_share([7] * 20) == 0
    assert padding_share([1, 9], batch=2) == pytest.approx(8 / 18)


def test_some_are_of_every_length(make_row):
    rows = [make_row(n, [1], list(range(3, 4 + n))) for n in range(40)]
    lengths = [len(r.answer_token_ids) for r in some_of(rows[::-1], 8)]
    assert lengths == [1, 6, 11, 16, 21, 26, 31, 36]
    assert some_of(rows, 100) == rows


def test_goals_are_met_by_their_own_side():
    ways = [{"way": w, "clock": "cpu", "capture_over_it": x}
            for w, x in (("padded", 2.6), ("padded, no head", 2.0), ("prefill", 0.9))]  # fmt: skip
    sizes = [{"format": "fp8", "of_four_bf16_states": 0.43},
             {"format": "compact", "of_four_bf16_states": 0.36}]  # fmt: skip
    losses = [{"format": f, "set": "workload", "lost": 0.005} for f in ("fp8", "compact")]
    found = reached(ways, [{"ratio": 0.95}], sizes, losses, 0.01, 0.42)
    assert [g["reached"] for g in found] == [True, None, False, True, True]
    losses[1]["lost"] = 0.02
    assert reached(ways, [{"ratio": 0.95}], sizes, losses, 0.01, 0.42)[-1]["reached"] is False
    assert reached(ways, [{"ratio": 0.95}], sizes, [], 0.01, 0.42)[-1]["reached"] is None
