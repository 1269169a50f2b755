"""Laws of comparing runs: by prompts, with an interval, and only where it is like with like."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from test_result import streamed

from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.arms import OWN, PLAIN
from eagle3lib.measure.compare import (
    HIGHER,
    LOWER,
    TIMED,
    UNKNOWN,
    ComparedRun,
    bootstrap,
    differences,
    prompt_sums,
    side_by_side,
    why_not_comparable,
)

SAME = MappingProxyType({"temperature": 0.0, "engine": "vllm", "dtype": "float32"})


def run(name, accepted_of, prompts=range(12), **changes):
    """A run of one round of three drafts a prompt and repeat; ``accepted_of``: prompt -> list."""
    rows = [
        streamed(arm, f"p{i}", accepted_of(i) if arm == OWN else None, prompt_token_ids=[i])
        for i in prompts
        for arm in (PLAIN, OWN)
    ]
    parts = {
        "name": name, "target": "t", "fingerprint": "f", "steps": 3, "benchmark": dict(SAME),
        "parameters": {"04_train_drafter epochs": 10}, "facts": {}, "machine": {"cpu": "a"},
        "prompts": {"workload": prompt_sums(rows, "workload", 3)},
    }  # fmt: skip
    return ComparedRun(**parts | changes)


def of(found, statistic="acceptance length"):
    (line,) = [d for d in found if d.statistic == statistic]
    return line


def varied(i):
    return [i % 4, (i * 5) % 4, (i * 3) % 2]


def better(i):
    return [min(a + 1, 3) for a in varied(i)]


def test_a_run_does_not_differ_from_itself():
    for line in differences(run("a", varied), run("b", varied)):
        assert (line.difference, line.low, line.high, line.paired) == (0, 0, 0, True)
        assert line.reason == ""


def test_the_other_way_round_is_the_same_with_the_other_sign():
    a, b = run("a", varied), run("b", better)
    there, back = of(differences(a, b)), of(differences(b, a))
    assert there.verdict == HIGHER and back.verdict == LOWER
    assert back.difference == pytest.approx(-there.difference)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low))


def test_the_same_prompts_tell_more_than_other_ones():
    """What prompts share goes out of a paired difference: here all but a constant."""
    hard = {i: [0] * 8 if i % 2 else [2] * 8 for i in range(40)}
    a = run("a", lambda i: hard[i % 40], range(40))
    b = run("b", lambda i: [n + 1 for n in hard[i % 40]], range(40))
    far = run("b", lambda i: [n + 1 for n in hard[i % 40]], range(40, 80))
    paired, unpaired = of(differences(a, b)), of(differences(a, far))
    assert paired.paired and not unpaired.paired
    assert paired.difference == pytest.approx(unpaired.difference) == pytest.approx(1)
    assert paired.high - paired.low < 1e-9 < 0.5 < unpaired.high - unpaired.low
    assert unpaired.reason == "other prompts (0 shared)"


def test_too_few_prompts_give_no_verdict():
    line = of(differences(run("a", varied, range(4)), run("b", better, range(4))))
    assert (line.low, line.high, line.verdict) == (None, None, UNKNOWN)


def test_the_interval_is_that_of_the_normal_law_for_a_mean():
    values = np.random.default_rng(1).normal(3, 2, 400)
    low, high = bootstrap(np.stack((np.ones(400), values), 1), lambda s: s[..., 1] / s[..., 0])
    half = 1.96 * values.std() / 20
    assert (high - low) / 2 == pytest.approx(half, rel=0.08)
    assert (high + low) / 2 == pytest.approx(values.mean(), abs=half / 10)


def test_repeats_of_a_prompt_are_one_prompt():
    rows = [streamed(OWN, "p", [k, 3], repeat=k, prompt_token_ids=[1]) for k in range(3)]
    (sums,) = prompt_sums(rows, "workload", 3).values()
    counts = Counts()
    for row in rows:
        counts.add(len(row.answer_token_ids), row.accepted, row.drafted, 3)
    assert list(sums[:2]) == [counts.rounds, counts.accepted]
    assert list(sums[-3:]) == counts.accepted_at


@pytest.mark.parametrize(
    ("changes", "reason", "timed_alone"),
    [
        ({"fingerprint": "g"}, "other target", False),
        ({"benchmark": {**SAME, "temperature": 1.0}}, "other temperature", False),
        ({"benchmark": {**SAME, "engine": "sglang"}}, "other engine", True),
        ({"machine": {"cpu": "b"}}, "other machine", True),
        ({"benchmark": {**SAME, "concurrency": 8}}, "other concurrency", True),
    ],
)
def test_what_is_not_like_with_like_says_why(changes, reason, timed_alone):
    a = run("a", varied)
    b = replace(a, name="b", **changes)
    assert {why_not_comparable(a, b, s, "workload") for s in TIMED} == {reason}
    length = why_not_comparable(a, b, "acceptance length", "workload")
    assert length == ("" if timed_alone else reason)


def test_another_k_makes_lengths_incomparable_but_not_speeds():
    a = run("a", varied)
    b = replace(a, steps=5)
    assert why_not_comparable(a, b, "acceptance length", "workload") == "K 3 and 5"
    assert why_not_comparable(a, b, "speed-up", "workload") == ""


def test_parameters_stand_beside_results_only_where_they_differ():
    a = run("a", varied, parameters={"x y": 1, "x same": 2})
    b = run("b", better, parameters={"x y": 3, "x same": 2})
    lines = side_by_side([a, b])
    assert [x for x in lines if x["kind"] == "parameter"] == [
        {"kind": "parameter", "what": "x y", "a": 1, "b": 3}
    ]
    (length,) = [x for x in lines if x["what"] == "acceptance length"]
    assert length["b"] > length["a"]
