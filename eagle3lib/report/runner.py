"""Run a profile: the notebooks in their order, each only if it must be, progress on one line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.journal import keep_profile, record
from eagle3lib.lab.large import to_make_again
from eagle3lib.lab.notebooks import NotebookError, execute
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.phase_params import PhaseParams
from eagle3lib.lab.run import (
    check_run_target,
    gather_inputs,
    phase_state,
    run_folder,
)
from eagle3lib.lab.words import duration_text, known_text
from eagle3lib.report.campaign import progress_text
from eagle3lib.report.page import (
    answer_numbers,
    build_page,
    phase_metrics,
    refresh_campaign,
    refresh_page,
)
from eagle3lib.target.folder import open_target

# How often the page of a run is looked after, and how often it is written at most without an event.
_LOOK_S, _REFRESH_S = 2.0, 60.0
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
    check_run_target(first.run, target.name, target.fingerprint)
    folder = run_folder(first.run)
    # For whoever goes on: what was asked, and of the phases left out what the profile says.
    left_out = [n for n in PHASES if not (folder / n / "inputs.json").exists()]
    keep_profile(folder, {n: params[n] for n in PHASES if n in phases or n in left_out})
    clock = _Clock(phases, folder)
    named = len(phases) < len(PHASES)
    for number, name in enumerate(phases, start=1):
        cfg = params[name]
        state, reason = phase_state(cfg, gather_inputs(cfg, target.fingerprint))
        head = f"[{number}/{len(phases)}] {name}"
        if not force and (state == "done" or (state == "freed" and not named)):
            print(f"{head}: skipped, {reason}", flush=True)
            clock.skip(name)
            continue
        print(f"{head}: {reason}" + clock.estimate(name), flush=True)
        started = time.monotonic()
        try:
            with _show_progress(folder / name / "progress.json", head, clock, name), _kept(folder):
                _execute(params, name)
        finally:  # also where it failed or was interrupted
            refresh_page(first.run)
        seconds = time.monotonic() - started
        clock.done(name, seconds)
        print(f"{head}: done in {duration_text(seconds)}", flush=True)
    _print_answer(build_page(first.run), folder)


def _execute(params: dict[str, PhaseParams], name: str) -> None:
    """Run a phase's notebook, after those whose freed files it reads; a failure is journalled."""
    folder = run_folder(params[name].run)
    for freed in to_make_again(folder, name):
        print(f"{freed}: its freed files are made again for {name}", flush=True)
        _execute(params, freed)
    try:
        execute(params[name], folder / "reports" / f"{name}.ipynb")
    except (UserError, NotebookError) as error:
        record(folder, "failed", phase=name, error=str(error).split("\n")[0])
        raise


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
            f"acceptance length  {known_text(numbers['acceptance_length']):>6}   "
            f"(K = {numbers['num_speculative_tokens']})\n"
            f"speed-up           {known_text(numbers['speedup']):>6}   "
            f"(95 % interval {numbers['interval']})"
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
        return f"; about {duration_text(self.left_s(name))} left in all"


@contextmanager
def _show_progress(path: Path, head: str, clock: _Clock, name: str) -> Iterator[None]:
    """Repeat the phase's own progress: one line that is redrawn on a terminal, else every 20 s."""
    stop = threading.Event()
    terminal = sys.stdout.isatty()

    def follow() -> None:
        started, shown = time.monotonic(), ""
        while not stop.wait(1.0 if terminal else 20.0):
            line = f"{head}: {_progress(path)}all left about " + duration_text(
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


@contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Keep the run's page in step while a phase runs: once its beginning is in the journal, and
    then every minute."""
    stop = threading.Event()

    def follow() -> None:
        shown_s, known = time.monotonic(), _changed(folder)
        while not stop.wait(_LOOK_S):
            if _changed(folder) == known and time.monotonic() - shown_s < _REFRESH_S:
                continue
            known, shown_s = _changed(folder), time.monotonic()
            with suppress(UserError, OSError):  # the phase has its own result to tell
                refresh_campaign(folder.name)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _changed(folder: Path) -> float:
    journal = folder / "journal.jsonl"
    return journal.stat().st_mtime if journal.exists() else 0.0


def _progress(path: Path) -> str:
    told = progress_text(path)
    return f"{told}; " if told else ""
