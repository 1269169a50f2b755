"""What a plan says of a target, and when it refuses."""

from __future__ import annotations

import pytest

from eagle3lib.lab.params import PlanParams
from eagle3lib.plan.facts import check_plan, drafter_facts, needs, target_facts

MACHINE = {"disk_free_bytes": 10**12, "memory_available_bytes": 10**12}


def test_sizes_follow_from_the_config(tiny_target):
    facts = target_facts(tiny_target)
    assert facts["state_bytes_per_token"] == 4 * 64 * 2
    assert facts["kv_bytes_per_token"] == 2 * 10 * 2 * 16 * 2  # keys and values, layers, heads, dim
    assert facts["slots"] == [2, 5, 7]


def test_a_larger_draft_vocabulary_costs_more_a_round(tiny_target):
    costs = [
        drafter_facts(tiny_target, size, 3)["least_cost_of_a_round"] for size in (32, 128, 300)
    ]
    assert costs == sorted(costs)
    assert costs[0] > 1


def test_a_plan_that_fits_has_no_finding(tiny_target):
    facts, cfg = target_facts(tiny_target), PlanParams(max_model_len=128)
    assert [f.code for f in check_plan(cfg, facts, needs(cfg, facts), MACHINE)] == []


@pytest.mark.parametrize(
    ("change", "code"),
    [({"disk_free_bytes": 10**4}, "disk"), ({"memory_available_bytes": 10**6}, "memory")],
)
def test_what_does_not_fit_is_refused(tiny_target, change, code):
    facts, cfg = target_facts(tiny_target), PlanParams(max_model_len=128)
    found = check_plan(cfg, facts, needs(cfg, facts), MACHINE | change)
    assert [(f.code, f.severity) for f in found] == [(code, "error")]


def test_the_largest_setting_that_fits_is_named_and_fits(tiny_target):
    facts, cfg = target_facts(tiny_target), PlanParams(max_model_len=128, answer_tokens=100_000)
    machine = MACHINE | {"disk_free_bytes": 50_000_000}
    found = check_plan(cfg, facts, needs(cfg, facts), machine)
    most = int(found[0].remedy.split("answer_tokens=")[1].split()[0])
    smaller = cfg.model_copy(update={"answer_tokens": most})
    assert 0 < most < 100_000
    assert check_plan(smaller, facts, needs(smaller, facts), machine) == []


def test_a_context_beyond_the_targets_is_refused(tiny_target):
    facts, cfg = target_facts(tiny_target), PlanParams(max_model_len=4096)
    found = check_plan(cfg, facts, needs(cfg, facts), MACHINE)
    assert [f.code for f in found] == ["context"]
    assert "256" in found[0].remedy
