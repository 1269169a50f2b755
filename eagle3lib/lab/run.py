"""The run folder: what was made, from what, by which versions; and what has to be made again.

    outputs/RUN/manifest.json              the target and the phases that are done
    outputs/RUN/PHASE/inputs.json          written first: what this phase depends on
    outputs/RUN/PHASE/progress.json        while it runs
    outputs/RUN/PHASE/...                  its artefacts and logs
    outputs/RUN/PHASE/metrics.json         the numbers that the notebook shows
    outputs/RUN/PHASE/manifest.json        written last: its existence means that the phase is whole
    outputs/RUN/reports/PHASE.ipynb, .html the executed notebook (also when it failed)
    outputs/RUN/journal.jsonl, profile.yaml what happened, what was decided, with which parameters

A phase whose inputs are the ones recorded is resumed (or, when whole, skipped). When they differ
the old folder is set aside as ``PHASE.previous`` and the phase starts afresh; hidden states, which
are large and can be made again, are deleted instead. ``eagle3 clean`` frees them on purpose: the
phase stays whole, and its files are made again when they are needed.
"""

from __future__ import annotations

import html
import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_json, hash_path, read_json, write_json
from eagle3lib.lab.journal import keep_profile, read_journal, record
from eagle3lib.lab.large import freed, is_freed, to_make_again
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.manifest import PhaseInputs, PhaseManifest, write_run_manifest
from eagle3lib.lab.phase_params import PhaseParams, run_name_problem
from eagle3lib.lab.progress import Progress, ProgressFile, write_progress

# Who asks whether a phase runs holds its lock for an instant (report/campaign.py).
_LOCK_S = 1.0
State = Literal["new", "stale", "resume", "done", "freed"]


def outputs_root() -> Path:
    return Path(os.environ.get("EAGLE3_OUTPUTS", ROOT / "outputs")).expanduser().resolve()


def run_folder(run: str) -> Path:
    return outputs_root() / run


def existing_run(run: str) -> Path:
    """The folder of a run that has begun. Raises ``UserError`` where there is none, and for a name
    that no run can have, which could lead out of the folder of runs."""
    if problem := run_name_problem(run):
        raise UserError(f"{run!r} is no run: {problem}", where=outputs_root())
    folder = run_folder(run)
    if not (folder / "manifest.json").exists():
        raise UserError(
            f"there is no run {run!r}", where=folder, next=f"eagle3 run PROFILE run={run}"
        )
    return folder


@dataclass
class Phase:
    """One phase of one run. Notebooks get it from :func:`begin` and close it with
    :meth:`finish`."""

    params: PhaseParams
    inputs: dict[str, Any]
    started_s: float = field(default_factory=time.time)
    lock: FileLock | None = None

    @property
    def name(self) -> str:
        return self.params.PHASE

    @property
    def folder(self) -> Path:
        return run_folder(self.params.run) / self.name

    def of(self, upstream: str) -> Path:
        """Folder of a finished phase of the same run."""
        return run_folder(self.params.run) / upstream

    def log_file(self, name: str) -> Path:
        path = self.folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def progress(self, total: int, unit: str, what: str, done: int = 0) -> Iterator[Progress]:
        """A progress bar that also writes ``progress.json`` for ``eagle3 run`` and ``eagle3
        status``."""
        bar = Progress(self.folder / "progress.json", total, unit, what, done)
        try:
            yield bar
        finally:
            bar.close()

    def note(self, what: str) -> None:
        """Say what a phase is at where nothing can be counted, e.g. an engine's start."""
        print(what, flush=True)
        write_progress(self.folder / "progress.json", ProgressFile(what))

    def finish(self, metrics: dict[str, Any], artefacts: Iterable[Path] = ()) -> Metrics:
        """Write metrics, then the manifest, last. Returns the metrics, to be shown."""
        write_json(self.folder / "metrics.json", metrics)
        files = sorted(artefacts)
        manifest = PhaseManifest.of(self.folder, self.inputs, files, time.time() - self.started_s)
        manifest.write(self.folder)
        (self.folder / "progress.json").unlink(missing_ok=True)
        run, seconds = run_folder(self.params.run), manifest.duration_s
        write_run_manifest(run, self.params.target, self.inputs["target"])
        record(run, "finished", phase=self.name, duration_s=seconds)
        return Metrics(metrics)


class Metrics(dict[str, Any]):
    """What was written to ``metrics.json``; folded in a notebook, so that figures stay in sight."""

    def _repr_html_(self) -> str:
        text = html.escape(json.dumps(self, indent=1, ensure_ascii=False))
        return f"<details><summary>metrics.json</summary><pre>{text}</pre></details>"


def gather_inputs(params: PhaseParams, target_fingerprint: str) -> dict[str, Any]:
    """Everything that a phase's result depends on; raises when an upstream phase is not done."""
    upstream = {}
    for name in params.upstream():
        manifest = run_folder(params.run) / name / "manifest.json"
        if not manifest.exists():
            raise UserError(
                f"{params.PHASE} needs {name}, which is not finished",
                where=manifest.parent,
                next=f"eagle3 run PROFILE {name}   (or open notebooks/{name}.ipynb and run it)",
            )
        upstream[name] = read_json(manifest)["fingerprint"]
    files = {}
    for field_name, path in params.input_files().items():
        if not path.exists():
            raise UserError(
                f"the file that parameter {field_name!r} of {params.PHASE} names is not there",
                where=path,
            )
        files[field_name] = hash_path(path)
    inputs = PhaseInputs(
        target=target_fingerprint,
        params=params.model_dump(mode="json", exclude={"run", *params.FREE}),
        upstream=upstream,
        files=files,
        notebook=notebook_hash(params.PHASE),
    )
    return asdict(inputs)


def notebook_hash(phase: str) -> str:
    """Fingerprint of a notebook's code without its parameters cell (formatting of text is free)."""
    path = ROOT / "notebooks" / f"{phase}.ipynb"
    if not path.exists():
        return ""
    cells = [c for c in read_json(path)["cells"] if c["cell_type"] == "code"]
    return hash_json(
        ["".join(c["source"]) for c in cells if "parameters" not in c["metadata"].get("tags", [])]
    )


def phase_state(params: PhaseParams, inputs: dict[str, Any]) -> tuple[State, str]:
    """Whether a phase is done, and if not, why it runs (again)."""
    folder = run_folder(params.run) / params.PHASE
    if not (folder / "inputs.json").exists():
        return "new", "never run"
    recorded = read_json(folder / "inputs.json")
    if recorded != inputs:
        reason = _explain_difference(recorded, inputs)
        return "resume" if _only_grew(params, recorded, inputs) else "stale", reason
    if not (folder / "manifest.json").exists():
        return "resume", "was interrupted"
    gone = freed(folder.parent, params.PHASE)
    for name, size in read_json(folder / "manifest.json")["artefacts"].items():
        artefact = folder / name
        if is_freed(name, gone):
            continue
        if not artefact.exists() or artefact.stat().st_size != size:
            return "resume", f"{name} is missing or of another size"
    if gone:
        told = [f"{kind} freed on {facts['when'][:10]}" for kind, facts in gone.items()]
        return "freed", f"done and unchanged, {', '.join(told)}"
    return "done", "done and unchanged"


def _only_grew(params: PhaseParams, old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether all that changed is more of something whose parts are kept (answers, repeats), or a
    switch for a part of its own, which may go off again: what is there stays of use."""
    same = {k: v for k, v in new.items() if k != "params"} == {
        k: v for k, v in old.items() if k != "params"
    }
    changed = [k for k in new["params"] if old["params"].get(k) != new["params"][k]]
    return same and all(
        k in params.GROWING
        and (isinstance(new["params"][k], bool) or new["params"][k] > old["params"].get(k, 0))
        for k in changed
    )


def outdated_by(folder: Path, phase: str) -> list[str]:
    """Upstream phases of a whole phase that were made again, with another result, after it."""
    if not (folder / phase / "manifest.json").exists():
        return []
    used = read_json(folder / phase / "manifest.json")["inputs"]["upstream"]
    now = {name: folder / name / "manifest.json" for name in used}
    return [
        name
        for name, fingerprint in used.items()
        if not now[name].exists()
        or read_json(now[name])["fingerprint"] != fingerprint
        or outdated_by(folder, name)
    ]


def begin(params: PhaseParams, target_fingerprint: str) -> Phase:
    """Open a phase: bind the run to the target, set a stale folder aside, or resume.

    Raises ``UserError`` when the run folder belongs to another target, and when what the phase
    reads was freed; nothing is touched then.
    """
    check_run_target(params.run, params.target, target_fingerprint)
    run = run_folder(params.run)
    folder = run / params.PHASE
    for name in to_make_again(run, params.PHASE):
        raise UserError(
            f"{params.PHASE} reads what `eagle3 clean` freed of {name}",
            where=run / name,
            next=f"eagle3 run PROFILE {name}   (makes it again)",
        )
    lock = lock_phase(params.run, params.PHASE)
    inputs = gather_inputs(params, target_fingerprint)
    state, why = phase_state(params, inputs)
    earlier_s = _worked_s(run, params.PHASE) if state in ("resume", "done") else 0.0
    if state == "stale":
        _set_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    where = {"host": platform.node(), "pid": os.getpid()}
    record(run, "started", phase=params.PHASE, why=why, state=state, earlier_s=earlier_s, **where)
    keep_profile(run, {params.PHASE: params})
    write_json(folder / "inputs.json", inputs)
    (folder / "manifest.json").unlink(missing_ok=True)
    write_run_manifest(run, params.target, target_fingerprint)
    return Phase(params=params, inputs=inputs, started_s=time.time() - earlier_s, lock=lock)


def _worked_s(run: Path, phase: str) -> float:
    """Seconds that earlier sessions worked on what a phase now continues: one that was killed
    counts up to its last sign of life."""
    if (run / phase / "manifest.json").exists():
        return float(read_json(run / phase / "manifest.json")["duration_s"])
    begun = [e for e in read_journal(run) if (e["what"], e.get("phase")) == ("started", phase)]
    progress = run / phase / "progress.json"
    if not begun or not progress.exists():
        return 0.0
    started_s = datetime.fromisoformat(begun[-1]["when"]).timestamp()
    return round(begun[-1]["earlier_s"] + max(0.0, progress.stat().st_mtime - started_s), 1)


def lock_phase(run: str, phase: str) -> FileLock:
    """Held as long as the object lives: two kernels must not write the same artefacts."""
    path = run_folder(run) / f".{phase}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, is_singleton=True)  # the same notebook may begin again
    try:
        lock.acquire(timeout=_LOCK_S)
    except Timeout:
        raise UserError(
            f"{phase} of run {run!r} is running in another process",
            where=path,
            next="wait for it (eagle3 status), or choose another run name",
        ) from None
    return lock


def check_run_target(run: str, name: str, fingerprint: str) -> None:
    """Raise ``UserError`` where a run is bound to another target than the one opened as ``name``.
    A run that has not begun is bound to none."""
    path = run_folder(run) / "manifest.json"
    bound = read_json(path)["target"] if path.exists() else {"fingerprint": fingerprint}
    if bound["fingerprint"] == fingerprint:
        return
    changed = bound["name"] == name
    raise UserError(
        f"target {name!r} has changed since run {run!r} was made"
        if changed
        else f"run {run!r} belongs to target {bound['name']!r}, not to {name!r}",
        expected=f"one target a run: fingerprint {bound['fingerprint']}, found {fingerprint}",
        where=path,
        next=f"the target {'of then' if changed else bound['name']}, "
        "or another name: eagle3 run PROFILE run=NEW_NAME",
    )


def _set_aside(folder: Path) -> None:
    shutil.rmtree(folder / "states", ignore_errors=True)  # large, and quickly made again
    previous = folder.with_name(f"{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    folder.rename(previous)


def _explain_difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first few differences in words, parameters by name."""
    words = []
    for name, value in new["params"].items():
        before = old["params"].get(name)
        if before != value:
            words.append(f"{name} {before} -> {value}")
    words += [
        f"{n} was made again" for n, v in new["upstream"].items() if old["upstream"].get(n) != v
    ]
    words += [
        f"the file of {n} changed" for n, v in new["files"].items() if old["files"].get(n) != v
    ]
    if old["notebook"] != new["notebook"]:
        words.append("the notebook changed")
    if old["target"] != new["target"]:
        words.append("the target changed")
    return ", ".join(words[:4]) or "its recorded inputs are of another version"
