"""The large prompt set: from pinned wheels to train.jsonl.gz, heldout.jsonl and a manifest.

``python -m eagle3lib.data.prompt_build WHEELS GENERATORS FOLDER`` (make prompts). Nothing that is
near a held-out prompt is trained on: by the 5-grams of :mod:`eagle3lib.data.near`, and by any run
of 13 words that both hold.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle3lib.data import prompt_sources, prompt_templates
from eagle3lib.data.near import drop_near_duplicates, runs_of_words
from eagle3lib.data.prompt_sources import MAX_CHARS, Ask, Wheels, sha256
from eagle3lib.data.prompts import DUPLICATE, Prompt, PromptFile, Reject, prompt_id
from eagle3lib.lab.files import write_atomic, write_json
from eagle3lib.lab.machine import ROOT

NEAR, RUN_WORDS = 0.8, 13
LOCK = ROOT / "requirements" / "prompts.txt"
CAPS = {"code": 26_000, "summaries": 7_000, "translation": 4_000, "rewriting": 4_000}
WRITING, MATHS_EACH = 18_000, 400
TOO_LONG, SHARED_RUN = f"over {MAX_CHARS} characters", f"{RUN_WORDS} words of a held-out prompt"
# Where the target's own answer to the first turn goes: the phase asks for it.
_EARLIER = "(the target's own answer)"


def messages_of(ask: Ask) -> list[dict[str, str]]:
    messages = []
    for turn in ask.turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": _EARLIER}]
    return messages[:-1]


def row_of(ask: Ask) -> dict[str, Any]:
    """One line of the file: what phase 01 reads, and what it is."""
    messages = messages_of(ask)
    return {
        "id": prompt_id(messages), "messages": messages, "kind": ask.kind, "source": ask.source,
        "licence": ask.licence, "template": ask.template,
    }  # fmt: skip


def part(
    train: Iterable[Ask], heldout: Iterable[Ask]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, int]]:
    """(train rows, held-out rows, counts of what was left out): no train row repeats another or
    is near to a held-out one."""
    held, _ = _distinct(heldout)
    rows, left_out = _distinct(train)
    runs = set().union(*(_runs(row) for row in held.values()))
    shared = [key for key, row in rows.items() if key not in held and _runs(row) & runs]
    left_out["the same as a held-out prompt"] = len(rows.keys() & held.keys())
    left_out[SHARED_RUN] = len(shared)
    for key in {*shared, *(rows.keys() & held.keys())}:
        del rows[key]
    kept, near = drop_near_duplicates([_file("held-out", held), _file("train", rows)], NEAR)
    stay = {p.id for p in near.prompts}
    to_heldout = sum(r.id in rows and _names(r, held) for r in near.rejects)
    left_out["near a held-out prompt"] = to_heldout
    left_out["near another train prompt"] = len(near.rejects) - to_heldout
    in_order = {key: row for key, row in sorted(rows.items()) if key in stay}
    left_out["near twins among the held-out (kept)"] = len(kept.rejects)
    return list(in_order.values()), [held[k] for k in sorted(held)], dict(left_out)


def _distinct(asks: Iterable[Ask]) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    rows: dict[str, dict[str, Any]] = {}
    left_out: Counter[str] = Counter()
    for ask in asks:
        if not all(turn.strip() for turn in ask.turns):
            left_out["empty"] += 1
        elif sum(map(len, ask.turns)) > MAX_CHARS:
            left_out[TOO_LONG] += 1
        elif (row := row_of(ask))["id"] in rows:
            left_out[DUPLICATE] += 1
        else:
            rows[row["id"]] = row
    return rows, left_out


def _runs(row: dict[str, Any]) -> set[str]:
    asked = (m["content"] for m in row["messages"] if m["role"] == "user")
    return set().union(*(runs_of_words(text, RUN_WORDS) for text in asked))


def _file(name: str, rows: dict[str, dict[str, Any]]) -> PromptFile:
    prompts = [Prompt(key, tuple(row["messages"]), name) for key, row in rows.items()]
    return PromptFile(name, prompts, places={key: f"{name} {key}" for key in rows})


def _names(reject: Reject, rows: dict[str, Any]) -> bool:
    """Whether the prompt that a near duplicate is near to is one of ``rows``."""
    return reject.detail.split(" to ")[1].split(" at ")[0] in rows


def counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = {key: Counter(r[key] for r in rows) for key in ("kind", "source", "licence", "template")}
    return {"prompts": len(rows), **{key: dict(sorted(n.items())) for key, n in told.items()}}


def write(folder: Path, wheels: Wheels, train: list[Any], held: list[Any], left: Any) -> None:
    """Both files, and the manifest last."""
    folder.mkdir(parents=True, exist_ok=True)

    def lines(rows: list[Any]) -> bytes:
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()

    # No time in the gzip header: the same prompts are the same file.
    packed = gzip.compress(lines(train), 9, mtime=0)
    write_atomic(folder / "train.jsonl.gz", lambda path: path.write_bytes(packed))
    write_atomic(folder / "heldout.jsonl", lambda path: path.write_bytes(lines(held)))
    files = ("train.jsonl.gz", "heldout.jsonl")
    manifest = {
        "templates_version": prompt_templates.VERSION,
        "sha256": {name: sha256(folder / name) for name in files},
        "wheels": {name: {"version": v, "sha256": h} for name, (v, h) in wheels.pins.items()},
        "train": counts(train),
        "train_side_of_the_split": sum(Prompt(r["id"], (), "").split == "train" for r in train),
        "heldout": counts(held),
        "left_out": left,
    }
    write_json(folder / "manifest.json", manifest)


def build(wheel_folder: Path, generators: Path, folder: Path) -> None:
    wheels = Wheels(wheel_folder, LOCK)
    train = [
        *prompt_sources.train_sets(wheels),
        *prompt_templates.code_and_prose(wheels, CAPS),
        *prompt_templates.writing(wheels, WRITING),
        *prompt_templates.maths(generators, wheels.label("reasoning-gym"), MATHS_EACH),
    ]
    rows, held, left_out = part(train, prompt_sources.heldout_sets(wheels))
    write(folder, wheels, rows, held, left_out)
    print(f"{folder}: {len(rows):,} prompts to train on and hold out, {len(held):,} held out alone")


if __name__ == "__main__":
    build(*map(Path, sys.argv[1:4]))
