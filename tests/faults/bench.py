"""The fault bench: ``make faults``. One healthy run of a real target, one fault at a time.

    python tests/faults/bench.py [--run RUN] [--only F01,F15] [--half seen|unseen] [--no-pairs]

A result is kept under ``outputs/.faults`` by the hash of the diagnosis, the planting and the run:
killed and started again, it goes on. "right": the planted cause comes first; "second": it is named,
after another; "missed": it is not named; "false": a healthy run with a finding above "note".
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import FAULTS, PAIRS, Fault
from plant import Generate, Inapplicable, Plant
from plants import PLANTS
from small import Kind, save_small_target, small_run

from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.causes import causes_of
from eagle3lib.diagnose.evidence import collect
from eagle3lib.diagnose.live import StatesOf
from eagle3lib.diagnose.material import read_material
from eagle3lib.lab.files import (
    hash_file,
    hash_files,
    hash_json,
    read_json,
    read_jsonl,
    write_text,
)
from eagle3lib.lab.machine import ROOT, cores
from eagle3lib.lab.run import outputs_root, run_folder
from eagle3lib.target.capture import forward_states
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.model import TargetHead, load_target

# What is served first, then how it is counted: metrics follow from the record.
_ORDER = ("checkpoint", "engine", "training", "data", "measured")
_SECTION = {f.id: f.section for f in FAULTS}
_KEPT_CONVERSATIONS = 90  # about 7 MB each for SmolLM2


@dataclass(frozen=True)
class Bench:
    """A healthy run and its target, loaded once for all faults."""

    healthy: Path
    work: Path
    target: Target
    head: TargetHead
    states_of: StatesOf
    generate: Generate

    @classmethod
    def of(cls, healthy: Path, work: Path, target: Target, model: Any, dtype: str) -> Bench:
        return cls(
            healthy, work, target, TargetHead(target, dtype), cached_states(model, target),
            lambda ids, n: greedy(model, ids, n),
        )  # fmt: skip

    @classmethod
    def small(cls, work: Path, kind: Kind) -> Bench:
        """A run of a small target of ``kind``, made now, its rounds as the simulator gives them."""
        target = open_target(str(save_small_target(work / "target", kind)))
        model = load_target(target, kind.dtype)
        bench = cls.of(work / "whole", work, target, model, kind.dtype)
        made = small_run(work / "made", target, model, greedy, kind)
        recorded = replace(bench, healthy=made)._plant("recorded")
        recorded.record()
        shutil.rmtree(made)
        recorded.folder.replace(bench.healthy)
        return bench

    def _plant(self, name: str) -> Plant:
        return Plant(self.healthy, self.work / name, self.target, self.head, self.states_of,
                     self.generate)  # fmt: skip

    def diagnose(self, faults: Iterable[str]) -> list[Cause]:
        """Causes that are found after planting ``faults`` into a fresh copy; none: healthy."""
        plant = self._plant("planted")
        for fault in sorted(faults, key=lambda f: _ORDER.index(_SECTION[f])):
            PLANTS[fault](plant)
        material = read_material(plant.folder, self.target, self.states_of, self.head)
        return causes_of(collect(material, every_variant=False))


def cached_states(model: Any, target: Target) -> StatesOf:
    """All layers of a conversation at once, the latest ones kept: most faults leave them alone."""
    kept: dict[tuple[int, ...], Tensor] = {}
    layers = tuple(range(1, target.num_layers + 1))

    def states_of(ids: list[int], slots: tuple[int, ...]) -> Tensor:
        key = tuple(ids)
        if key not in kept:
            while len(kept) >= _KEPT_CONVERSATIONS:
                kept.pop(next(iter(kept)))
            kept[key] = forward_states(model, [ids], layers)[0]
        whole = kept[key]
        return torch.cat((whole[:, [s - 1 for s in slots]], whole[:, -1:]), dim=1)

    return states_of


@torch.no_grad()
def greedy(model: Any, ids: list[int], tokens: int) -> list[int]:
    made, cache, fed = list(ids), None, torch.tensor([ids])
    for _ in range(tokens):
        out = model(input_ids=fed, past_key_values=cache, use_cache=True)
        cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
        made.append(token)
        fed = torch.tensor([[token]])
    return made[len(ids) :]


def judged(causes: list[Cause], wanted: set[str]) -> str:
    """ "right" when the first findings, as many as are wanted, name the wanted causes, one each. A
    finding names its code and the causes that would leave the very same evidence."""
    first, left = causes[: len(wanted)], set(wanted)
    for cause in first:
        left -= set(sorted(cause.names & left)[:1])
    if not left:
        return "right"
    return "second" if wanted <= {name for c in causes for name in c.names} else "missed"


def judged_healthy(causes: list[Cause]) -> str:
    return "false" if any(c.severity != "note" for c in causes) else "right"


def _cases(args: argparse.Namespace) -> list[tuple[str, list[Fault]]]:
    by_id = {f.id: f for f in FAULTS}
    single = [(f.id, [f]) for f in FAULTS if not args.half or f.unseen == (args.half == "unseen")]
    pairs = [("+".join(pair), [by_id[i] for i in pair]) for pair in PAIRS]
    cases = [("healthy", []), *single, *([] if args.no_pairs else pairs)]
    only = set(args.only.split(",")) if args.only else None
    return [c for c in cases if only is None or c[0] in only]


def run_bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(cores())
    healthy = run_folder(args.run)
    target = open_target(read_json(healthy / "manifest.json")["target"]["name"])
    dtype = read_json(healthy / "06_benchmark_serving" / "metrics.json")["dtype"]
    work = outputs_root() / ".faults"
    results = work / "results.jsonl"
    stamp = _stamp(healthy)
    done = {r["case"]: r for r in read_jsonl(results) if r["stamp"] == stamp}
    bench: Bench | None = None
    for name, faults in _cases(args):
        if name in done and not args.again:
            continue
        bench = bench or Bench.of(healthy, work, target, load_target(target, dtype), dtype)
        started = time.perf_counter()
        try:
            causes = bench.diagnose(f.id for f in faults)
        except Inapplicable:
            print(f"{name:9} means nothing in this run", flush=True)
            continue
        wanted = {f.cause for f in faults}
        done[name] = {
            "case": name, "stamp": stamp, "wanted": sorted(wanted),
            "result": judged(causes, wanted) if faults else judged_healthy(causes),
            "found": [f"{c.severity}:{c.code}" for c in causes],
            "first": causes[0].title if causes else "", "seconds": time.perf_counter() - started,
        }  # fmt: skip
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[name]) + "\n")
        line = done[name]
        print(f"{name:9} {line['result']:7} {line['seconds']:5.1f} s  wanted {line['wanted']}  "
              f"found {line['found'][:4]}", flush=True)  # fmt: skip
    return [done[name] for name, _ in _cases(args) if name in done]


def _stamp(healthy: Path) -> str:
    rooms = [*(ROOT / "eagle3lib" / "diagnose").glob("*.py"), *Path(__file__).parent.glob("p*.py")]
    return hash_json([hash_files(sorted(rooms), ROOT), hash_file(healthy / "manifest.json")])


def table(lines: list[dict[str, Any]]) -> str:
    """The table in Markdown, the halves apart."""
    faults = {f.id: f for f in FAULTS}
    out = []
    for title, chosen in (
        ("healthy", lambda c: c == "healthy"),
        ("singles, seen", lambda c: c in faults and not faults[c].unseen),
        ("singles, unseen", lambda c: c in faults and faults[c].unseen),
        ("pairs", lambda c: "+" in c),
    ):
        part = [line for line in lines if chosen(line["case"])]
        if not part:
            continue
        counts = {k: sum(line["result"] == k for line in part)
                  for k in ("right", "second", "missed", "false")}  # fmt: skip
        said = ", ".join(f"{n} {k}" for k, n in counts.items() if n)
        out += [f"## {title}: {said} of {len(part)}", "", "| case | planted | result | first |",
                "|---|---|---|---|"]  # fmt: skip
        for line in part:
            how = " + ".join(faults[i].how for i in line["case"].split("+") if i in faults)
            first = ", ".join(dict.fromkeys(f.split(":")[1] for f in line["found"][:2]))
            out.append(f"| {line['case']} | {how or '-'} | {line['result']} | {first or '-'} |")
        out.append("")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="faults")
    parser.add_argument("--only", default="")
    parser.add_argument("--half", choices=["seen", "unseen"])
    parser.add_argument("--no-pairs", action="store_true")
    parser.add_argument("--again", action="store_true", help="also what was done already")
    parser.add_argument("--table", type=Path, help="write the table here")
    args = parser.parse_args()
    lines = run_bench(args)
    text = table(lines)
    print("\n" + text)
    if args.table:
        write_text(args.table, text)


if __name__ == "__main__":
    main()
