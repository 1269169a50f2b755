"""Answers out of the served target, token-exact, resumable at any moment.

Every answer is one line of ``answers.jsonl`` the moment it is whole; what was refused is one line
of ``rejects.jsonl`` with its reason. A run that was killed reads both and asks for the rest.

Which answers there are at the end depends on the prompts alone, not on which server was quick or
when a run was killed: the conversations stand in one order, and ``want_tokens`` keeps the shortest
beginning of it that holds enough. What was in flight behind it goes to ``surplus.jsonl`` (and comes
back from there when more is wanted)::

    order      c0  c1  c2  c3  c4  c5      want 250 tokens
    tokens     90  --  80  95  70   .      c1 was refused, c5 never asked for
    answers    c0      c2  c3              surplus: c4
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eagle3lib.data.prompts import Prompt, Reject
from eagle3lib.data.rows import GAVE_UP, GIVEN, AnswerRow, json_line, read_answers, read_rejects
from eagle3lib.data.turns import Conversation, Sampling, hold
from eagle3lib.engine.client import Client
from eagle3lib.engine.pool import Pool, PoolStopped
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl, write_atomic

_STOP_S = 2.0
_FEW_REFUSED, _FEW_ANSWERS = 20, 50  # less than so many say nothing of a share


def generate_answers(
    prompts: Iterable[Prompt],
    servers: Pool | Client,
    folder: Path,
    sampling: Sampling,
    *,
    concurrency: int,
    max_reject_share: float,
    want_tokens: int = 0,
    answers_per_prompt: int = 1,
    target_fingerprint: str = "",
    on_answer: Callable[[AnswerRow], None] = lambda row: None,
) -> list[AnswerRow]:
    """Answer ``prompts`` in their order, ``concurrency`` conversations at once over all servers;
    returns all answers of the folder.

    ``want_tokens``: stop asking once the answers to these prompts hold so many tokens that can be
    trained on (0: answer all). With ``answers_per_prompt`` every prompt is asked once before any is
    asked again. Raises ``UserError`` when the servers are gone, when too large a share is refused,
    or when no answer can be trained on.
    """
    pool = servers if isinstance(servers, Pool) else Pool([servers], give_up_s=0)
    wanted = list(prompts)
    plan = [Conversation(p, repeat) for repeat in range(answers_per_prompt) for p in wanted]
    book = _Book(folder, plan, want_tokens, max_reject_share)
    pool.check()

    def converse(index: int, tell: Callable[[AnswerRow], None]) -> Reject | None:
        known = book.known_turns(index)
        return hold(plan[index], pool, sampling, target_fingerprint, known, tell)

    workers = _Workers(concurrency, converse)
    try:
        with book.files():
            _work_through(book, workers, concurrency, on_answer)
    except BaseException:
        pool.stop()
        raise
    finally:
        workers.stop()
    return book.settle()


def _work_through(
    book: _Book, workers: _Workers, concurrency: int, on_answer: Callable[[AnswerRow], None]
) -> None:
    while True:
        while workers.running < concurrency and (index := book.next()) is not None:
            workers.start(index)
        if not workers.running:
            return
        for told in workers.results():
            if isinstance(told, AnswerRow):
                book.add(told)
                on_answer(told)
            elif isinstance(told, Reject):
                book.refuse(told)
        book.sync()


class _Workers:
    """Threads that hold conversations and report over a queue.

    They are daemons, unlike those of ``concurrent.futures``, which the interpreter joins at its
    exit: Ctrl-C waits two seconds at most, and an answer that was in flight then, for minutes
    perhaps, is dropped and asked again by the next run. In a notebook, whose process lives on, such
    a thread ends with its request.
    """

    def __init__(
        self,
        count: int,
        work: Callable[[int, Callable[[AnswerRow], None]], Reject | None],
    ):
        self.running = 0
        self._count, self._work = count, work
        self._tasks: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, index: int) -> None:
        self._tasks.put(index)
        self.running += 1
        if len(self._threads) < min(self.running, self._count):
            self._threads.append(threading.Thread(target=self._run, name="asking", daemon=True))
            self._threads[-1].start()

    def results(self) -> Iterator[AnswerRow | Reject | None]:
        """Rows, rejects and ends (None) of conversations: the next one, and those that are there
        already; raises what a worker raised."""
        told = [self._results.get()]
        told += [self._results.get() for _ in range(self._results.qsize())]
        for result, ended in told:
            self.running -= ended
            if isinstance(result, BaseException):
                raise result
            yield result

    def stop(self) -> None:
        """Let the threads end, and wait for those that soon do: the next run starts clean."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline_s = time.monotonic() + _STOP_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        while (index := self._tasks.get()) is not None:
            ended: Any = None
            try:
                ended = self._work(index, lambda row: self._results.put((row, False)))
            except PoolStopped:
                return
            except BaseException as error:  # raised again by results(), in the thread that asked
                ended = error
            self._results.put((ended, True))


class _Book:
    """Which conversations of the plan are answered, by the files of the folder."""

    def __init__(
        self, folder: Path, plan: list[Conversation], want_tokens: int, max_reject_share: float
    ):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.plan = folder, plan
        self._want, self._limit = want_tokens, max_reject_share
        answers = {row.id: row for row in read_answers(folder)}
        surplus = {r["id"]: AnswerRow(**r) for r in read_jsonl(folder / "surplus.jsonl")}
        self.rows = surplus | answers
        # Answers of others were never asked for: they must not dilute the share of the refused.
        self._given = sum(row.token_ids_from == GIVEN for row in self.rows.values())
        self._aside = surplus.keys() - answers.keys()
        # Lines without an id are of reading the prompts: those were never asked.
        refused = [r for r in read_rejects(folder) if r["id"] and r["reason"] != GAVE_UP]
        self._refused = {r["id"] for r in refused}
        self._passed = self._tokens = 0  # of the plan: conversations, tokens to train on
        self._ends: Counter[str] = Counter()  # answers by why they are kept apart
        self._files: tuple[BinaryIO, BinaryIO] | None = None

    @contextmanager
    def files(self) -> Iterator[None]:
        """Keep the files open for appending."""
        with (
            (self.folder / "answers.jsonl").open("ab") as answers,
            (self.folder / "rejects.jsonl").open("ab") as rejects,
        ):
            self._files = answers, rejects
            yield

    def next(self) -> int | None:
        """The next conversation to hold; None at the end, or when those before it hold enough.

        What is done further on does not count: a run that was killed left gaps, and the beginning
        of the plan must be whole.
        """
        while self._passed < len(self.plan) and not (self._want and self._tokens >= self._want):
            index = self._passed
            self._passed += 1
            for row in self.known_turns(index).values():
                self._count(row)
            conversation = self.plan[index]
            if conversation.id not in self.rows and conversation.id not in self._refused:
                return index
        return None

    def known_turns(self, index: int) -> dict[int, AnswerRow]:
        ids = self.plan[index].row_ids
        return {turn: self.rows[row] for turn, row in enumerate(ids) if row in self.rows}

    def add(self, row: AnswerRow) -> None:
        """Write a row before it is counted."""
        assert self._files
        _append(self._files[0], vars(row))  # asdict would copy every token id
        self.rows[row.id] = row
        self._count(row)
        if self._want and self._ends.total() >= _FEW_ANSWERS:
            self._check_usable()

    def refuse(self, reject: Reject) -> None:
        assert self._files
        _append(self._files[1], reject.as_dict())
        self._refused.add(reject.id)
        self._check_share(_FEW_REFUSED)

    def sync(self) -> None:
        """Have on disk what was written: once for all that came together, since a slow disk would
        else hold a fast server back."""
        assert self._files
        for file in self._files:
            os.fsync(file.fileno())

    def settle(self) -> list[AnswerRow]:
        """Part what is wanted from what was answered beyond it; returns the wanted."""
        self._check_share(1)
        if self._want and self._ends:
            self._check_usable()
        inside, beyond, tokens = set(), set(), 0
        for index, conversation in enumerate(self.plan):
            enough = self._want and tokens >= self._want
            (beyond if enough else inside).update(conversation.row_ids)
            tokens += sum(row.usable_tokens for row in self.known_turns(index).values())
        aside = (self._aside | beyond) & self.rows.keys() - inside
        kept = [row for row in self.rows.values() if row.id not in aside]
        if aside != self._aside:
            # Three renames: killed between any two, both files together still hold every row.
            self._rewrite("surplus.jsonl", aside | self._aside)
            self._rewrite("answers.jsonl", {row.id for row in kept})
            self._rewrite("surplus.jsonl", aside)
        return kept

    def _rewrite(self, name: str, ids: Set[str]) -> None:
        lines = [json_line(vars(row)) for row in self.rows.values() if row.id in ids]
        write_atomic(self.folder / name, lambda path: _write(path, lines))

    def _count(self, row: AnswerRow) -> None:
        self._tokens += row.usable_tokens
        self._ends[row.kept_apart] += 1

    def _check_usable(self) -> None:
        if not self._ends[""]:
            ends = "; ".join(f"{n} x {reason}" for reason, n in self._ends.most_common())
            raise UserError(
                f"none of {self._ends.total()} answers can be trained on: {ends}",
                expected="answers that end by themselves",
                where=self.folder / "answers.jsonl",
                next="where they are cut: raise max_new_tokens, or set train_on_cut to true; where "
                "the stop token is missing: check that the server serves this target",
            )

    def _check_share(self, least: int) -> None:
        """Raise when too many were refused, of at least ``least``."""
        refused = len(self._refused)
        asked = refused + len(self.rows) - self._given
        if asked >= least and refused > self._limit * asked:
            rows = [r for r in read_rejects(self.folder) if r["id"] in self._refused]
            reasons = Counter(row["reason"] for row in rows).most_common(3)
            raise UserError(
                f"{refused} of {asked} prompts were refused: "
                + "; ".join(f"{n} x {r}" for r, n in reasons)
                + (f"; the last: {rows[-1]['detail']}" if rows[-1]["detail"] else ""),
                expected=f"at most {self._limit:.0%} (parameter max_reject_share)",
                where=self.folder / "rejects.jsonl",
            )


def _append(file: BinaryIO, row: dict[str, Any]) -> None:
    file.write(json_line(row))
    file.flush()  # a killed process loses none; what a power cut may take, sync() bounds


def _write(path: Path, lines: list[bytes]) -> None:
    path.write_bytes(b"".join(lines))
