"""The whole pipeline with the real engine, and engine and simulator round by round in float32."""

from __future__ import annotations

import json
import re

import pytest

from eagle3lib.diagnose.material import read_material
from eagle3lib.diagnose.phase import replay_sets
from eagle3lib.diagnose.replay import compare_counts
from eagle3lib.lab.params import PHASES
from eagle3lib.measure.arms import OWN, PLAIN, read_requests
from eagle3lib.target.folder import open_target

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.parametrize("phase", list(PHASES))
def test_notebook_runs_under_nbval(tiny_run, phase):
    assert phase in tiny_run.results, f"an earlier notebook failed: {list(tiny_run.results)[-1]}"
    code, output = tiny_run.results[phase]
    assert code == 0, output


def test_every_round_of_the_engine_equals_the_simulator(tiny_run):
    """vLLM's own record of every round against greedy speculation replayed offline (fp32).

    Only a last round that the length limit cut may differ: the engine counts accepted drafts
    beyond the cut, of which nothing is known offline. The drafter is good enough that a simulator
    off by one position, layer or step could not pass: about a third of the rounds accept
    something.
    """
    material = read_material(tiny_run.folder, open_target("smollm2-135m-instruct"))
    assert (material.dtype, material.steps) == ("float32", 3)
    answers = [a for replayed in replay_sets(material).values() for a in replayed]
    compared = compare_counts(answers, 3, "float32")
    assert compared["rounds_compared"] > 150
    assert compared["rounds_equal"] == compared["rounds_compared"]
    assert compared["cut_last_rounds"] <= len(answers)
    for answer in answers:
        theirs, ours = answer.row.accepted, answer.simulated.accepted
        assert len(theirs) == len(ours)
        assert theirs[:-1] == ours[:-1]
        assert theirs[-1] >= ours[-1] if answer.simulated.cut else theirs[-1] == ours[-1]
    assert compared["engine"]["acceptance_length"] > 1.15


def test_both_arms_give_the_same_answers(tiny_run):
    """Greedy speculative output is the target's own greedy output, token by token (fp32)."""
    rows = read_requests(tiny_run.folder / "06_benchmark_serving")
    plain = {r.prompt: r.answer_token_ids for r in rows if r.arm == PLAIN}
    own = {r.prompt: r.answer_token_ids for r in rows if r.arm == OWN}
    assert plain == own
    assert len(plain) == 6


def test_counts_follow_the_accounting_identity(tiny_run):
    metrics = json.loads((tiny_run.folder / "06_benchmark_serving" / "metrics.json").read_text())
    for line in metrics["arms"]:
        counts = line.get("acceptance")
        if counts:
            expected = counts["requests"] + counts["rounds"] + counts["accepted"] - counts["cut"]
            assert line["tokens"] == expected
            assert 0 <= counts["cut"] <= 3 * counts["requests"]
            assert counts["drafted"] == 3 * counts["rounds"]


def test_the_servers_own_counters_agree_with_its_answers(tiny_run):
    metrics = json.loads((tiny_run.folder / "06_benchmark_serving" / "metrics.json").read_text())
    lines = [line["acceptance"] for line in metrics["arms"] if line["arm"] == OWN]
    counters = metrics["counters"][OWN]
    assert counters["drafts"] == sum(line["rounds"] for line in lines)
    assert counters["accepted_tokens"] == sum(line["accepted"] for line in lines)
    for k in range(3):
        assert counters[f"accepted_at_{k}"] == sum(line["accepted_at"][k] for line in lines)


def test_the_run_page_opens_with_the_answer(tiny_run, monkeypatch):
    """The page carries its figures' library and no address of the network."""
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tiny_run.outputs))
    from eagle3lib.report.page import build_page

    text = build_page("tiny").read_text()
    for word in ("Workload: ", "General: ", "acceptance length", "engine alone", "Findings"):
        assert word in text
    assert text.count("<figure") == 3
    assert 'src="http' not in text
    outside_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "http" not in outside_scripts
