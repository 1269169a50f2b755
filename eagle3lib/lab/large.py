"""What is large in a run, can be made again, and who reads it: hidden states and checkpoints.

``eagle3 clean`` frees a kind and says so in the manifest of the phase that made it, which stays
whole: its result, and so its fingerprint, is known. Whoever needs the files has them made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.files import read_json


@dataclass(frozen=True)
class Large:
    """``phase`` makes ``path`` in its folder, the phases ``readers`` read it; ``also``: what else
    does when somebody asks for it."""

    phase: str
    path: str
    readers: tuple[str, ...]
    also: tuple[str, ...]


LARGE = {
    "states": Large(
        "02_capture_hidden_states",
        "states",
        ("04_train_drafter", "05_export_drafter", "07_diagnose_acceptance"),
        (
            "eagle3 diagnose",
            "eagle3 explore hidden_states",
            "notebooks/bench/state_storage",
            "notebooks/bench/peer_training",
        ),
    ),
    "checkpoints": Large(
        "04_train_drafter",
        "checkpoints",
        ("05_export_drafter", "07_diagnose_acceptance"),
        ("more epochs of 04_train_drafter", "eagle3 diagnose", "eagle3 explore hidden_states"),
    ),
}


def freed(folder: Path, phase: str) -> dict[str, Any]:
    """Kind -> when it was freed and how large it was, out of a whole phase's manifest."""
    path = folder / phase / "manifest.json"
    return read_json(path).get("freed", {}) if path.exists() else {}


def is_freed(artefact: str, kinds: dict[str, Any]) -> bool:
    """Whether an artefact, by its name in the phase's folder, went with one of these kinds."""
    return any(artefact.startswith(f"{LARGE[kind].path}/") for kind in kinds)


def to_make_again(folder: Path, reader: str) -> list[str]:
    """Phases whose freed files ``reader`` needs, in their order."""
    return [
        kind.phase
        for name, kind in LARGE.items()
        if reader in kind.readers and name in freed(folder, kind.phase)
    ]
