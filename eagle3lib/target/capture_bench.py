"""How fast states are captured, beside what bounds it and what is usual.

Ways, over the same rows, with the target loaded already:

    capture      rows packed, states recorded, checked and written as shards with hash and index
    prefill      the same packed forwards, nothing recorded
    padded       8 rows at once in the data's order, padded to their longest, through the causal
                 model with output_hidden_states; one safetensors file a conversation
    padded, no head   the same through the decoder alone, without logits

All run in this process on its threads, in turns that shift by one each round. A rate is tokens
over seconds; beside wall time there is CPU time of all threads, which another job on the machine
lengthens far less. Ratios are of two ways in one round; the median over rounds is the figure.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.folder import Target
from eagle3lib.target.forward import forward_packed, laid_out, length_batches
from eagle3lib.target.model import decoder_of
from eagle3lib.target.packing import can_pack

BATCH = 8
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


class Loaded(InProcess):
    """A source that stays loaded from one capture to the next."""

    def __enter__(self) -> Loaded:
        if self.model is None:
            self._load()
        return self

    def __exit__(self, *_: object) -> None:
        return None


def capture_rounds(
    target: Target,
    rows: list[AnswerRow],
    folder: Path,
    *,
    slots: tuple[int, ...],
    dtype: str,
    batch_tokens: int,
    rounds: int,
) -> list[dict[str, Any]]:
    """One line a round: tokens per second of each way by each clock, and the ratios of ``capture``
    to the others. ``folder`` is for what is written; it is deleted."""
    source = Loaded(target, slots, dtype, batch_tokens)
    ids = [row.prompt_token_ids + row.answer_token_ids for row in rows]
    settings = {"slots": slots, "dtype": dtype, "batch_tokens": batch_tokens, "shard_rows": 64}

    def captured() -> None:
        capture(target, rows, folder / "capture", source=source, **settings)

    ways: dict[str, Callable[[], None]] = {
        "capture": captured,
        "prefill": lambda: _prefill(source, ids),
        "padded": lambda: _padded(source, ids, folder / "padded", head=True),
        "padded, no head": lambda: _padded(source, ids, folder / "padded", head=False),
    }
    names, lines = list(ways), []
    with source:
        if not can_pack(decoder_of(source.model)):
            found = f"{type(source.model).__name__} can't be packed"
            raise UserError(found, expected="a target whose rows are captured without padding")
        _prefill(source, ids[:1])  # what is done once is not timed
        for number in range(rounds):
            line: dict[str, Any] = {"round": number}
            for name in names[number % len(names) :] + names[: number % len(names)]:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                before = {clock: now() for clock, now in CLOCKS.items()}
                ways[name]()
                for clock, now in CLOCKS.items():
                    spent = now() - before[clock]
                    line[f"{name}, {clock}"] = sum(map(len, ids)) / spent
            lines.append(line)
    shutil.rmtree(folder, ignore_errors=True)
    return lines


def ratio_rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each way and clock: median tokens per second, and ``capture`` over it, the median of
    the paired ratios with the least and the greatest."""
    found = []
    for key in (k for k in lines[0] if k != "round"):
        name, clock = key.rsplit(", ", 1)
        ratios = [line[f"capture, {clock}"] / line[key] for line in lines]
        found.append(
            {
                "way": name,
                "clock": clock,
                "tokens_per_s": statistics.median(line[key] for line in lines),
                "capture_over_it": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return sorted(found, key=lambda row: (row["clock"], row["way"]))


def some_of(rows: list[AnswerRow], most: int) -> list[AnswerRow]:
    """At most ``most`` rows, of every length in equal steps."""
    ordered = sorted(rows, key=lambda r: (len(r.prompt_token_ids) + len(r.answer_token_ids), r.id))
    step = max(1.0, len(ordered) / most)
    return [ordered[int(i * step)] for i in range(min(most, len(ordered)))]


def reached(
    ways: list[dict[str, Any]],
    reads: list[dict[str, Any]],
    sizes: list[dict[str, Any]],
    losses: list[dict[str, Any]],
    most_lost: float,
    most_bytes: float,
) -> list[dict[str, Any]]:
    """The goals beside what was found; ``reached`` is None where nothing was measured.

    The last is that of the formats: bytes a token, as a share of four bf16 states, of the smallest
    format that loses at most ``most_lost`` of the acceptance length on the workload.
    """

    def over(way: str) -> float:
        return next(w["capture_over_it"] for w in ways if (w["way"], w["clock"]) == (way, "cpu"))

    lost = {line["format"]: line["lost"] for line in losses if line["set"] == "workload"}
    fit = {s["format"]: s["of_four_bf16_states"] for s in sizes if s["format"] in lost}
    fit = {name: share for name, share in fit.items() if lost[name] <= most_lost}
    least = min(fit.values(), default=None)
    found = [
        ("capture over padded batches of 8, CPU time", over("padded"), 2.5, True),
        ("the same without their head", over("padded, no head"), None, True),
        ("capture over prefill, CPU time", over("prefill"), 0.97, True),
        ("shuffled reads over stored order", min(r["ratio"] for r in reads), 0.9, True),
        (f"bytes of a format that loses at most {most_lost:.0%}", least, most_bytes, False),
    ]
    return [
        {
            "goal": name,
            "wanted": wanted,
            "found": value,
            "reached": None
            if value is None or wanted is None
            else value >= wanted
            if at_least
            else value <= wanted,
        }
        for name, value, wanted, at_least in found
    ]


def padding_share(lengths: list[int], batch: int = BATCH, seed: int = 0) -> float:
    """Share of the padded batches' cells that are padding."""
    cells = sum(len(b) * max(lengths[i] for i in b) for b in _data_order(len(lengths), batch, seed))
    return 1 - sum(lengths) / cells


def _data_order(rows: int, batch: int = BATCH, seed: int = 0) -> list[list[int]]:
    """Batches of rows in an order that knows nothing of their lengths."""
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return [order[i : i + batch] for i in range(0, rows, batch)]


@torch.no_grad()
def _prefill(source: InProcess, ids: list[list[int]]) -> None:
    lengths = [len(row) for row in ids]
    for batch in length_batches(lengths, source.batch_tokens, pads=False):
        flat, own, shared = laid_out([ids[i] for i in batch], share=True)
        forward_packed(source.model, flat, own, (), shared=shared)


@torch.no_grad()
def _padded(source: InProcess, ids: list[list[int]], folder: Path, *, head: bool) -> None:
    folder.mkdir(exist_ok=True)
    model = source.model if head else decoder_of(source.model)
    for batch in _data_order(len(ids)):
        width = max(len(ids[i]) for i in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for place, i in enumerate(batch):
            tokens[place, : len(ids[i])] = torch.tensor(ids[i])
            mask[place, : len(ids[i])] = 1
        made = model(
            input_ids=tokens, attention_mask=mask, output_hidden_states=True, use_cache=False
        ).hidden_states
        states = torch.stack([*(made[slot] for slot in source.slots), made[-1]], dim=2)
        for place, i in enumerate(batch):
            own = states[place, : len(ids[i])].contiguous()
            tensors = {"hidden_states": own, "token_ids": torch.tensor(ids[i])}
            save_file(tensors, folder / f"hs_{i}.safetensors")
