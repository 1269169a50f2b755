"""Points of the sweeps, and the order in which arms are asked at them."""

from __future__ import annotations

from collections import Counter

import pytest

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE
from eagle3lib.measure.order import blocks_of, visits_of
from eagle3lib.measure.points import Point, filled_messages, groups_of, points_of


def prompt(name):
    return AnswerRow(id=name, set="workload", split="heldout", messages=[], prompt_token_ids=[1],
                     answer_token_ids=[2], text="", finish_reason="stop")  # fmt: skip


PROMPTS = [prompt(f"p{i}") for i in range(5)]


def test_the_demo_measures_one_point():
    """Sweeps are off by default: the demo may not get longer."""
    assert points_of(BenchmarkParams()) == [Point("vllm", 3, 1, 0.0, 0)]


def test_k_and_load_are_crossed_the_rest_varies_alone():
    cfg = BenchmarkParams(
        engines="vllm,sglang", concurrency="1,8", more_speculative_tokens="5", temperatures="0,0.8",
        context_tokens="512",
    )  # fmt: skip
    points = points_of(cfg)
    assert len(points) == len(set(points)) == 2 * (2 * 2 + 1 + 1)
    assert points[0] == Point("vllm", 3, 1, 0.0, 0)
    assert {(p.steps, p.concurrency) for p in points if not p.temperature} >= {
        (3, 1), (3, 8), (5, 1), (5, 8)
    }  # fmt: skip
    assert [(e, k) for e, k, _ in groups_of(points)] == [
        ("vllm", 3), ("vllm", 5), ("sglang", 3), ("sglang", 5),
    ]  # fmt: skip
    assert {p for _, _, group in groups_of(points) for p in group} == set(points)


@pytest.mark.parametrize(
    "values",
    [
        {"engines": "vllm,tensorrt"},
        {"engines": ""},
        {"concurrency": "0"},
        {"concurrency": "1,1"},
        {"concurrency": "many"},
        {"concurrency": ""},
        {"temperatures": "-1"},
        {"temperatures": "nan"},
        {"side_by_side": False, "repeats": 1},
    ],
    ids=str,
)
def test_sweeps_that_make_no_sense_are_refused(values):
    with pytest.raises(UserError):
        BenchmarkParams.checked(values, "here")


def test_a_context_that_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(UserError, match="max_model_len"):
        points_of(BenchmarkParams(context_tokens="1000", max_new_tokens=96, max_model_len=1024))


def test_contexts_are_filled_to_within_one_text_and_keep_the_question():
    asked = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q?"}]
    texts = [("a " * 30, 30), ("b " * 50, 50), ("c " * 9999, 9999)]
    filled = filled_messages(asked, texts, 200)
    assert filled[0] == asked[0] and asked[1]["content"] == "Q?"
    text = filled[1]["content"]
    assert text.endswith("Q?") and "c c" not in text
    assert 150 <= text.count("a ") + text.count("b ") <= 200


def test_a_prompt_without_plain_text_can_not_be_filled():
    with pytest.raises(UserError, match="plain text"):
        filled_messages([{"role": "user", "content": [{"type": "image"}]}], [("a", 1)], 10)


def asked(cfg, arms, load):
    """(visit, arm, prompt, repeat) of every task, in its order."""
    return [
        (visit.number, arm, p.id, repeat)
        for visit in visits_of(cfg, arms)
        for block in blocks_of(visit.repeats, PROMPTS, load)
        for arm, p, repeat in block
    ]


@pytest.mark.parametrize("side_by_side", [True, False])
@pytest.mark.parametrize("load", [1, 4])
def test_every_arm_is_asked_every_prompt_equally_often(side_by_side, load):
    cfg = BenchmarkParams(repeats=3, side_by_side=side_by_side)
    tasks = Counter(t[1:] for t in asked(cfg, [PLAIN, REFERENCE, OWN], load))
    assert len(tasks) == 3 * len(PROMPTS) * 3 and set(tasks.values()) == {1}


def test_blocks_are_a_b_a():
    """The baseline is measured before and after the drafters: its change is the drift."""
    tasks = asked(BenchmarkParams(repeats=2, side_by_side=False), [PLAIN, REFERENCE, OWN], 1)
    assert list(dict.fromkeys((t[0], t[1]) for t in tasks)) == [
        (0, PLAIN), (1, REFERENCE), (2, OWN), (3, PLAIN),
    ]  # fmt: skip


def test_the_first_arm_changes_with_every_prompt_and_with_every_block():
    alone = asked(BenchmarkParams(repeats=1), [PLAIN, OWN], 1)
    assert [t[1] for t in alone[::2]] == [PLAIN, OWN, PLAIN, OWN, PLAIN]
    blocks = asked(BenchmarkParams(repeats=2), [PLAIN, OWN], 4)
    assert [t[1] for t in blocks[:: len(PROMPTS)]] == [PLAIN, OWN, OWN, PLAIN]
