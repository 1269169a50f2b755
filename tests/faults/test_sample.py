"""A sample of the fault bench on a run small enough for CI: six faults, and the healthy run.

The whole bench is ``make faults``; a fault that is named there and not here is a fault of the
small run's size, not of the rule.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from bench import Bench, judged, judged_healthy
from catalogue import FAULTS, ON_REAL, PAIRS
from kinds import KINDS
from plants import PLANTS

BY_ID = {f.id: f for f in FAULTS}
SAMPLE = ("F01", "F15", "F29", "F35", "F51", "F57")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench.small(tmp_path_factory.mktemp("faults"), KINDS[0])


def test_the_catalogue_is_whole():
    """At least 40 singles and 8 pairs, each with a plant; every section; half of them unseen."""
    assert [f.id for f in FAULTS] == [f"F{i:02d}" for i in range(1, len(FAULTS) + 1)]
    assert len(FAULTS) >= 40 and len(PAIRS) >= 8
    assert PLANTS.keys() == BY_ID.keys()
    assert {f.section for f in FAULTS} == {"measured", "engine", "checkpoint", "training", "data"}
    real = Counter(BY_ID[i].section for i in ON_REAL)
    assert set(real.values()) == {3} and len(real) == 5
    parts = [f.part for f in FAULTS]
    assert parts.count("seen") == parts.count("unseen") and parts.count("fresh") >= 8
    assert len(KINDS) == len({k.name for k in KINDS}) >= 20
    assert all(a in BY_ID and b in BY_ID and BY_ID[a].cause != BY_ID[b].cause for a, b in PAIRS)
    assert all(re.fullmatch(r"[a-z0-9-]+", f.cause) for f in FAULTS)


def test_a_healthy_run_has_no_finding_above_note(bench):
    causes = bench.diagnose([])
    assert judged_healthy(causes) == "right", causes


@pytest.mark.parametrize("fault", SAMPLE)
def test_a_planted_fault_is_the_first_finding(bench, fault):
    causes = bench.diagnose([fault])
    assert judged(causes, {BY_ID[fault].cause}) == "right", causes[:3]
