"""The arms of the Kimi-shaped replay: an engine's servers, asked one after another, failures kept.

All arms of an engine start together and are up together; the engines come one after another. An arm
that does not start, or does not answer in time, is told with its class and the end of its log, and
what it answered before stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eagle3lib.data.rows import AnswerRow, json_line, read_answers
from eagle3lib.diagnose.kimi_setting import Bench, Kind, Told
from eagle3lib.engine.failures import EngineFailure
from eagle3lib.engine.launch import EngineServer
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_atomic
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.ask import Asker
from eagle3lib.measure.points import Point

_STALL_S = 120.0  # without any sign of life a start of so small a target hangs
_LOG_END_CHARS = 6000


@dataclass
class Arm:
    engine: str
    kind: Kind | None
    server: EngineServer | None = None

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind or 'alone'}"


def requests_file(b: Bench, engine: str) -> Path:
    return b.work / f"requests-{engine}.jsonl"


def serve_engine(b: Bench, engine: str) -> Told:
    """Every arm of one engine, by name: version, start, speed, or how it failed. Its requests go to
    ``requests-ENGINE.jsonl``."""
    arms = [Arm(engine, kind) for kind in b.kinds]
    held = [r for r in read_answers(b.work / "answers") if r.split == "heldout"][: b.heldout]
    if not held:
        raise UserError("no held-out answer of the target", where=b.work / "answers")
    told: Told = {arm.name: {} for arm in arms}
    rows: list[RequestRow] = []
    with contextlib.ExitStack() as opened:
        for arm in arms:  # before any starts: a start that dies otherwise leaves no other behind
            opened.callback(_stop, arm)
        with ThreadPoolExecutor(b.starts_at_once) as pool:
            list(pool.map(lambda arm: _start(b, arm, told[arm.name]), arms))
        for arm in arms:
            if arm.server:
                rows += _ask(b, arm, held, told[arm.name])

    def write(path: Path) -> None:
        path.write_bytes(b"".join(json_line(asdict(row)) for row in rows))

    write_atomic(requests_file(b, engine), write)
    return told


def server_of(
    b: Bench, name: str, engine: str, drafter: Path | None, most: int = 8
) -> EngineServer:
    """A server of the target, not yet started, its log in ``NAME.log``."""
    return EngineServer(
        b.engine(engine, drafter, most), b.work / f"{name}.log", fallback=b.fallback,
        stall_s=_STALL_S, deadline_s=min(b.start_s, b.left_s()),
    )  # fmt: skip


def failure(error: Exception, log: Path) -> Told:
    """How a server failed, for the result: the first line, its class, the end of its last log."""
    logs = sorted(log.parent.glob(f"{log.stem}*.log"), key=lambda path: path.stat().st_mtime)
    text = logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
    kind = error.failure.kind if isinstance(error, EngineFailure) else None
    return {"failed": str(error).split("\n")[0], "class": kind, "log_end": text[-_LOG_END_CHARS:]}


def _start(b: Bench, arm: Arm, told: Told) -> Arm:
    drafter, name = b.drafter_folder(arm.kind) if arm.kind else None, arm.name.replace(" ", "-")
    if drafter and not drafter.exists():
        told |= {"failed": f"there is no drafter of type {arm.kind}: see train.json"}
        return arm
    try:
        arm.server = server_of(b, name, arm.engine, drafter).start()
    except (UserError, OSError) as error:
        told |= failure(error, b.work / f"{name}.log")
        return arm
    told |= {"version": arm.server.version, "ready_s": arm.server.ready_after_s,
             "attempts": arm.server.attempts}  # fmt: skip
    return arm


def _stop(arm: Arm) -> None:
    if arm.server:
        arm.server.stop()


def _ask(b: Bench, arm: Arm, held: list[AnswerRow], told: Told) -> list[RequestRow]:
    assert arm.server is not None
    server = arm.server
    cfg = BenchmarkParams(max_new_tokens=b.max_new_tokens, num_speculative_tokens=b.steps)
    asker, point = Asker(cfg, b.folder, arm.engine, b.steps), Point(arm.engine, b.steps)
    made: list[RequestRow] = []

    def ask() -> None:
        asker.row(server, arm.name, held[0], point, 0, 0)  # what is compiled at first use
        for row in held:
            made.append(_with_rounds(asker.row(server, arm.name, row, point, 0, 0), b.steps))

    try:
        _within(min(b.ask_s, b.left_s()), ask)
    except (UserError, OSError) as error:
        told |= failure(error, server.log)
        server.stop()  # what it still computes would slow the arms that are asked after it
    rows = list(made)  # a late answer must not come into it any more
    seconds = sum(r.duration_s for r in rows)
    if seconds:
        tokens = sum(len(r.answer_token_ids) for r in rows)
        told |= {"answers": len(rows), "tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}
    return rows


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Wait for ``work`` so long; beyond it, it ends with the server that it waits for, which the
    caller stops."""
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(work).result(seconds)
    except TimeoutError:
        raise UserError(f"the prompts were not answered within {seconds:.0f} s") from None
    finally:
        pool.shutdown(wait=False)


def _with_rounds(row: RequestRow, steps: int) -> RequestRow:
    """Rounds out of the chunks of a lone request, where the engine keeps no record of them."""
    if row.accepted is not None or row.counts is None:
        return row
    accepted = [n - 1 for n in row.chunk_tokens[1:]]
    return replace(row, accepted=accepted, drafted=[steps] * len(accepted))
