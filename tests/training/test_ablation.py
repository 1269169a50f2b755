"""An ablation compares what it says: equal tokens, each variant with each seed, kept when done."""

import gzip
import json
from dataclasses import asdict, replace

import pytest
import torch

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl
from eagle3lib.target.stream import LiveStates
from eagle3lib.training import ablation, ablation_cells
from eagle3lib.training.ablation import lengths, run_ablation, share_of
from eagle3lib.training.ablation_cells import Ablation, Cell, KeptStates, Workbench

VARIANTS = ("kl", "lk+step_weight:1.0")


@pytest.fixture(scope="module")
def job(tiny_target, tiny_rows, tmp_path_factory):
    out = tmp_path_factory.mktemp("ablation")
    with gzip.open(out / "answers.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in tiny_rows)
    return Ablation(
        str(tiny_target.folder), out / "answers.jsonl.gz", out / "made", VARIANTS, (0, 1),
        tokens=250, epochs=2, heldout=2, draft_vocab_size=48, num_speculative_tokens=2,
        device="cpu", settings=("steps=2", "batch_tokens=60"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(job):
    return run_ablation(job)


def test_every_cell_sees_the_same_tokens_and_judges(job, results, tiny_rows):
    assert {(r["variant"], r["seed"]) for r in results} == {
        (v, s) for v in VARIANTS for s in (0, 1)
    }
    assert len({(r["tokens"], r["updates"]) for r in results}) == 1
    assert results[0]["tokens"] >= job.tokens
    heldout = [row.id for row in tiny_rows if (row.split, row.set) == ("heldout", "workload")]
    for result in results:
        assert [line["id"] for line in result["conversations"]] == heldout[: job.heldout]
        assert (job.out / result["drafter"] / "model.safetensors").exists()
    scores = [sum(lengths(r["conversations"])) for r in results]
    assert scores == sorted(scores)
    assert read_jsonl(job.out / "results.jsonl") == results


def test_judgements_are_those_of_the_trainer(job, results):
    """Conversation by conversation or pooled: the same counts, in the last evaluation's log."""
    for result in results:
        cell = Cell(result["variant"], result["seed"]).folder(job.out)
        last = [r for r in read_jsonl(cell / "metrics.jsonl") if r["kind"] == "evaluation"][-1]
        greedy, sampled = lengths(result["conversations"])
        assert greedy == pytest.approx(last["sets"]["workload"]["acceptance_length"], abs=1e-4)
        assert sampled == pytest.approx(last["estimates"]["workload"]["sampled_length"], abs=1e-4)


def test_finished_cells_stay_and_others_are_made_anew(job, results, monkeypatch):
    monkeypatch.setattr(ablation, "Workbench", None)  # nothing to compute
    assert run_ablation(job) == results
    changed = replace(job, tokens=200)
    assert not any(changed.finished(cell) for cell in job.cells())


def test_a_cell_that_fails_costs_the_others_nothing(job, results, tmp_path, monkeypatch):
    """Results are in the file as each cell ends, and a second run makes what is missing alone."""
    run, seen = Workbench.run, []

    def failing(bench, cell):
        seen.append(len(read_jsonl(tmp_path / "results.jsonl")))
        if cell.variant == "kl" and cell.seed == 0 and len(seen) < 4:
            raise UserError("out of memory", next="buy some")
        return run(bench, cell)

    monkeypatch.setattr(Workbench, "run", failing)
    mine = replace(job, out=tmp_path, seeds=(0,), variants=("kl", "lk+step_weight:1.0", "ce"))
    with pytest.raises(UserError, match=r"1 of 3 cells failed; kl seed 0.*out of memory"):
        run_ablation(mine)
    assert seen == [0, 0, 1]
    assert {r["variant"] for r in read_jsonl(tmp_path / "results.jsonl")} == set(mine.variants[1:])
    made = run_ablation(mine)
    assert len(seen) == 4 and len(made) == 3 and made == read_jsonl(tmp_path / "results.jsonl")
    assert not list(tmp_path.rglob("failed.txt"))
    kl = next(r for r in results if (r["variant"], r["seed"]) == ("kl", 0))
    assert next(r for r in made if r["variant"] == "kl")["steps"] == kl["steps"]


def test_a_training_of_other_settings_is_not_gone_on_with(job, results, tmp_path, monkeypatch):
    """Its checkpoint has as many updates, so that nothing else would tell."""
    one = replace(job, out=tmp_path, variants=("kl",), seeds=(0,))
    monkeypatch.setattr(ablation_cells, "best_drafter", None)  # it fails when it is trained
    with pytest.raises(UserError, match="kl seed 0: TypeError"):
        run_ablation(replace(one, settings=(*one.settings, "learning_rate=0.01")))
    [cell] = one.cells()
    assert (cell.folder(tmp_path) / "checkpoints" / "last").exists()
    monkeypatch.undo()
    [made] = run_ablation(one)
    kl = next(r for r in results if (r["variant"], r["seed"]) == ("kl", 0))
    assert made["conversations"] == kl["conversations"] and made["steps"] == kl["steps"]


@pytest.mark.slow
def test_processes_make_what_one_makes(job, results, tmp_path):
    both = replace(job, out=tmp_path, variants=("kl",))
    found = run_ablation(both, jobs=2)
    expected = [r for r in results if r["variant"] == "kl"]
    assert [lengths(r["conversations"]) for r in found] == [
        lengths(r["conversations"]) for r in expected
    ]


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_are_a_partition_of_near_equal_size(shares):
    cells = [Cell(v, s) for v in "abc" for s in range(2)]
    parts = [share_of(cells, i, shares) for i in range(shares)]
    assert [c for part in parts for c in part] == cells
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("variant", ["klx", "kl+stepweight:1", "kl+muon", "kl+step_weight:3"])
def test_a_variant_that_is_none_is_refused_before_any_work(job, variant, tmp_path):
    with pytest.raises(UserError, match=r"(?s)variant"):
        run_ablation(replace(job, out=tmp_path, variants=(variant,)))
    assert not list(tmp_path.iterdir())


def test_too_few_tokens_are_refused(job, tmp_path):
    with pytest.raises(UserError, match=r"(?s)179 tokens.*at least 6 epochs"):
        run_ablation(replace(job, out=tmp_path, tokens=1000, epochs=1))


def test_rows_that_are_none_are_named(job, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(UserError, match=r"(?s)line 1 is no answer.*rows\.jsonl"):
        run_ablation(replace(job, out=tmp_path / "out", rows=tmp_path / "rows.jsonl"))


def test_kept_states_are_the_live_ones(tiny_target, tiny_rows):
    live = LiveStates(tiny_target, tiny_rows, slots=(2, 5, 7), dtype="float32", batch_tokens=64)
    kept = KeptStates(live)
    kept.keep(live, live.entries[:4], "cpu")
    cut = [replace(e, tokens=e.tokens - 3) for e in kept.entries]
    for entries in (kept.entries, cut):
        for row, other in zip(kept.rows(entries), live.rows(live.entries[:4]), strict=True):
            assert row.entry.tokens == len(row.token_ids) == len(row.slots) == len(row.last)
            torch.testing.assert_close(row.slots, other.slots[: len(row.slots)])
            torch.testing.assert_close(row.last, other.last[: len(row.last)])
