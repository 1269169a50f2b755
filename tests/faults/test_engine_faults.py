"""The real vLLM: healthy it gets no finding above "note", and a fault planted into its own code is
named, on the serving side, from the rounds that it recorded."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from bench import Bench, judged, judged_healthy
from engine_faults import ENGINE_FAULTS, VARIABLE, plugin_path
from small import Kind

from eagle3lib.diagnose.causes import causes_of
from eagle3lib.diagnose.evidence import collect
from eagle3lib.diagnose.material import read_material
from eagle3lib.engine.client import Client
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.measure.arms import OWN

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

WANTED = {
    "": set(),
    "slots reversed": {"engine-layer-ids"},
    "draft steps late": {"engine-position"},
    "prompt's draft keys lost": {"engine-prefix-cache"},
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench.small(tmp_path_factory.mktemp("engine"), Kind(answer=48, asked=30))


@pytest.mark.parametrize("fault", WANTED, ids=lambda f: f or "healthy")
def test_a_fault_of_the_real_engine_is_named(bench, fault, tmp_path, monkeypatch):
    assert WANTED.keys() == {"", *ENGINE_FAULTS}
    path = [plugin_path(tmp_path / "plugin"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in path if p))
    monkeypatch.setenv(VARIABLE, fault)
    plant = bench.plant("served")
    messages = {r.id: r.messages for r in bench.rows() if r.split == "heldout"}
    engine = EngineConfig(
        bench.target.folder, "float32", 256, max_num_seqs=1, compile=False,
        drafter=plant.folder / "05_export_drafter" / "drafter", num_speculative_tokens=3,
    )  # fmt: skip
    with EngineServer(engine, log=tmp_path / "vllm.log") as server:
        client = Client(server.url)
        said = {i: client.chat(m, max_tokens=48, temperature=0.0) for i, m in messages.items()}

    def answered(row):
        a = said[row.prompt]
        made = replace(row, prompt_token_ids=a.prompt_token_ids,
                       answer_token_ids=a.answer_token_ids)  # fmt: skip
        if row.arm != OWN:
            return made
        return replace(made, accepted=a.rounds.accepted, drafted=a.rounds.drafted)

    plant.requests(answered)
    plant.count()
    found = read_material(plant.folder, bench.target, bench.states_of, bench.head)
    causes = causes_of(collect(found))
    print(fault, [(c.severity, c.code, c.title, c.evidence) for c in causes[:3]])
    if not fault:
        assert judged_healthy(causes) == "right", causes
    else:
        assert judged(causes, WANTED[fault]) == "right", causes[:3]
        assert causes[0].question == 2
