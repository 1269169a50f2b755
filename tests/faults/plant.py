"""Faults planted into a copy of a healthy run: its files are changed, never a finding.

A fault in an engine is planted in the record of rounds: what an engine with this fault would have
recorded, made by the simulator with the fault applied. A fault in a checkpoint changes the export
and then the record, since an engine serves what it is given. Answers stay the target's own, as
greedy speculation is lossless.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.diagnose.live import StatesOf
from eagle3lib.diagnose.served import Answered, Setting, drafts_of, replays
from eagle3lib.diagnose.variants import engine_variants
from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map, count_tokens
from eagle3lib.lab.files import read_json, write_atomic, write_json, write_text
from eagle3lib.measure.arms import OWN, RequestRow, counts_of, read_requests
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead
from eagle3lib.target.states import (
    StateEntry,
    StateStore,
    captured_row,
    ids_hash,
    write_index,
    write_shard,
)

DATA, STATES, MAP, TRAIN, EXPORT, BENCH = (
    "01_generate_data", "02_capture_hidden_states", "03_build_vocab_map", "04_train_drafter",
    "05_export_drafter", "06_benchmark_serving",
)  # fmt: skip
Generate = Callable[[list[int], int], list[int]]
StoredAs = tuple[StateEntry, torch.Tensor, torch.Tensor]
ChangeRow = Callable[[StateEntry, torch.Tensor, torch.Tensor], StoredAs | None]


class Inapplicable(Exception):
    """The fault means nothing in this run: a rotary base of 10,000 where it is 10,000."""


class Plant:
    """A copy of a run (hard links; changed files are written anew) and the target behind it."""

    def __init__(
        self, healthy: Path, folder: Path, target: Target, head: TargetHead,
        states_of: StatesOf, generate: Generate,
    ):  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(
            healthy, folder, copy_function=os.link,
            ignore=shutil.ignore_patterns("logs", "reports", "index.html", "*.lock", "07_*"),
        )  # fmt: skip
        self.folder, self.target, self.head = folder, target, head
        self.states_of, self.generate = states_of, generate
        self.random = random.Random(0)
        self.changes: list[Any] = []  # faults of the engine, in the order of planting

    # --- files ---

    def json(self, path: str, change: Callable[[Any], Any]) -> None:
        content = read_json(self.folder / path)
        write_json(self.folder / path, change(content) or content)

    def tensors(self, path: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(self.folder / path)
        change(tensors)
        write_atomic(
            self.folder / path, lambda tmp: save_file(tensors, tmp, metadata={"format": "pt"})
        )

    def export(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        self.tensors(f"{EXPORT}/drafter/model.safetensors", change)

    def config(self, **changes: Any) -> None:
        self.json(f"{EXPORT}/drafter/config.json", lambda c: c | changes)

    def cut(self, path: Path) -> None:
        half = path.read_bytes()[: path.stat().st_size // 2]
        write_atomic(path, lambda tmp: tmp.write_bytes(half))

    # --- answers and requests ---

    def rows(self, change: Callable[[AnswerRow], AnswerRow | None]) -> None:
        kept = [r for row in read_answers(self.folder / DATA) if (r := change(row)) is not None]
        self._jsonl(f"{DATA}/answers.jsonl", [asdict(r) for r in kept])

    def trained(self, change: Callable[[AnswerRow], AnswerRow | None]) -> None:
        self.rows(lambda r: change(r) if r.trained else r)

    def requests(self, change: Callable[[RequestRow], RequestRow]) -> None:
        rows = [change(r) for r in read_requests(self.folder / BENCH)]
        self._jsonl(f"{BENCH}/requests.jsonl", [asdict(r) for r in rows])

    def _jsonl(self, path: str, rows: list[dict[str, Any]]) -> None:
        write_text(self.folder / path, "".join(json.dumps(r) + "\n" for r in rows))

    # --- states ---

    def store(self, change: ChangeRow, most: int = 10**9) -> None:
        """Write the first shards again as a capture would that has the fault: sizes and hashes are
        those of what is written. ``change`` gets an entry, its ids and its states [T, S + 1, H] as
        a forward makes them, and returns what is stored instead, None for nothing."""
        folder = self.folder / STATES / "states"
        store = StateStore(folder)
        by_shard: dict[str, list[StateEntry]] = {}
        for entry in store.entries:
            by_shard.setdefault(entry.shard, []).append(entry)
        kept: list[StateEntry] = []
        for name in sorted(by_shard):
            if name not in sorted(by_shard)[:most]:
                kept += by_shard[name]
                continue
            rows = []
            for entry in by_shard[name]:
                ids = store.token_ids(entry)
                made = change(entry, ids, self.states_of(ids.tolist(), store.slots))
                if made is not None:
                    changed = replace(made[0], tokens=len(made[1]), ids_hash=ids_hash(made[1]))
                    rows.append(captured_row(changed, made[1], made[2].to(DTYPES[store.dtype])))
            if rows:
                kept += write_shard(folder, Path(name).stem, rows, store.state_format)
        write_index(
            folder, kept, slots=store.slots, dtype=store.dtype,
            fingerprint=store.target_fingerprint, state_format=store.state_format,
        )  # fmt: skip

    def states(self, change: Callable[[torch.Tensor], torch.Tensor], most: int = 10**9) -> None:
        """``change`` the states [T, S + 1, H] of every conversation in the first shards."""
        self.store(lambda e, ids, x: (e, ids, change(x.clone())), most)

    def index(self, change: Callable[[StateEntry], dict[str, Any]], split: str = "train") -> None:
        """Other facts of the entries of a split; fewer tokens cut the states as well."""

        def every(e: StateEntry, ids: torch.Tensor, x: torch.Tensor) -> StoredAs:
            found = replace(e, **change(e)) if e.split == split else e
            return found, ids[: found.tokens], x[: found.tokens]

        self.store(every)

    def keep(self, test: Callable[[dict[str, Any]], bool]) -> None:
        """Only those conversations of the index."""
        self.json(
            f"{STATES}/states/index.json",
            lambda i: i | {"conversations": [e for e in i["conversations"] if test(e)]},
        )

    # --- what an engine would record ---

    def benchmark(self) -> dict[str, Any]:
        return read_json(self.folder / BENCH / "metrics.json")

    def record(self, label: str = "", *, later_half: bool = False, change: Any = None) -> None:
        """Rounds of our drafter's arm as an engine would record them that serves the export with
        the fault ``label`` of ``engine_variants``, or with ``change`` of the setting."""
        metrics = self.benchmark()
        steps, dtype = metrics["num_speculative_tokens"], metrics["dtype"]
        drafter = read_drafter(
            self.folder / EXPORT / "drafter", self.target.config, self.head.embedding, DTYPES[dtype]
        )
        base = Setting(drafter, drafter.config.slots, steps)
        named = {v.label: v.apply for v in engine_variants(self.target.num_layers)}
        self.changes += [named[label]] if label else [change] if change else []
        faulty: Setting | None = base
        for one in self.changes:  # faults that were planted before stay
            faulty = one(faulty)
            if faulty is None:
                raise Inapplicable(label)
        own = [r for r in read_requests(self.folder / BENCH) if r.arm == OWN]
        answered = [self._answered(r) for r in own]
        made = {}
        for setting in (base, faulty):
            walked = replays(drafts_of(setting, answered), answered, setting.steps)
            made[id(setting)] = [r.accepted for r in walked]
        half = len(own) // 2 if later_half else 0
        chosen = made[id(base)][:half] + made[id(faulty)][half:]
        rounds = {r.key: a for r, a in zip(own, chosen, strict=True)}
        self.requests(
            lambda r: (
                replace(r, accepted=rounds[r.key], drafted=[faulty.steps] * len(rounds[r.key]))
                if r.key in rounds
                else r
            )
        )
        self.count()

    def _answered(self, r: RequestRow) -> Answered:
        ids, layers = r.prompt_token_ids + r.answer_token_ids, self.layers()
        states = self.states_of(ids, layers)[:, :-1]
        tokens = torch.tensor(ids)
        return Answered(r.prompt, r.set, tokens, len(r.prompt_token_ids), states, layers, None,
                        None)  # fmt: skip

    def layers(self) -> tuple[int, ...]:
        return tuple(range(1, self.target.num_layers + 1))

    def count(self) -> None:
        """Metrics and counters that follow from the records, as the benchmark writes them."""
        rows, metrics = read_requests(self.folder / BENCH), self.benchmark()
        for line in metrics["arms"]:
            if line["arm"] == OWN:
                mine = [r for r in rows if (r.arm, r.set) == (OWN, line["set"])]
                width = max(len(r.drafted or []) and max(r.drafted or [0]) for r in mine)
                line["acceptance"] = counts_of(mine, width).as_dict()
        own = [r for r in rows if r.arm == OWN]
        metrics["counters"][OWN] = metrics["counters"].get(OWN, {}) | {
            "drafts": float(sum(len(r.accepted or []) for r in own)),
            "draft_tokens": float(sum(sum(r.drafted or []) for r in own)),
            "accepted_tokens": float(sum(sum(r.accepted or []) for r in own)),
        }
        write_json(self.folder / BENCH / "metrics.json", metrics)

    def ask(self, prompts: Callable[[RequestRow], list[int]]) -> None:
        """Other prompt ids for every request, answered by the target, greedily; then the record."""
        answers: dict[str, tuple[list[int], list[int]]] = {}
        for r in read_requests(self.folder / BENCH):
            if r.prompt not in answers:
                ids = prompts(r)
                answers[r.prompt] = ids, self.generate(ids, len(r.answer_token_ids))
        self.requests(
            lambda r: replace(
                r, prompt_token_ids=answers[r.prompt][0], answer_token_ids=answers[r.prompt][1]
            )
        )
        self.record()

    def counters(self, change: Callable[[dict[str, float]], dict[str, float]]) -> None:
        def every(metrics: dict[str, Any]) -> None:
            metrics["counters"][OWN] = change(metrics["counters"][OWN])

        self.json(f"{BENCH}/metrics.json", every)

    def reported(self, value: Callable[[list[RequestRow], float], float]) -> None:
        """Another acceptance length in the metrics of our drafter's arm."""
        rows, metrics = read_requests(self.folder / BENCH), self.benchmark()
        for line in metrics["arms"]:
            if line["arm"] == OWN:
                mine = [r for r in rows if (r.arm, r.set) == (OWN, line["set"])]
                line["acceptance"]["acceptance_length"] = round(
                    value(mine, line["acceptance"]["acceptance_length"]), 4
                )
        write_json(self.folder / BENCH / "metrics.json", metrics)

    def other_map(self) -> VocabMap:
        """A lawful map of the same size from other counts."""
        size = len(load_file(self.folder / MAP / "vocab_map.safetensors")["d2t"])
        order = list(range(self.target.vocab_size))
        self.random.shuffle(order)
        held = [t for r in read_answers(self.folder / DATA) for t in r.answer_token_ids][: size * 2]
        kept = list(dict.fromkeys(held))[: size // 2]
        return build_vocab_map(
            count_tokens([kept]), self.target.vocab_size, size, order[: size // 2]
        )
