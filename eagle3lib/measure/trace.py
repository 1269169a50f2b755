"""An engine's Chrome trace as a timeline that is split once: every instant has one kind.

Read as a stream: traces have millions of events and hundreds of MB, of which name, times, thread
and correlation are kept.

On a CPU the thread of the steps is followed: an instant belongs to the innermost operator that
runs (self time), so nothing nested counts twice; within a scope but under no operator it is the
host's (Python), outside of all it is idle: the scheduler, the output, waiting for work. With a
device its kernels make the timeline: an instant belongs to the kernel that runs; of several that
overlap to the first of ``KINDS``; to none: idle. What a kernel is for is told by its name, and by
the scopes around its launch (a correlation id leads there), where a replayed graph is one launch.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import ijson

from eagle3lib.lab.errors import UserError
from eagle3lib.measure.trace_kinds import (
    ATTENTION,
    COLLECTIVES,
    HOST,
    KINDS,
    OTHER,
    SAMPLING,
    StepMark,
    is_drafter,
    is_sampling,
    kind_of,
    step_of,
)

_OP, _SCOPE, _LAUNCH = "op", "scope", "launch"
_CPU = {
    "cpu_op": _OP,
    "user_annotation": _SCOPE,
    "cuda_runtime": _LAUNCH,
    "cuda_driver": _LAUNCH,
    "hip_runtime": _LAUNCH,
}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_UNREADABLE = (
    ijson.JSONError, zlib.error, EOFError, OSError, AttributeError, KeyError, TypeError, ValueError,
)  # fmt: skip
# What these hold inside is theirs: the softmax of an attention is attention.
_WHOLE = (ATTENTION, SAMPLING, COLLECTIVES)


class Event(NamedTuple):
    """Times in microseconds since the trace's own zero."""

    start: float
    end: float
    name: str
    sort: str = _OP
    correlation: int | None = None


class Label(NamedTuple):
    """What an instant is spent on. ``whole``: the kind that everything inside has too."""

    kind: str
    drafter: bool = False
    name: str = ""
    whole: str = ""
    op: bool = False


class Piece(NamedTuple):
    """A stretch of the timeline, in microseconds; pieces never overlap."""

    start: float
    end: float
    label: Label


class Step(NamedTuple):
    """From the start of a decode step to the start of the next one, in microseconds."""

    start: float
    end: float
    mark: StepMark


@dataclass
class Trace:
    """What was kept of a trace file."""

    path: Path
    threads: dict[Any, list[Event]] = field(default_factory=lambda: defaultdict(list))
    kernels: list[Event] = field(default_factory=list)
    device_marks: list[Event] = field(default_factory=list)  # scopes as the device went through

    @property
    def has_device(self) -> bool:
        return bool(self.kernels)


def read_trace(path: Path) -> Trace:
    """Stream a ``*.trace.json`` or ``.json.gz``.

    Raises ``UserError`` for a file that is no trace, broken off, or without an operator or kernel.
    """
    trace, names = Trace(path), {}
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            for event in ijson.items(file, "traceEvents.item", use_float=True):
                _keep(trace, event, names)
    except _UNREADABLE as error:
        raise UserError(
            f"the trace can't be read: {error!r}"[:300],
            expected="a whole Chrome trace of torch's profiler",
            where=path,
            next="profile again; a trace that is broken off was still being written",
        ) from None
    if not trace.kernels and not any(e.sort == _OP for t in trace.threads.values() for e in t):
        raise UserError(
            "the trace is empty: it holds no operator and no kernel",
            expected="what the engine did between start and stop of its profiler",
            where=path,
            next="read the engine's log; ask for more tokens (--tokens) if it answered too early",
        )
    return trace


def _keep(trace: Trace, event: dict[str, Any], names: dict[str, str]) -> None:
    category = event.get("cat")
    if event.get("ph") != "X" or not isinstance(category, str):
        return
    sort = _CPU.get(category, "")
    name = str(event["name"])
    if category == "python_function" and (is_drafter(name) or is_sampling(name)):
        sort = _SCOPE
    if not sort and category not in _DEVICE and category != "gpu_user_annotation":
        return
    name = names.setdefault(name, name)
    arguments = event.get("args") or {}
    start = float(event["ts"])
    made = Event(start, start + float(event.get("dur", 0)), name, sort)
    if sort == _LAUNCH or category in _DEVICE:
        made = made._replace(correlation=arguments.get("correlation"))
    if category in _DEVICE:
        trace.kernels.append(made)
    elif category == "gpu_user_annotation":
        trace.device_marks.append(made)
    else:
        trace.threads[event.get("pid"), event.get("tid")].append(made)


def steps_of(trace: Trace) -> tuple[list[Step], list[StepMark]]:
    """Decode steps that another decode step follows at once, and all marks of the trace.

    The last step before a prompt or the end has no end of its own: what follows it is no part of a
    steady state. Raises ``UserError`` for a trace without steps.
    """
    on_device = [e for e in trace.device_marks if step_of(e.name)] if trace.has_device else []
    host = [e for e in _step_thread(trace) if e.sort == _SCOPE and not is_drafter(e.name)]
    found = _outermost(sorted(on_device or [e for e in host if step_of(e.name)]), trace)
    marks = [(e, mark) for e in found if (mark := step_of(e.name)) is not None]
    if any(mark.verify for _, mark in marks):  # a drafter's forward has a mark of its own
        marks = [(e, m) for e, m in marks if m.verify or not m.is_decode]
    steps = [
        Step(e.start, later.start, mark)
        for (e, mark), (later, following) in pairwise(marks)
        if mark.is_decode and following.is_decode and later.start > e.start
    ]
    if not steps:
        raise UserError(
            f"the trace has no steps: {len(marks)} marks, no decode step that another one follows",
            expected="scopes execute_context_..._generation_... (vLLM) or step[...] (SGLang)",
            where=trace.path,
            next="ask for more tokens (--tokens), or use an engine that marks its steps",
        )
    return steps, [mark for _, mark in marks]


def _step_thread(trace: Trace) -> list[Event]:
    """The events of the thread that runs the steps; of the one with most operators if none does."""

    def weight(events: list[Event]) -> tuple[int, int]:
        marks = sum(e.sort == _SCOPE and step_of(e.name) is not None for e in events)
        return marks, len(events)

    return max(trace.threads.values(), key=weight, default=[])


def _outermost(marks: list[Event], trace: Trace) -> list[Event]:
    """Marks that lie in no other and in no scope of the drafter. On a device a scope has a mark a
    stream: those that overlap are one."""
    drafts = sorted(
        e
        for e in (trace.device_marks if trace.has_device else _step_thread(trace))
        if is_drafter(e.name)
    )
    kept: list[Event] = []
    at = 0
    for mark in marks:
        while at < len(drafts) and drafts[at].end <= mark.start:
            at += 1
        inside = at < len(drafts) and drafts[at].start <= mark.start
        if not inside and not (kept and mark.start < kept[-1].end):
            kept.append(mark)
    return kept


def timeline(trace: Trace) -> list[Piece]:
    """The trace's pieces in order; what lies between them is idle."""
    if not trace.has_device:
        return _self_times(_step_thread(trace))[0]
    launched: dict[int, Label] = {}
    for events in trace.threads.values():
        launched |= _self_times(events)[1]
    labelled = [(e, _kernel_label(e, launched.get(e.correlation or -1))) for e in trace.kernels]
    return list(_first_kind(labelled))


def _self_times(events: list[Event]) -> tuple[list[Piece], dict[int, Label]]:
    """Each instant of a thread to its innermost event; and the labels around each launch."""
    pieces: list[Piece] = []
    launches: dict[int, Label] = {}
    stack: list[tuple[float, Label]] = []
    at = 0.0

    def spend(until: float) -> None:
        nonlocal at
        while stack and stack[-1][0] <= until:
            end, label = stack.pop()
            if end > at:
                pieces.append(Piece(at, end, label))
                at = end
        if stack and until > at:
            pieces.append(Piece(at, until, stack[-1][1]))
        at = max(at, until)

    for event in sorted(events, key=lambda e: (e.start, -e.end)):
        spend(event.start)
        outer = stack[-1] if stack else None
        label = _label(event, outer[1] if outer else Label(HOST))
        if event.sort == _LAUNCH and event.correlation is not None:
            launches[event.correlation] = label
        # Clock ticks let a child end after its parent.
        stack.append((min(event.end, outer[0]) if outer else event.end, label))
    spend(float("inf"))
    return pieces, launches


def _label(event: Event, outer: Label) -> Label:
    if event.sort == _LAUNCH:  # what the launch is for; its own time is the host's
        return outer
    drafter = outer.drafter or (event.sort == _SCOPE and is_drafter(event.name))
    if event.sort == _SCOPE:
        whole = outer.whole or (SAMPLING if is_sampling(event.name) else "")
        return Label(whole or HOST, drafter, event.name, whole)
    known = outer.whole or kind_of(event.name) or (outer.kind if outer.op else OTHER)
    whole = outer.whole or (known if known in _WHOLE else "")
    return Label(known, drafter, event.name, whole, op=True)


def _kernel_label(kernel: Event, launch: Label | None) -> Label:
    around = launch or Label(HOST)
    known = around.whole or kind_of(kernel.name) or (around.kind if around.op else OTHER)
    return Label(known, around.drafter, kernel.name)


def _first_kind(labelled: list[tuple[Event, Label]]) -> Iterator[Piece]:
    """Pieces of kernels on many streams: where they overlap, the first kind has the instant."""
    edges = [(e.start, 1, label) for e, label in labelled if e.end > e.start]
    edges += [(e.end, -1, label) for e, label in labelled if e.end > e.start]
    running: Counter[Label] = Counter()
    at = 0.0
    for time, change, label in sorted(edges, key=lambda edge: edge[:2]):
        if running and time > at:
            first = min(running, key=lambda one: (KINDS.index(one.kind), one))
            yield Piece(at, time, first)
        running[label] += change
        if not running[label]:
            del running[label]
        at = time
