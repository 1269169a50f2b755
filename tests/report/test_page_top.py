"""The first screen of a run's page says for every set of prompts what was measured, and why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))
from test_result import streamed

from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE
from eagle3lib.measure.summary import summarise
from eagle3lib.report.html import page_template
from eagle3lib.report.page_top import set_answers

CFG = BenchmarkParams(repeats=2)


def benchmark(arm=OWN, prompts=6, arms=(PLAIN, OWN)):
    """Workload: rounds of 4 tokens at 2 plain steps. General: rounds of 1 at 2 plain steps."""
    rows = [
        streamed(made, f"{name}{i}", drafts if made != PLAIN else None, set=name, repeat=repeat,
                 step_s=0.2 if made != PLAIN else 0.1)
        for name, drafts in (("workload", [3, 3]), ("general", [0] * 8))
        for repeat in range(CFG.repeats)
        for i in range(prompts)
        for made in dict.fromkeys((*arms, arm))
    ]  # fmt: skip
    return summarise(rows, CFG, {})


def compared(length, coverage, equal=10):
    return {"engine": {"acceptance_length": length}, "vocab_coverage": coverage,
            "rounds_compared": 10, "rounds_equal": equal}  # fmt: skip


def diagnosis(**changed):
    return {
        "verdicts": {"acceptance": "good: 4 tokens", "cause": "the rotary base is wrong"},
        "workload": compared(4.0, 0.9),
        "general": compared(1.0, 0.5),
    } | changed


def shown(answers):
    return page_template("page_top.html.j2").render(answers=answers)


def test_each_set_has_its_own_verdict_and_numbers():
    workload, general = set_answers(benchmark(), diagnosis())
    assert (workload.set, workload.verdict) == ("workload", "faster")
    assert (general.set, general.verdict) == ("general", "slower")
    assert (workload.length, general.length, workload.most) == (4.0, 1.0, 4)
    for answer in (workload, general):  # what the page says the speed-up is made of
        assert answer.speedup == pytest.approx(answer.length / answer.cost, rel=1e-3)
        assert answer.speedup == pytest.approx(answer.drafted / answer.plain, rel=1e-3)
    assert (workload.rounds, workload.prompts) == (2 * 6 * 2, 6)
    page = shown([workload, general])
    for words in ("Workload: faster", "General: slower", "24 rounds of 6 prompts", "at most 4"):
        assert words in page


def test_the_cause_is_the_diagnosis_own_and_a_slow_set_says_what_a_round_gives():
    workload, general = set_answers(benchmark(), diagnosis())
    assert workload.cause == "The rotary base is wrong."
    assert general.cause.startswith(f"A round gives 1.00 tokens and costs {general.cost:.2f}")
    assert "1.00 tokens a round against 4.00" in general.cause and "50%" in general.cause
    parted = set_answers(benchmark(), diagnosis(general=compared(1.0, 0.5, equal=7)))[1]
    assert "7 of 10 rounds" in parted.cause


def test_an_older_diagnosis_and_none_at_all_claim_no_more_than_they_know():
    older = diagnosis(verdicts={"acceptance": "good: 4 tokens"}, general=None)
    workload, general = set_answers(benchmark(), older)
    assert workload.cause == "Good: 4 tokens."
    assert "trained" not in general.cause
    workload, general = set_answers(benchmark(), None)
    assert workload.cause == "" and general.cause.startswith("A round gives")


def test_few_prompts_are_no_verdict():
    workload, _ = set_answers(benchmark(prompts=2), None)
    assert workload.verdict == "not measured well enough"
    assert "too few prompts" in shown([workload])


def test_the_reference_drafter_answers_where_there_is_no_own_and_is_named():
    answers = set_answers(benchmark(arm=REFERENCE, arms=(PLAIN,)), diagnosis())
    assert {a.arm for a in answers} == {REFERENCE}
    assert "Workload: faster (reference drafter)" in shown(answers)
    assert "rotary" not in answers[0].cause  # the diagnosis is of another drafter
    both = set_answers(benchmark(arms=(PLAIN, REFERENCE)), None)
    assert {a.arm for a in both} == {OWN}


def test_a_drafter_without_a_baseline_is_not_called_fast():
    (answer, _) = set_answers(benchmark(arms=()), None)
    assert answer.verdict == "not compared with the engine alone"
    assert answer.speedup is answer.plain is answer.cost is None
    assert "unknownx" not in shown([answer]) and "unknown" in shown([answer])


def test_no_benchmark_and_the_engine_alone_are_no_answer():
    assert set_answers(None, None) == []
    assert set_answers(benchmark(arm=PLAIN, arms=()), None) == []
    assert "no benchmark of a drafter yet" in shown([])
