"""Where a run stands: every phase and gate, what was decided, and the exact next command.

``eagle3 status`` prints it and the run's page shows it: somebody else can go on from either.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle3lib.drafter.card import suggested_repo, upload_command
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.journal import DECISIONS, read_journal, run_words, shown_path
from eagle3lib.lab.large import freed
from eagle3lib.lab.manifest import whole_phases
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import load_profile
from eagle3lib.lab.run import existing_run, outdated_by
from eagle3lib.lab.words import duration_text, now_text, size_text, time_text
from eagle3lib.measure.arms import OWN, PLAIN, REFERENCE, drafter_folder, exported_drafter

GATES = {"baseline": PLAIN, "reference": REFERENCE, "own": OWN}
_BENCHMARK = "06_benchmark_serving"
_ALIVE_S = 60.0
_ON_THE_WAY = ("failed", "interrupted", "out of date", "waiting")


@dataclass(frozen=True)
class PhaseLine:
    """``state``: waiting, running, done, out of date, failed, interrupted or skipped (no phase of
    this run reads it). ``why``: the reason of the last rerun. ``duration_s`` of a phase that is
    whole, ``bytes`` also of one that is not, ``holder``: who runs it, in which process, where."""

    name: str
    state: str
    detail: str = ""
    why: str = ""
    duration_s: float | None = None
    bytes: int | None = None
    finished: str = ""
    report: str | None = None
    holder: str = ""


@dataclass(frozen=True)
class GateLine:
    """``state``: waiting, passed, failed, skipped or not asked (nobody named a reference)."""

    engine: str
    gate: str
    state: str
    detail: str = ""


@dataclass(frozen=True)
class Campaign:
    phases: list[PhaseLine]
    gates: list[GateLine]
    decisions: list[dict[str, str]]
    next_steps: list[tuple[str, str]]  # why, command

    @property
    def running(self) -> bool:
        return any(p.state == "running" for p in self.phases)


def read_campaign(run: str) -> Campaign:
    """Raises ``UserError`` where there is no such run."""
    folder = existing_run(run)
    events = read_journal(folder)
    whole = whole_phases(folder)
    left_out = _left_out(folder)
    phases = [_phase(folder, n, whole.get(n), events, left_out.get(n, "")) for n in PHASES]
    decisions = [
        {"when": time_text(e["when"]), "who": e["who"], "phase": e.get("phase", ""),
         "text": _decision(e)}
        for e in events
        if e["what"] in DECISIONS
    ]  # fmt: skip
    gates = _gates(folder, events)
    return Campaign(phases, gates, decisions, _next_steps(folder, phases))


def _phase(
    folder: Path,
    name: str,
    done: dict[str, Any] | None,
    events: list[dict[str, Any]],
    left_out: str,
) -> PhaseLine:
    mine = [e for e in events if e.get("phase") == name and e["what"] not in DECISIONS]
    starts = [e for e in mine if e["what"] == "started"]
    why = starts[-1]["why"] if starts and starts[-1]["why"] != "never run" else ""
    report = f"reports/{name}.html"
    link = report if (folder / report).exists() else None
    if done:
        changed = outdated_by(folder, name)
        state, detail = "done", ""
        if changed:
            state, detail = "out of date", f"{', '.join(changed)} changed"
        told = [
            f"{kind} freed on {facts['when'][:10]}; made again by "
            + facts["again"].replace("PROFILE", run_words(folder))
            for kind, facts in freed(folder, name).items()
        ]
        detail = "; ".join(filter(None, [detail, *told]))
        return PhaseLine(
            name, state, detail, why, done["duration_s"], done["bytes"], done["finished"], link
        )
    if not (folder / name / "inputs.json").exists():
        return PhaseLine(name, "skipped" if left_out else "waiting", left_out)
    state, detail = _unfinished(folder, name, mine)
    holder = _holder(starts[-1]) if state == "running" and starts else ""
    size = _bytes_so_far(folder / name)
    return PhaseLine(name, state, detail, why, bytes=size, report=link, holder=holder)


def _left_out(folder: Path) -> dict[str, str]:
    """Phases that this run goes without, and why: a later one has begun, and neither what has begun
    nor what follows reads them. ``eagle3 run PROFILE 01 06 07 drafter=FOLDER`` trains nothing."""
    begun = [n for n in PHASES if (folder / n / "inputs.json").exists()]
    try:
        params = load_profile(str(folder / "profile.yaml"))
    except UserError:  # none was kept, or it is of another version
        return {}
    names = list(PHASES)
    last = max(map(names.index, begun), default=-1)
    needed, asked = set(), [*begun, *names[last + 1 :]]
    while asked:
        name = asked.pop()
        if name not in needed:
            needed.add(name)
            asked += params[name].upstream()
    drafter = getattr(params[_BENCHMARK], "drafter", "")
    reason = "left out, no phase of this run reads it"
    instead = f"{reason}: {_BENCHMARK} measures {Path(drafter).name}"
    return {
        name: instead if drafter and name != names[0] else reason
        for name in names
        if name not in needed
    }


def _holder(start: dict[str, Any]) -> str:
    if "pid" not in start:  # a journal of before
        return str(start["who"])
    return f"{start['who']}, process {start['pid']} on {start['host']}"


def _bytes_so_far(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # renamed into place meanwhile
            size += path.lstat().st_size if path.is_file() else 0
    return size


def _unfinished(folder: Path, name: str, mine: list[dict[str, Any]]) -> tuple[str, str]:
    last = mine[-1] if mine else {"what": "", "when": ""}
    if last["what"] == "failed":
        return "failed", f"{time_text(last['when'])}: {last['error']}"
    since = f"began {time_text(last['when'])}" if last["when"] else ""
    progress = folder / name / "progress.json"
    quiet_s = time.time() - progress.stat().st_mtime if progress.exists() else None
    held = _is_locked(folder / f".{name}.lock")
    if held or (held is None and quiet_s is not None and quiet_s < _ALIVE_S):
        told = [since, progress_text(progress)]
        if quiet_s is not None and quiet_s > _ALIVE_S:
            told.append(f"no sign of progress for {duration_text(quiet_s)}")
        return "running", ", ".join(filter(None, told))
    return "interrupted", ", ".join(filter(None, [since, progress_text(progress)]))


def _is_locked(path: Path) -> bool | None:
    """Whether another process holds a phase's lock; None where that can't be told from here."""
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:  # another person's folder
        return None
    lock.release()
    return False


def _gates(folder: Path, events: list[dict[str, Any]]) -> list[GateLine]:
    place = folder / _BENCHMARK
    told = read_json(place / "gates.json") if (place / "gates.json").exists() else []
    judged = {(g["engine"], g["arm"]): g for g in told}
    recorded = place / "inputs.json"
    params = read_json(recorded)["params"] if recorded.exists() else {}
    engines = [e.strip() for e in params.get("engines", "vllm").split(",")]
    skipped = {e["gate"]: e for e in events if e["what"] == "gate skipped"}
    lines = []
    for engine in dict.fromkeys([*engines, *(g["engine"] for g in told)]):
        for arm in GATES.values():
            gate, act = judged.get((engine, arm)), skipped.get(arm)
            detail = f"by {act['who']}: {act['why']}" if act else ""
            if gate:
                proof = f"; it proves: {gate['proves']}" if gate["proves"] else ""
                told_too = f"; skipped {detail}" if act and not gate["passed"] else ""
                state = "passed" if gate["passed"] else "failed"
                lines.append(GateLine(engine, arm, state, gate["evidence"] + proof + told_too))
            elif act:
                lines.append(GateLine(engine, arm, "skipped", detail))
            elif arm == REFERENCE and params and not params.get("reference_drafter"):
                lines.append(GateLine(engine, arm, "not asked", "no reference_drafter is named"))
            else:
                lines.append(GateLine(engine, arm, "waiting"))
    return lines


def _decision(event: dict[str, Any]) -> str:
    if event["what"] == "note":
        return str(event["text"])
    if event["what"] == "gate skipped":
        return f"gate {event['gate']!r} skipped: {event['why']}"
    return f"{event['kind']} freed, {size_text(event['bytes'])}"


def _next_steps(folder: Path, phases: list[PhaseLine]) -> list[tuple[str, str]]:
    run = folder.name
    running = [p.name for p in phases if p.state == "running"]
    go_on = _go_on(folder, phases)
    if running:
        return [
            (f"{', '.join(running)} is running; follow it", f"eagle3 status {run}"),
            ("when that says that it was interrupted, go on with", go_on),
        ]
    left = [p for p in phases if p.state in _ON_THE_WAY]
    if left:
        first = next((p for p in left if p.state == "failed"), left[0])
        why = f"{first.name} is {first.state}"
        if first.state == "failed":
            why = f"{first.name} failed: read reports/{first.name}.ipynb, mend the cause"
        return [(f"{why}; go on with", go_on)]
    drafter = drafter_folder(folder, OWN)
    share = ("all phases are done; share the result", f"eagle3 report {run} --bundle {run}.zip")
    if drafter != exported_drafter(folder):  # somebody's, with a card of its own
        return [share]
    return [
        share,
        ("write the figures into the model card", f"eagle3 card {run}"),
        ("upload the drafter under your own account", _upload(folder, drafter)),
    ]


def _upload(folder: Path, drafter: Path) -> str:
    target = read_json(folder / "manifest.json")["target"]["name"]
    return upload_command(suggested_repo(target), shown_path(drafter))


def _go_on(folder: Path, phases: list[PhaseLine]) -> str:
    """The command that ends the run; it names the phases where some are left out on purpose."""
    command = f"eagle3 run {run_words(folder)}"
    if not any(p.state == "skipped" for p in phases):
        return command
    left = [p.name for p in phases if p.state in (*_ON_THE_WAY, "running")]
    return " ".join([command, *(name.split("_")[0] for name in left)])


def progress_text(path: Path) -> str:
    """``answers 3 of 40 rows, 1:20 left``; empty where a phase has told nothing yet."""
    try:
        now = read_json(path)
    except UserError:  # not written yet
        return ""
    if now["total"] is None:
        return str(now["what"])
    left = "" if now["left_s"] is None else f", {duration_text(now['left_s'])} left"
    return f"{now['what']} {now['done']:,.0f} of {now['total']:,} {now['unit']}{left}"


def status_text(run: str) -> str:
    """What ``eagle3 status`` prints."""
    folder = existing_run(run)
    campaign = read_campaign(run)
    target = read_json(folder / "manifest.json")["target"]["name"]
    lines = [f"run {run}, target {target}, {now_text()}", ""]
    for p in campaign.phases:
        time_s = "" if p.duration_s is None else duration_text(p.duration_s)
        size = "" if p.bytes is None else size_text(p.bytes)
        told = [p.holder, p.detail, f"last ran again because: {p.why}" if p.why else ""]
        line = f"  {p.name:26} {p.state:12} {time_s:>8} {size:>9}  {'; '.join(filter(None, told))}"
        lines.append(line.rstrip())
    lines += ["", "gates"]
    lines += [f"  {g.engine} {g.gate:20} {g.state:10} {g.detail}".rstrip() for g in campaign.gates]
    if campaign.decisions:
        lines += ["", "decisions"]
        lines += [
            f"  {d['when']} {d['who']}{', ' + d['phase'] if d['phase'] else ''}: {d['text']}"
            for d in campaign.decisions
        ]
    lines += ["", "next"]
    lines += [f"  {command}   # {why}" for why, command in campaign.next_steps]
    page = folder / "index.html"
    return "\n".join([*lines, "", f"report: {page if page.exists() else 'not made yet'}"])
