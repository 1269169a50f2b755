"""Our trainer against a peer's: blocks in turns for the speed, served drafts for the quality.

Speed: both train one epoch of the same conversations in short blocks, ours, peer, ours, peer; the
ratio is taken within each pair, since the machine drifts. Quality: acceptance length on held-out
prompts, served by vLLM or simulated along the target's answers, after equal tokens (the same
epochs) and after equal time (as many epochs of ours as fit into the peer's updates).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from eagle3lib.drafter.checkpoint import read_drafter, set_vocab
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.phase import export_drafter
from eagle3lib.drafter.simulate import simulate
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.params import BenchmarkParams, ExportParams
from eagle3lib.lab.run import Phase
from eagle3lib.measure.accounting import MIN_PROMPTS
from eagle3lib.measure.arms import RequestRow, benchmark_prompts, counts_of
from eagle3lib.measure.serve_arms import run_arms
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore
from eagle3lib.training.arithmetic import gemm_peak, needed_operations
from eagle3lib.training.data import conversations, trainable
from eagle3lib.training.job import Folders, best_drafter
from eagle3lib.training.peer import OWN, PEER, BenchRows, Trained

Train = Callable[[Path], Trained]
UNTRAINED, OWN_LONGER = "untrained", "ours, equal time"
_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Block:
    """One pair of trainings and the matrix product's rate (operations a second) before them."""

    peak_per_s: dict[str, float]
    own: Trained
    peer: Trained

    @property
    def ratio(self) -> float:
        return self.own.tokens_per_s / self.peer.tokens_per_s


def speed_blocks(folder: Path, count: int, own: Train, peer: Train, threads: int) -> list[Block]:
    """``own`` and ``peer`` train into the folder given to them; finished blocks are kept."""
    blocks = []
    for number in range(count):
        here = folder / f"block-{number}"
        measured = here / "peak.json"
        if not measured.exists():
            write_json(measured, {d: gemm_peak(threads, d) for d in _DTYPES})
        blocks.append(Block(read_json(measured), own(here / "own"), peer(here / "peer")))
    return blocks


def epoch_operations(
    store: StateStore, rows: BenchRows, target: Target, vocab: VocabMap, steps: int
) -> dict[str, int]:
    """Operations that one epoch over ``rows`` needs, by part (see ``training/arithmetic.py``)."""
    config = DrafterConfig.for_target(target.config, len(vocab.d2t))
    pairs = [(store.row(e).token_ids, e.prompt_tokens) for e in rows.train]
    return needed_operations(config, pairs, vocab.t2d, steps)


def speed_summary(blocks: list[Block], operations: dict[str, int]) -> dict[str, Any]:
    """Medians over the blocks. ``operations``: :func:`epoch_operations` of the block's rows.

    The shares are of the best rate seen in any block, of either dtype: neither a slow moment of the
    machine nor a dtype that it multiplies slowly must flatter a trainer.
    """
    peak = {d: max(b.peak_per_s[d] for b in blocks) for d in _DTYPES}
    best = max(peak.values())
    ratios, whole = [b.ratio for b in blocks], sum(operations.values())
    return {
        "blocks": [asdict(b) | {"ratio": round(b.ratio, 4)} for b in blocks],
        "needed_operations": operations,
        "gemm_peak_per_s": peak,
        OWN: _trainer_speed([b.own for b in blocks], whole, best),
        PEER: _trainer_speed([b.peer for b in blocks], whole, best),
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "low": round(min(ratios), 4),
            "high": round(max(ratios), 4),
        },
    }


def _trainer_speed(runs: list[Trained], operations: int, peak_per_s: float) -> dict[str, Any]:
    peaks = [r.peak_rss_bytes for r in runs if r.peak_rss_bytes is not None]
    return {
        "tokens_per_s": round(statistics.median(r.tokens_per_s for r in runs), 1),
        "share_of_peak": round(
            statistics.median(operations * r.epochs / r.seconds for r in runs) / peak_per_s, 4
        ),
        "cpu_s": round(statistics.median(r.cpu_s for r in runs), 1),
        "peak_rss_bytes": max(peaks) if peaks else None,
    }


def epochs_in_equal_time(own: Trained, peer: Trained) -> int:
    """Epochs whose updates we finish in the time of the peer's, at least one. What is around the
    updates is left out on both sides: a training that was killed has paid it more than once."""
    return max(1, math.floor(peer.seconds / (own.seconds / own.epochs)))


def export_own(training: Path, data: Path, target: Target, folder: Path) -> Path:
    """The serving folder of a training of :func:`eagle3lib.training.peer.train_own`."""
    drafter, _ = best_drafter(
        Folders(phase=training, states=data / "states", vocab=data / "vocab_map.safetensors"),
        target,
    )
    return export_drafter(drafter, folder, ExportParams(), target, "Trained for a benchmark.")


def export_untrained(vocab: VocabMap, target: Target, folder: Path) -> Path:
    """A drafter of random weights whose head is the target's: what it accepts was not learnt."""
    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig.for_target(target.config, len(vocab.d2t)))
    with torch.no_grad():
        drafter.lm_head.weight.copy_(TargetHead(target).head[vocab.target_ids])
    set_vocab(drafter, vocab)
    return export_drafter(drafter, folder, ExportParams(), target, "Never trained.")


@dataclass
class _Serving(Phase):
    """A benchmark's phase whose files lie in a folder of their own."""

    base: Path = Path()

    @property
    def folder(self) -> Path:
        return self.base


def serve_drafters(
    folder: Path, cfg: BenchmarkParams, drafters: dict[str, Path], target: Target
) -> list[RequestRow]:
    """Every held-out prompt of every drafter, one server after the other; what was asked stays."""
    phase = _Serving(params=cfg, inputs={}, base=folder)
    folder.mkdir(parents=True, exist_ok=True)
    prompts = benchmark_prompts(phase, cfg)
    rows: list[RequestRow] = []
    for name, drafter in drafters.items():
        rows = run_arms(phase, cfg, {name: drafter}, prompts, target.folder)
    return [row for row in rows if row.arm in drafters]


def simulate_drafters(
    store: StateStore, drafters: dict[str, Path], target: Target, steps: int
) -> list[RequestRow]:
    """Rounds of the greedy simulator along every held-out answer of the run, each drafter's in
    fp32; no engine. Rows as :func:`serve_drafters` gives them, without times."""
    entries = trainable(store.select(split="heldout")).entries
    items, embedding = conversations(store, entries), TargetHead(target).embedding
    rows = []
    for name, folder in drafters.items():
        drafter = read_drafter(folder, target.config, embedding, torch.float32)
        for entry, item, replay in zip(
            entries, items, simulate(drafter, items, steps), strict=True
        ):
            ids, prompt = item.token_ids.tolist(), item.prompt_tokens
            rows.append(
                RequestRow(
                    arm=name, set=entry.set, prompt=entry.id, repeat=0,
                    prompt_token_ids=ids[:prompt], answer_token_ids=ids[prompt:],
                    finish_reason="simulated", duration_s=0.0, accepted=replay.accepted,
                    drafted=[steps] * len(replay.accepted),
                )
            )  # fmt: skip
    return rows


def quality_summary(
    rows: list[RequestRow], trained: dict[str, Trained], steps: int
) -> dict[str, Any]:
    """Counts of every drafter by set and in all, and the ratio of acceptance lengths to the
    peer's."""
    arms = list(dict.fromkeys(row.arm for row in rows))
    sets = list(dict.fromkeys(row.set for row in rows))
    lines = {}
    for arm in arms:
        mine = [r for r in rows if r.arm == arm]
        lines[arm] = {
            "training": asdict(trained[arm]) if arm in trained else None,
            "all": counts_of(mine, steps).as_dict(),
            "sets": {s: counts_of([r for r in mine if r.set == s], steps).as_dict() for s in sets},
        }
    ratios = {arm: length_ratio(rows, arm, PEER) for arm in arms if arm != PEER}
    return {"num_speculative_tokens": steps, "drafters": lines, "ratio_to_peer": ratios}


def length_ratio(
    rows: list[RequestRow], arm: str, other: str, resamples: int = 2000
) -> dict[str, float | None]:
    """Pooled acceptance length of ``arm`` by that of ``other``, with its 95 % interval.

    The interval is a bootstrap over prompts, each with its answers from both; None below five.
    """
    rounds = {(r.arm, r.prompt): (len(r.accepted), sum(r.accepted)) for r in rows if r.accepted}
    prompts = sorted({p for a, p in rounds if a == arm} & {p for a, p in rounds if a == other})
    table = np.array([[*rounds[arm, p], *rounds[other, p]] for p in prompts], dtype=float)

    def ratio(sums: np.ndarray) -> np.ndarray:
        return (1 + sums[..., 1] / sums[..., 0]) / (1 + sums[..., 3] / sums[..., 2])

    low = high = None
    if len(table) >= MIN_PROMPTS:
        picks = np.random.default_rng(0).integers(0, len(table), (resamples, len(table)))
        low, high = (float(x) for x in np.percentile(ratio(table[picks].sum(1)), [2.5, 97.5]))
    value = float(ratio(table.sum(0)))
    return {
        "value": round(value, 4),
        "low": None if low is None else round(low, 4),
        "high": None if high is None else round(high, 4),
    }


def speed_table(speed: dict[str, Any]) -> pd.DataFrame:
    """Both trainers as people read them."""
    return pd.DataFrame(
        [
            {
                "trainer": name,
                "tokens/s (median)": speed[name]["tokens_per_s"],
                "share of the matrix peak": f"{speed[name]['share_of_peak']:.1%}",
                "CPU seconds a block": speed[name]["cpu_s"],
                "peak memory, MB": (speed[name]["peak_rss_bytes"] or 0) // 10**6 or None,
            }
            for name in (OWN, PEER)
        ]
    )


def quality_table(quality: dict[str, Any]) -> pd.DataFrame:
    lines = []
    for name, line in quality["drafters"].items():
        run = line["training"] or {}
        ratio = quality["ratio_to_peer"].get(name, {})
        entry = {
            "drafter": name,
            "epochs": run.get("epochs"),
            "training, s of updates": run.get("seconds"),
            "acceptance length": line["all"]["acceptance_length"],
        }
        entry |= {f"{s} set": counts["acceptance_length"] for s, counts in line["sets"].items()}
        entry["by the peer's"] = ratio.get("value")
        if ratio.get("low") is not None:
            entry["95 % interval"] = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        lines.append(entry)
    return pd.DataFrame(lines)
