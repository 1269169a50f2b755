"""What a model card says that no measurement tells: the target's id and licence, the data's.

Nothing is asked of the network: licences are read where they lie, in the target's own README.md and
in the rows of the prompt files; what neither tells is said to be not stated, never guessed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load, try_to_load_from_cache

from eagle3lib.data.read import read_rows, source_name
from eagle3lib.lab.files import read_json
from eagle3lib.lab.phase_params import hub_id, resolve
from eagle3lib.target import smollm2

NOT_STATED = "not stated"
# Whose rows may name their source and licence (params/prompts/README.md).
_ROW_FILES = (".jsonl", ".json", ".gz")
_MOST_SOURCES = 12


@dataclass(frozen=True)
class TargetFacts:
    """``hub``: its id there, "" if it isn't known; ``licence``: as its model card has it."""

    hub: str
    licence: str


@dataclass(frozen=True)
class DataSet:
    """One file or data set of a run. ``sources``: what its rows name, (source, licence) -> rows."""

    name: str
    hub: str
    use: str
    sources: dict[tuple[str, str], int]


def target_facts(target: str, base_model: str = "") -> TargetFacts:
    """Of parameter ``target``; ``base_model`` is the Hub id that a user gave."""
    if target == smollm2.NAME:
        return TargetFacts(base_model or smollm2.HUB_ID, smollm2.LICENCE)
    folder = Path(target).expanduser()
    if folder.is_dir():
        return TargetFacts(base_model, _licence(folder / "README.md"))
    cached = try_to_load_from_cache(target, "README.md") if hub_id(target) else None
    licence = _licence(Path(cached)) if isinstance(cached, str) else NOT_STATED
    return TargetFacts(base_model or hub_id(target), licence)


def _licence(card: Path) -> str:
    """``license`` of a model card's head; "other" ones by their name."""
    head: dict[str, Any] = (metadata_load(card) or {}) if card.is_file() else {}
    named = head.get("license_name") if head.get("license") in (None, "other") else None
    return str(named or head.get("license") or NOT_STATED)


def data_sets(folder: Path) -> list[DataSet]:
    """What the run in ``folder`` was trained and is measured on; empty where it is not known."""
    path = folder / "01_generate_data" / "inputs.json"
    if not path.exists():
        return []
    params = read_json(path)["params"]
    uses = {
        "workload": "prompts, four fifths trained on, one fifth measured on",
        "general": "prompts, measured on alone",
        "answers": "given answers, trained on",
    }
    return [
        DataSet(source_name(named), hub_id(named), use, _sources(named))
        for key, use in uses.items()
        if (named := params.get(key))
    ]


def _sources(named: str) -> dict[tuple[str, str], int]:
    path = resolve(named)
    if hub_id(named) or path.suffix not in _ROW_FILES or not path.is_file():
        return {}
    found: Counter[tuple[str, str]] = Counter()
    for row in read_rows(path):
        if isinstance(row.value, dict):
            licence = row.value.get("licence") or row.value.get("license") or NOT_STATED
            found[str(row.value.get("source") or NOT_STATED), str(licence)] += 1
    return dict(found.most_common())


def answers_text(folder: Path) -> str:
    """Whose answers were trained on, how many, and how they were sampled; "" if not known."""
    phase = folder / "01_generate_data"
    if not (phase / "inputs.json").exists():
        return ""
    params = read_json(phase / "inputs.json")["params"]
    given = "given answers and " if params.get("answers") else ""
    made = phase / "metrics.json"
    told = read_json(made) if made.exists() else {}
    count = ""
    if "trained_tokens" in told:
        count = f" ({told['trained_answers']:,} answers, {told['trained_tokens']:,} tokens)"
    heat = f"sampled at temperature {params['temperature']:g}"
    return f"Trained on {given}its target's own answers{count}, {heat}."


def data_table(sets: list[DataSet]) -> str:
    """A line for each source of each set, in Markdown."""
    if not sets:
        return "Its data is not told here."
    lines = ["| data | use | rows | source | licence |", "|---|---|---|---|---|"]
    for data in sets:
        name = f"[{data.hub}](https://huggingface.co/datasets/{data.hub})" if data.hub else (
            f"`{data.name}`")  # fmt: skip
        named = list(data.sources.items())
        for (source, licence), rows in named[:_MOST_SOURCES]:
            lines.append(f"| {name} | {data.use} | {rows:,} | {source} | {licence} |")
        if not named:
            where = "on its page" if data.hub else NOT_STATED
            lines.append(f"| {name} | {data.use} | | {where} | {where} |")
        if rest := named[_MOST_SOURCES:]:
            count = sum(rows for _, rows in rest)
            licences = ", ".join(sorted({licence for (_, licence), _ in rest}))
            lines.append(f"| {name} | {data.use} | {count:,} | {len(rest)} more | {licences} |")
    return "\n".join(lines)
