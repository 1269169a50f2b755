"""The records that make a run's folder readable by others: what each file's fields are.

Each is written from its class, so that ``docs/reference`` can't be stale; they are read as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eagle3lib.lab.files import hash_files, read_json, write_json
from eagle3lib.lab.large import is_freed
from eagle3lib.lab.machine import describe_machine, git_state, versions
from eagle3lib.lab.params import PHASES


@dataclass(frozen=True)
class PhaseInputs:
    """What a phase's result depends on; written before it begins."""

    target: str  # fingerprint of config, tokenizer and weights
    params: dict[str, Any]  # without `run` and those that are free
    upstream: dict[str, str]  # phase it reads -> fingerprint of what that made
    files: dict[str, str]  # parameter that names a file -> fingerprint of the content
    notebook: str  # fingerprint of the code, without the parameters cell


@dataclass(frozen=True)
class PhaseManifest:
    """Written last: its existence means that the phase is whole."""

    phase: str
    finished: str  # UTC, ISO 8601
    duration_s: float  # over all sessions, a killed one up to its last sign of life
    inputs: dict[str, Any]  # inputs.json, as it was
    fingerprint: str  # of the artefacts' names and contents
    artefacts: dict[str, int]  # path in the phase's folder -> bytes
    versions: dict[str, str]
    git: dict[str, Any]  # commit, and dirty: tracked files differ from it
    freed: dict[str, Any] = field(default_factory=dict)  # by `eagle3 clean`: kind -> when, bytes

    @classmethod
    def of(
        cls, folder: Path, inputs: dict[str, Any], files: list[Path], duration_s: float
    ) -> PhaseManifest:
        """Of the phase in ``folder``, finished now, which made ``files``."""
        return cls(
            phase=folder.name,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=round(duration_s, 1),
            inputs=inputs,
            fingerprint=hash_files(files, folder),
            artefacts={str(p.relative_to(folder)): p.stat().st_size for p in files},
            versions=versions(),
            git=git_state(),
        )

    def write(self, folder: Path) -> None:
        write_json(folder / "manifest.json", asdict(self))


@dataclass(frozen=True)
class WholePhase:
    """One phase that is whole, as the run's manifest has it."""

    finished: str  # UTC, ISO 8601
    duration_s: float
    bytes: int  # of the artefacts that were not freed
    fingerprint: str
    parameters: dict[str, Any]  # those that decide the result


@dataclass(frozen=True)
class RunManifest:
    """Of the whole run; written again when a phase begins and when it is whole."""

    run: str
    target: dict[str, str]  # name: parameter `target`; fingerprint
    phases: dict[str, Any]  # phase -> its fields below, of those that are whole
    machine: dict[str, Any]  # that wrote it last: cpu, cores, memory, disk, gpus
    versions: dict[str, str]
    git: dict[str, Any]


def write_run_manifest(folder: Path, target: str, fingerprint: str) -> None:
    """``target``: its name as a parameter. The run's name is its folder's."""
    made = RunManifest(
        run=folder.name,
        target={"name": target, "fingerprint": fingerprint},
        phases=whole_phases(folder),
        machine=describe_machine(folder),
        versions=versions(),
        git=git_state(),
    )
    write_json(folder / "manifest.json", asdict(made))


def whole_phases(folder: Path) -> dict[str, dict[str, Any]]:
    """``WholePhase`` of every phase of a run that is whole, as plain values."""
    phases = {}
    for name in PHASES:
        path = folder / name / "manifest.json"
        if not path.exists():
            continue
        content = read_json(path)
        gone = content.get("freed", {})
        kept = {n: size for n, size in content["artefacts"].items() if not is_freed(n, gone)}
        found = WholePhase(
            finished=content["finished"],
            duration_s=content["duration_s"],
            bytes=sum(kept.values()),
            fingerprint=content["fingerprint"],
            parameters=content["inputs"]["params"],
        )
        phases[name] = asdict(found)
    return phases
