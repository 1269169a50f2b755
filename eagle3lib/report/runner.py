"""Run a profile: the notebooks in their order, each only if it must be, progress on one line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.notebooks import execute
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.phase_params import PhaseParams
from eagle3lib.lab.run import (
    check_run_target,
    gather_inputs,
    outdated_by,
    phase_state,
    run_folder,
)
from eagle3lib.report.page import answer_numbers, build_page, phase_metrics
from eagle3lib.target.folder import open_target

# Seconds of each phase of the demo on two cores (docs/lab_log.md): a first guess, for other runs
# scaled by the phases of theirs that are known.
_DEMO_SECONDS = {
    "00_plan": 18,
    "01_generate_data": 150,
    "02_capture_hidden_states": 50,
    "03_build_vocab_map": 8,
    "04_train_drafter": 270,
    "05_export_drafter": 20,
    "06_benchmark_serving": 500,
    "07_diagnose_acceptance": 25,
}


def run_profile(params: dict[str, PhaseParams], phases: list[str], *, force: bool = False) -> None:
    """Execute the phases' notebooks, then write the run's page and print its answer.

    Raises ``UserError`` or ``NotebookError`` from the first phase that fails; its notebook is kept.
    """
    _check_files(params, phases)
    first = params[phases[0]]
    target = open_target(first.target)
    check_run_target(first, target.fingerprint)
    clock = _Clock(phases, run_folder(first.run))
    for number, name in enumerate(phases, start=1):
        cfg = params[name]
        state, reason = phase_state(cfg, gather_inputs(cfg, target.fingerprint))
        head = f"[{number}/{len(phases)}] {name}"
        if state == "done" and not force:
            print(f"{head}: skipped, {reason}", flush=True)
            clock.skip(name)
            continue
        print(f"{head}: {reason}" + clock.estimate(name), flush=True)
        output = run_folder(cfg.run) / "reports" / f"{name}.ipynb"
        started = time.monotonic()
        with _show_progress(run_folder(cfg.run) / name / "progress.json", head, clock, name):
            execute(cfg, output)
        seconds = time.monotonic() - started
        clock.done(name, seconds)
        print(f"{head}: done in {_clock_text(seconds)}", flush=True)
    _print_answer(build_page(first.run), run_folder(first.run))


def _check_files(params: dict[str, PhaseParams], phases: list[str]) -> None:
    """Input files that parameters name must be there before anything starts."""
    for name in phases:
        for field, path in params[name].input_files().items():
            if not path.exists():
                raise UserError(
                    f"parameter {field!r} of {name} names a file that is not there", where=path
                )


def _print_answer(page: Path, folder: Path) -> None:
    numbers = answer_numbers(phase_metrics(folder))
    print(f"\nreport: {page}")
    if numbers:
        print(
            f"baseline           {numbers['baseline_tokens_per_s']:6.1f} tok/s\n"
            f"with the drafter   {numbers['drafter_tokens_per_s']:6.1f} tok/s\n"
            f"acceptance length  {numbers['acceptance_length']:6.2f}   "
            f"(K = {numbers['num_speculative_tokens']})\n"
            f"speed-up           {numbers['speedup']:6.2f}   (95 % interval {numbers['interval']})"
        )


class _Clock:
    """How long the rest takes: a phase's own earlier time in this run, else the demo's time scaled
    by how this run's known phases compare with the demo's."""

    def __init__(self, phases: list[str], folder: Path):
        self._left = list(phases)
        self._known: dict[str, float] = {}
        for name in PHASES:
            manifest = folder / name / "manifest.json"
            if manifest.exists():
                self._known[name] = max(read_json(manifest)["duration_s"], 1.0)

    def skip(self, name: str) -> None:
        self._left.remove(name)

    def done(self, name: str, seconds: float) -> None:
        self._left.remove(name)
        self._known[name] = seconds

    def _expected(self, name: str) -> float:
        demo = sum(_DEMO_SECONDS[n] for n in self._known)
        scale = sum(self._known.values()) / demo if demo > 60 else 1.0
        return self._known.get(name, _DEMO_SECONDS[name] * scale)

    def left_s(self, name: str, elapsed_s: float = 0.0) -> float:
        now = max(self._expected(name) - elapsed_s, 0.0)
        return now + sum(self._expected(n) for n in self._left if n != name)

    def estimate(self, name: str) -> str:
        return f"; about {_clock_text(self.left_s(name))} left in all"


@contextmanager
def _show_progress(path: Path, head: str, clock: _Clock, name: str) -> Iterator[None]:
    """Repeat the phase's own progress: one line that is redrawn on a terminal, else every 20 s."""
    stop = threading.Event()
    terminal = sys.stdout.isatty()

    def follow() -> None:
        started, shown = time.monotonic(), ""
        while not stop.wait(1.0 if terminal else 20.0):
            line = f"{head}: {_progress_text(path)}all left about " + _clock_text(
                clock.left_s(name, time.monotonic() - started)
            )
            if terminal:
                print(f"\r{line:<{len(shown)}}", end="", flush=True)
            else:
                print(line, flush=True)
            shown = line
        if terminal and shown:
            print("\r" + " " * len(shown) + "\r", end="", flush=True)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _progress_text(path: Path) -> str:
    try:
        now = read_json(path)
    except UserError:  # not written yet
        return ""
    if now["total"] is None:
        return f"{now['what']}; "
    left = "" if now["left_s"] is None else f", {_clock_text(now['left_s'])} left"
    return f"{now['what']} {now['done']:,.0f} of {now['total']:,} {now['unit']}{left}; "


def _clock_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"


def print_status(run: str) -> None:
    """Every phase of a run on one line."""
    folder = run_folder(run)
    if not (folder / "manifest.json").exists():
        raise UserError(f"there is no run {run!r}", where=folder, next="eagle3 run demo")
    manifest = read_json(folder / "manifest.json")
    print(f"run {run}, target {manifest['target']['name']}")
    for name in PHASES:
        print(f"  {name:28} {_phase_line(folder / name, manifest['phases'].get(name))}")
    page = folder / "index.html"
    print(f"  report: {page if page.exists() else 'not made yet'}")


def _phase_line(folder: Path, done: dict[str, Any] | None) -> str:
    if done:
        changed = outdated_by(folder.parent, folder.name)
        late = f"; out of date, {', '.join(changed)} changed" if changed else ""
        return f"done in {_clock_text(done['duration_s'])}, {done['bytes'] / 1e6:.1f} MB{late}"
    if not (folder / "inputs.json").exists():
        return "waiting"
    progress = folder / "progress.json"
    if progress.exists() and time.time() - progress.stat().st_mtime < 60:
        return "running: " + _progress_text(progress).rstrip("; ")
    return "started, not finished"
