"""A sample of the fault bench on a run small enough for CI: six faults, and the healthy run.

The whole bench is ``make faults``; a fault that is named there and not here is a fault of the
small run's size, not of the rule.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest
from bench import Bench, judged, judged_healthy
from catalogue import FAULTS, ON_REAL, PAIRS, PAIRS_ON_REAL
from kinds import KINDS
from plants import PLANTS

from eagle3lib.diagnose.causes import causes_of
from eagle3lib.diagnose.evidence import collect
from eagle3lib.diagnose.material import read_material

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
    assert min(real.values()) >= 4 and len(real) == 5 and len(set(ON_REAL)) >= 40
    assert 8 <= PAIRS_ON_REAL <= len(PAIRS)
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


def test_a_measured_drafter_from_elsewhere_is_not_judged_by_the_runs_training(bench, tmp_path):
    """Phase 06 with parameter ``drafter``: its export is that folder, its training unknown."""
    run = bench.plant("elsewhere").folder
    (run / "05_export_drafter" / "drafter").rename(tmp_path / "drafter")
    measured = run / "06_benchmark_serving" / "inputs.json"
    told = json.loads(measured.read_text()) if measured.exists() else {"params": {}}
    told["params"]["drafter"] = str(tmp_path / "drafter")
    measured.write_text(json.dumps(told))
    m = read_material(run, bench.target, bench.states_of, bench.head)
    assert m.export == tmp_path / "drafter" and m.drafter is not None
    assert m.training == {} and m.trained == {}
    found = [c for c in causes_of(collect(m, every_variant=False)) if c.severity != "note"]
    assert found == [], found
