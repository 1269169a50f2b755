"""Where a decode step and a round spend their time: the engine's own profiler, under a greedy load.

For each arm (the engine alone, with the drafter) one server: a warm load without the profiler, the
same load with it, and without it again. The trace is cut into steps (a round is a step with a
drafter) and every instant of them gets one kind, so the kinds sum to the wall time of the steps;
what no rule knows is a kind too. Milliseconds are those under the profiler; by how much it slows a
step is measured on the same server.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3lib.data.renderer import TargetRenderer, target_renderer
from eagle3lib.engine.client import Asked, BadReply
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.engine.profiler import start_profiler, stop_profiler
from eagle3lib.engine.records import BrokenRecord, RoundCounts, chunk_counts
from eagle3lib.engine.stream import Streamed, stream_chat, stream_ids
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_files, read_json, write_json
from eagle3lib.lab.machine import describe_machine, free_cores
from eagle3lib.measure.arms import PLAIN
from eagle3lib.measure.trace import read_trace, steps_of, timeline
from eagle3lib.measure.trace_kinds import DRAFTER, IDLE, KINDS, OTHER

WITH_DRAFTER = "engine with drafter"
FOLDER, FILE = "profile", "profile.json"  # the folder within a run
_PREFILL_TOKENS = 1
_NAMES_SHOWN = 20
# Where a server ends an answer the engine may run a step more than it counts.
_MARKS_OFF = 0.1


@dataclass(frozen=True)
class Load:
    """``requests`` greedy answers of up to ``tokens``, ``concurrency`` in flight."""

    prompts: Sequence[list[dict[str, Any]]]  # messages of each request
    tokens: int = 64
    concurrency: int = 1


@dataclass
class Asking:
    """What the engine said of one load. ``steps``: by its own record of each request, rounds with
    a drafter; without one, tokens but the prefill's."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    accepted: int = 0
    decode_s: float = 0.0  # from a request's first token to its last, summed

    @property
    def step_s(self) -> float:
        return self.decode_s / self.steps

    def __add__(self, other: Asking) -> Asking:
        mine, theirs = asdict(self), asdict(other)
        return Asking(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class ArmProfile:
    """Seconds are means over ``steps`` under the profiler; ``kinds`` sum to ``step_s``."""

    arm: str  # as the benchmark names it
    device: str  # "gpu" or "cpu": whose timeline it is
    steps: int  # decode steps of the trace that another one follows at once
    step_s: float  # wall time of one
    kinds: dict[str, float]  # seconds a step by what they are spent on
    drafter_kinds: dict[str, float]  # what the drafter's share is made of
    names: list[dict[str, Any]]  # the operators or kernels that take most
    marked_steps: int  # in the whole trace, a step of n requests n times
    counted_steps: int  # by the engine's own record of the same requests
    profiled: dict[str, Any]  # the load under the profiler, as its client saw it
    unprofiled: dict[str, Any]  # the same load before and after
    acceptance_length: float | None
    trace: str  # the file
    notes: list[str] = field(default_factory=list)  # what a reader must know of these figures

    @property
    def slowdown(self) -> float:
        """A step under the profiler by one without it, both as the client sees them."""
        return float(self.profiled["step_s"] / self.unprofiled["step_s"])


def step_times(path: Path) -> dict[str, Any]:
    """Mean seconds of a decode step of a trace by kind, without what the client knows.

    The drafter's pieces are one kind, and once more apart (``drafter_kinds``). Raises ``UserError``
    for a trace that is broken, empty or without steps.
    """
    trace = read_trace(path)
    steps, marks = steps_of(trace)
    starts = [step.start for step in steps]
    kinds: Counter[str] = Counter()
    drafter: Counter[str] = Counter()
    names: Counter[tuple[str, str]] = Counter()
    for piece in timeline(trace):
        at = max(0, bisect.bisect_right(starts, piece.start) - 1)
        while at < len(steps) and steps[at].start < piece.end:
            took = min(piece.end, steps[at].end) - max(piece.start, steps[at].start)
            if took > 0:
                kind = DRAFTER if piece.label.drafter else piece.label.kind
                kinds[kind] += took
                drafter[piece.label.kind] += took * piece.label.drafter
                names[piece.label.name, kind] += took
            at += 1
    wall = sum(step.end - step.start for step in steps)
    kinds[IDLE] = wall - sum(kinds.values())
    each = 1e-6 / len(steps)
    return {
        "device": "gpu" if trace.has_device else "cpu",
        "steps": len(steps),
        "step_s": wall * each,
        "kinds": {kind: kinds[kind] * each for kind in KINDS},
        "drafter_kinds": {kind: drafter[kind] * each for kind in KINDS if drafter[kind]},
        "names": [
            {"name": name or "(no scope)", "kind": kind, "step_s": took * each}
            for (name, kind), took in names.most_common(_NAMES_SHOWN)
        ],
        "marked_steps": sum(mark.decodes for mark in marks),
    }


def profile_arms(
    config: EngineConfig, drafter: Path | None, load: Load, folder: Path, **server: Any
) -> dict[str, Any]:
    """Profile the engine alone and, with one, with the drafter; writes ``profile.json``.

    ``server``: options of ``EngineServer``. Raises ``UserError`` for an engine that does not start
    or has no profiler, and for traces that say nothing.
    """
    threads = config.threads or free_cores()  # one server at a time, with the same threads
    arms = [(PLAIN, None)] + ([(WITH_DRAFTER, drafter)] if drafter else [])
    found, version = [], ""
    for arm, its_drafter in arms:
        name = "alone" if its_drafter is None else "drafter"
        traces = folder / "traces" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        its = replace(config, drafter=its_drafter, threads=threads, trace_folder=traces)
        with EngineServer(its, folder / "logs" / f"{name}.log", **server) as running:
            found.append(_profile_arm(running, arm, load))
            version = running.version
    result = {
        "engine": config.engine,
        "version": version,
        "target": str(config.target),
        "drafter": str(drafter) if drafter else None,
        "drafter_fingerprint": drafter_fingerprint(drafter) if drafter else None,
        "num_speculative_tokens": config.num_speculative_tokens if drafter else None,
        "dtype": config.dtype,
        "compile": config.compile,
        "threads": threads,
        "stacks": config.trace_stacks,
        "load": {
            "requests": len(load.prompts),
            "tokens": load.tokens,
            "concurrency": load.concurrency,
        },
        "machine": describe_machine(folder),
        "arms": [asdict(arm) | {"slowdown": arm.slowdown} for arm in found],
        "round_cost": _round_cost(found),
    }
    write_json(folder / FILE, result)
    return result


def _profile_arm(server: EngineServer, arm: str, load: Load) -> ArmProfile:
    say, renderer = server.say, None
    if server.config.engine == "sglang":  # its chat API tells no ids
        trusted = server.config.trust_remote_code
        renderer = target_renderer(server.config.target, trust_remote_code=trusted)
    say(f"{arm}: warming up")
    _ask_all(server, load, renderer)
    before = _ask_all(server, load, renderer)
    start_profiler(server.url, server.config)
    say(f"{arm}: profiling {len(load.prompts)} answers")
    asked = _ask_all(server, load, renderer)
    say(f"{arm}: the engine writes its trace")
    traces = stop_profiler(server.url, server.config)
    unprofiled = before + _ask_all(server, load, renderer)
    say(f"{arm}: reading {traces[0].name}")
    times = step_times(traces[0])
    both = asked + unprofiled
    return ArmProfile(
        arm=arm,
        **times,
        counted_steps=asked.steps,
        profiled=asdict(asked) | {"step_s": asked.step_s},
        unprofiled=asdict(unprofiled) | {"step_s": unprofiled.step_s},
        acceptance_length=1 + both.accepted / both.steps if server.config.drafter else None,
        trace=str(traces[0]),
        notes=_notes(times, asked.steps, server.config, len(traces)),
    )


def _notes(times: dict[str, Any], counted: int, config: EngineConfig, traces: int) -> list[str]:
    """What a reader must know of these figures."""
    notes, marked = [], times["marked_steps"]
    if abs(marked - counted) > max(_MARKS_OFF * counted, 2):
        notes.append(f"the trace marks {marked} steps, the engine counted {counted}")
    if config.drafter is not None and not times["kinds"][DRAFTER]:
        notes.append("nothing in the trace tells the drafter's part: profile with --stacks")
    if traces > 1:
        notes.append(f"the first of {traces} ranks' traces; the others lie beside it")
    if times["kinds"][OTHER] > 0.1 * times["step_s"]:
        notes.append("no rule knows over 10 % of the step: see the names")
    return notes


def _ask_all(server: EngineServer, load: Load, renderer: TargetRenderer | None) -> Asking:
    def ask(messages: list[dict[str, Any]]) -> Asking:
        streamed = _ask(server, messages, load.tokens, renderer)
        return _asking(streamed, server.config, load.concurrency)

    with ThreadPoolExecutor(load.concurrency) as pool:
        total = sum(pool.map(ask, load.prompts), Asking())
    if not total.steps:
        raise UserError(
            f"{total.requests} answers of {total.tokens} tokens: no step to profile",
            expected="answers of several tokens",
            next="other prompts (--prompts), or more tokens (--tokens)",
        )
    return total


def _ask(
    server: EngineServer,
    messages: list[dict[str, Any]],
    tokens: int,
    renderer: TargetRenderer | None,
) -> Streamed:
    asked = Asked(messages, (), "default")
    if renderer is None:
        return stream_chat(server.url, asked, max_tokens=tokens, temperature=0.0)
    steps = server.config.num_speculative_tokens if server.config.drafter else None
    return stream_ids(server.url, renderer, asked, max_tokens=tokens, temperature=0.0, steps=steps)


def _asking(streamed: Streamed, config: EngineConfig, concurrency: int = 1) -> Asking:
    tokens = len(streamed.answer.answer_token_ids)
    counts: RoundCounts | None = streamed.counts
    if config.drafter is None:
        counts = RoundCounts(tokens - _PREFILL_TOKENS, 0, None, None, "tokens")
    elif counts is None and tokens > _PREFILL_TOKENS:
        try:
            if concurrency > 1:  # a busy server sends several rounds in one piece
                raise BrokenRecord("under load a chunk may hold several")
            counts = chunk_counts(streamed.chunk_tokens, config.num_speculative_tokens)
        except BrokenRecord as error:
            raise BadReply(
                f"the engine keeps no record of rounds, and its stream tells none: {error.found}",
                expected="one request at a time (--concurrency 1), without a proxy that buffers",
            ) from None
    decode_s = streamed.chunk_s[-1] - streamed.chunk_s[0]
    steps, accepted = (counts.rounds, counts.accepted) if counts else (0, 0)
    return Asking(1, tokens, steps, accepted, decode_s)


def _round_cost(found: list[ArmProfile]) -> float | None:
    """A round in plain steps, both without the profiler; what no drafter below it can pay."""
    if len(found) < 2:
        return None
    return float(found[1].unprofiled["step_s"] / found[0].unprofiled["step_s"])


def drafter_fingerprint(folder: Path) -> str:
    """Of what an engine reads in a drafter's folder; its card may be written again."""
    read = [p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".bin")]
    return hash_files(read, folder)


def read_profile(folder: Path) -> dict[str, Any] | None:
    """What ``profile_arms`` wrote into a folder; None where there is none."""
    return read_json(folder / FILE) if (folder / FILE).exists() else None
