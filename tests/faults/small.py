"""A whole run of a random target of ten layers, small enough for a test: seconds, a few MB.

Its drafter is trained on the held-out answers as well: text of a random target can't be
generalised from, and a drafter that is never accepted shows no fault. Rounds are the simulator's.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.lab.files import read_json, read_jsonl, write_json, write_text
from eagle3lib.lab.params import TrainParams
from eagle3lib.measure.arms import OWN, PLAIN, RequestRow
from eagle3lib.target.capture import capture
from eagle3lib.target.folder import Target
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.loop import Trainer
from eagle3lib.training.start import trained_drafter

STEPS = 3
_ANSWER = 40


def small_run(folder: Path, target: Target, model: Any, head: Any, greedy: Any) -> Path:
    """Write the run into ``folder`` and return it."""
    rows = _answers(target, model, greedy)
    data = folder / "01_generate_data"
    write_json(data / "inputs.json", {"params": {"temperature": 0.0}})
    write_text(data / "answers.jsonl", "".join(json.dumps(asdict(r)) + "\n" for r in rows))
    states = folder / "02_capture_hidden_states" / "states"
    capture(target, rows, states, slots=(2, 5, 7), dtype="float32", batch_tokens=2048, shard_rows=8)
    counts = count_tokens(r.answer_token_ids for r in rows)
    vocab = build_vocab_map(counts, target.vocab_size, target.vocab_size - 40, forced=[2])
    vocab_file = folder / "03_build_vocab_map" / "vocab_map.safetensors"
    vocab.save(vocab_file)
    _train(folder, target, states, vocab_file)
    _heldout(states, {r.id for r in rows if r.split == "heldout"})
    drafter = trained_drafter(folder / "04_train_drafter" / "checkpoints" / "best", target)
    export = folder / "05_export_drafter" / "drafter"
    export.mkdir(parents=True)
    write_drafter(export, drafter, torch.float32, target.config)
    _benchmark(folder / "06_benchmark_serving", [r for r in rows if r.split == "heldout"])
    write_json(folder / "manifest.json", {"target": {"name": str(target.folder)}})
    return folder


def _answers(target: Target, model: Any, greedy: Any) -> list[AnswerRow]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for i in range(30):
        opening = [1, *torch.randint(3, target.vocab_size, (2,), generator=generator).tolist()]
        prompt = opening + greedy(model, opening, 14 + i % 5)  # a prompt that the target would say
        split = "train" if i < 20 else "heldout"
        rows.append(
            AnswerRow(f"row-{i:02d}", "workload", split, [], prompt, greedy(model, prompt, _ANSWER),
                      "", "length")
        )  # fmt: skip
    return rows


def _train(folder: Path, target: Target, states: Path, vocab: Path) -> None:
    index = read_json(states / "index.json")
    for entry in index["conversations"]:
        entry["split"] = "train"
    write_json(states / "index.json", index)
    place = folder / "04_train_drafter"
    place.mkdir(parents=True)
    params = TrainParams(target=str(target.folder), epochs=30, batch_tokens=345, steps=4,
                         precision="float32", learning_rate=4e-3, checkpoint_every=30)  # fmt: skip
    Trainer(params, target, Folders(place, states, vocab)).run()
    evaluations = [r for r in read_jsonl(place / "metrics.jsonl") if r["kind"] == "evaluation"]
    write_json(place / "inputs.json", {"params": params.model_dump(mode="json")})
    write_json(
        place / "metrics.json",
        {"trained_tokens": 20 * _ANSWER, "num_speculative_tokens": STEPS,
         "heldout": {}, "baselines": evaluations[0]["baselines"]},
    )  # fmt: skip


def _heldout(states: Path, ids: set[str]) -> None:
    index = read_json(states / "index.json")
    for entry in index["conversations"]:
        entry["split"] = "heldout" if entry["id"] in ids else "train"
    write_json(states / "index.json", index)


def _benchmark(folder: Path, rows: list[AnswerRow]) -> None:
    """Requests without a record yet: ``Plant.record`` fills it in."""
    requests = [
        RequestRow(arm, r.set, r.id, 0, r.prompt_token_ids, r.answer_token_ids, "length", 1.0,
                   [] if arm == OWN else None, [] if arm == OWN else None)
        for r in rows for arm in (PLAIN, OWN)
    ]  # fmt: skip
    write_text(folder / "requests.jsonl", "".join(json.dumps(asdict(r)) + "\n" for r in requests))
    write_json(folder / "servers.json", {PLAIN: {"threads": 2}, OWN: {"threads": 2}})
    lines = [{"arm": arm, "set": "workload"} for arm in (PLAIN, OWN)]
    write_json(
        folder / "metrics.json",
        {"dtype": "float32", "num_speculative_tokens": STEPS, "temperature": 0.0, "arms": lines,
         "counters": {OWN: {}}},
    )  # fmt: skip
