"""Lengths, intervals and the winner of an ablation, on counts that are known."""

from dataclasses import dataclass

import numpy as np
import pytest

from eagle3lib.lab.errors import UserError
from eagle3lib.measure import ablation as judge
from eagle3lib.measure.ablation import GREEDY, SAMPLED, Estimate
from eagle3lib.measure.peer import UNTRAINED
from eagle3lib.report.ablation_figure import ablation_figure


def cell(variant, seed, shares, prompts=("a", "b", "c", "d", "e")):
    """A cell whose conversation i accepts ``shares[i]`` of 100 tries in every judgement."""
    lines = [
        {"id": name, "rounds": 100, "accepted": 100 * share, "labels": [100.0, 50.0],
         "overlap": [100 * share, 50 * share], "right": [0.0, 0.0]}
        for name, share in zip(prompts, shares, strict=True)
    ]  # fmt: skip
    length = {"acceptance_length": 1.0}
    return {
        "variant": variant, "seed": seed, "conversations": lines, "drafter": f"{variant}-{seed}",
        "baselines": {"unigram_workload": length, "bigram_workload": length},
        "untrained": {"sets": {"workload": length},
                      "estimates": {"workload": {"sampled_length": 1.0}}},
    }  # fmt: skip


RNG = np.random.default_rng(1)
BASE = [0.3, 0.4, 0.5, 0.6, 0.2]
CELLS = [cell("kl", s, [x + 0.01 * s for x in BASE]) for s in range(3)]
BETTER = [cell("lk", s, [x + 0.2 + 0.01 * s for x in BASE]) for s in range(3)]
LIKE = [cell("ce", s, [x + RNG.normal(0, 0.05) for x in BASE]) for s in range(3)]


def test_lengths_are_pooled_counts():
    found = judge.estimates(judge.offline_counts(CELLS), "kl")["kl"]
    share = np.mean(BASE) + 0.01
    assert found[GREEDY].value == pytest.approx(1 + share)
    assert found[SAMPLED].value == pytest.approx(1 + share + share**2)
    assert found[GREEDY].low < found[GREEDY].value < found[GREEDY].high


def test_the_reference_is_once_itself_without_doubt():
    """Ratios are paired: seeds and conversations of both are drawn alike."""
    found = judge.estimates(judge.offline_counts(CELLS + BETTER), "kl")
    for name in (f"{GREEDY}_ratio", f"{SAMPLED}_ratio", "score"):
        assert found["kl"][name] == Estimate(1.0, 1.0, 1.0)
        own = found["lk"][name]
        assert 1 < own.low < own.value < own.high
    width = found["lk"][GREEDY].high - found["lk"][GREEDY].low
    ratio = found["lk"][f"{GREEDY}_ratio"]
    assert ratio.high - ratio.low < width / 2


def test_a_default_changes_for_what_is_shown():
    counts = judge.offline_counts
    assert judge.winner(judge.estimates(counts(CELLS + BETTER + LIKE), "kl"), "kl") == "lk"
    assert judge.winner(judge.estimates(counts(CELLS + LIKE), "kl"), "kl") == "kl"


def test_other_conversations_or_seeds_are_refused():
    others = [cell("lk", s, BASE, prompts="abcdf") for s in range(3)]
    for wrong in (others, BETTER[:2]):
        with pytest.raises(UserError, match="different seeds or on different conversations"):
            judge.offline_counts(CELLS + wrong)
    with pytest.raises(UserError, match="no variant 'tv'"):
        judge.estimates(judge.offline_counts(CELLS), "tv")


@dataclass
class Row:
    arm: str
    prompt: str
    accepted: list
    temperature: float = 0.0


def test_served_rounds_are_those_of_the_requests(tmp_path):
    arms = judge.arms_to_serve(CELLS + BETTER, ["lk", "kl"], 2, tmp_path)
    assert list(arms) == ["lk, seed 0", "lk, seed 1", "kl, seed 0", "kl, seed 1"]
    assert arms["lk, seed 1"] == ("lk", tmp_path / "lk-1")
    rows = [
        Row(arm, prompt, [1, 3] if variant == "lk" else [1, 0], heat)
        for arm, (variant, _) in arms.items() for prompt in "xyz" for heat in (0.0, 1.0)
    ]  # fmt: skip
    rows += [Row(UNTRAINED, prompt, [0, 0], heat) for prompt in "xyz" for heat in (0.0, 1.0)]
    names = {arm: variant for arm, (variant, _) in arms.items()} | {UNTRAINED: UNTRAINED}
    found = judge.estimates(judge.served_counts(rows, names), "kl")
    assert (found["lk"][GREEDY].value, found["kl"][SAMPLED].value) == (3.0, 1.5)
    assert found[UNTRAINED]["score"].value == pytest.approx(1 / 1.5)
    assert judge.finalists(found, 9) == ["lk", "kl"], "what was never trained can't win"


def test_an_ablation_cut_short_compares_what_it_has_and_names_what_it_lacks():
    wanted = [(v, s) for v in ("kl", "lk", "ce", "tv") for s in range(3)]
    kept, missing = judge.comparable(CELLS + BETTER[:2] + LIKE[:2], wanted)
    assert {(c["variant"], c["seed"]) for c in kept} == {
        (v, s) for v in ("kl", "lk", "ce") for s in range(2)
    }
    assert judge.offline_counts(kept).keys() == {"kl", "lk", "ce"}
    assert "lk, seed 2: not made" in missing and "kl, seed 2: not all have this seed" in missing
    assert sum("tv" in line for line in missing) == 3
    kept, missing = judge.comparable(CELLS + BETTER + LIKE[:1], [("kl", 0)])
    assert {c["variant"] for c in kept} == {"kl", "lk"} and len(kept) == 6
    assert missing == ["ce, seed 0: not all have this seed"]


def test_cells_that_failed_here_and_there_leave_the_seeds_that_variants_share():
    """No variant has seeds 0 and 1 alone; a choice among whole variants would keep a single one."""
    cells = CELLS[:3] + BETTER[:2] + [LIKE[0], {**LIKE[1], "seed": 9}, {**LIKE[2], "seed": 1}]
    cells.append({**BETTER[2], "seed": 7})
    kept, missing = judge.comparable(cells)
    assert {(c["variant"], c["seed"]) for c in kept} == {
        (v, s) for v in ("kl", "lk", "ce") for s in range(2)
    }
    assert len(missing) == 3


def test_the_figure_shows_every_variant_and_baseline():
    counts = judge.offline_counts(CELLS + BETTER)
    found, seeds = judge.estimates(counts, "kl"), judge.seed_lengths(counts)
    assert seeds["kl"][GREEDY] == pytest.approx([1 + np.mean(BASE) + 0.01 * s for s in range(3)])
    figure = ablation_figure(found, {}, judge.baseline_lengths(CELLS), "lk", "kl", seeds)
    assert {tuple(trace.y) for trace in figure.data if trace.y} == {
        ("kl", "lk"), ("kl",) * 3 + ("lk",) * 3,
    }  # fmt: skip
    gain = found["lk"][f"{SAMPLED}_ratio"].value - 1
    assert any(f"{gain:+.1%}" in str(trace.text) for trace in figure.data)
    assert "lk beats kl" in figure.layout.title.text and f"{gain:+.1%}" in figure.layout.title.text
    plain = ablation_figure(found, {}, judge.baseline_lengths(CELLS), "kl", "kl")
    assert "none is shown to beat kl" in plain.layout.title.text
    assert {a.text for a in figure.layout.annotations} >= {"unigram", "bigram", UNTRAINED, "T = 1"}
    assert list(judge.ablation_table(found)["loss"]) == ["lk", "kl"]
