"""Run the arms: same flags, same prompts, streamed, warm, each against the engine alone.

Per engine and K the servers start in the order of the gates. Side by side they stay up together
and only one is asked at a time: request by request in turns, or, with several requests in flight,
in blocks of all prompts in turns. Where two servers don't fit, the arms take turns as A-B-A: the
engine alone, each drafter, the engine alone again; what it changed meanwhile is the drift.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.engine.bench_serve import bench_serve
from eagle3lib.engine.client import BadReply
from eagle3lib.engine.failures import EngineFailure
from eagle3lib.engine.health import LoadWatch
from eagle3lib.engine.launch import EngineServer
from eagle3lib.engine.records import BrokenRecord
from eagle3lib.engine.vllm_sampling import MENDED
from eagle3lib.lab.files import read_json, read_jsonl, write_json
from eagle3lib.lab.finding import raise_errors
from eagle3lib.lab.machine import free_cores
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.run import Phase
from eagle3lib.measure.arms import (
    OWN,
    PLAIN,
    REFERENCE,
    REQUESTS,
    SAMPLES,
    SWEEPS,
    RequestRow,
    read_requests,
    read_sweeps,
)
from eagle3lib.measure.ask import Asker, engine_config
from eagle3lib.measure.check import server_name
from eagle3lib.measure.gates import Gate, check_gates, judge, what_it_proves
from eagle3lib.measure.order import Task, Visit, blocks_of, visits_of
from eagle3lib.measure.outside import OUTSIDE, outside_line, outside_prompts
from eagle3lib.measure.points import Point, groups_of, points_of

LOOK_EVERY_S = 10.0  # without an answer for so long, look whether the server makes tokens
STALL_S = 180.0
SAMPLE_TOKENS = 8  # of each sample: the first comes from the prefill, the rest from rounds
_GATE_TOKENS = 24
_GATE_PROMPTS, _JUDGED_PROMPTS = 2, 8  # the latter where an acceptance length is demanded
_SAMPLES_IN_FLIGHT = 4


@dataclass
class _Book:
    """What was asked so far: rows by key, one line a request on disk as it becomes whole."""

    folder: Path
    headline: Point
    rows: dict[tuple[Point, str, str, int], RequestRow]
    bar: Callable[[int], None] = lambda n: None

    def add(self, row: RequestRow) -> None:
        self.rows[row.key] = row
        append_line(self.folder / (REQUESTS if row.point == self.headline else SWEEPS), asdict(row))
        self.bar(1)


def append_line(path: Path, line: dict[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def run_arms(
    phase: Phase,
    cfg: BenchmarkParams,
    arms: dict[str, Path | None],
    prompts: list[AnswerRow],
    target: Path,
) -> list[RequestRow]:
    """Ask every prompt of every arm ``repeats`` times at every point; resumes.

    Returns the rows of all points. Raises ``UserError`` when a gate failed, after the other
    engines were measured; what was measured stays.
    """
    points = points_of(cfg)
    if cfg.bench_serve:
        outside_prompts(prompts)  # that there is none must be said now, not when all is measured
    known = [*read_requests(phase.folder), *read_sweeps(phase.folder)]
    book = _Book(phase.folder, points[0], {row.key: row for row in known})
    total = len(points) * len(arms) * len(prompts) * cfg.repeats
    texts = other_texts(phase, prompts) if any(p.context_tokens for p in points) else []
    gates: list[Gate] = []
    with phase.progress(total, "requests", "benchmark", min(len(book.rows), total)) as bar:
        book.bar = bar.update
        for engine, steps, group in groups_of(points):
            asker = Asker(cfg, target, engine, steps, texts)
            if any(not g.passed and g.engine == engine for g in gates):
                continue
            for visit in visits_of(cfg, list(arms)):
                run = _Visit(phase, cfg, arms, prompts, asker, group, visit, book, gates)
                if not (run.todo() or run.samples_left() or run.outside_left()):
                    continue
                run.measure()
                if not all(g.passed for g in gates if g.engine == engine):
                    break
    if gates or not (phase.folder / "gates.json").exists():
        write_json(phase.folder / "gates.json", [g.as_dict() for g in gates])
    raise_errors(check_gates(gates))
    wanted = set(points)
    return [row for row in book.rows.values() if row.point in wanted]


def other_texts(phase: Phase, prompts: list[AnswerRow]) -> list[tuple[str, int]]:
    """(text, tokens) of answers to other prompts than those measured, to fill contexts with."""
    asked = {p.id for p in prompts}
    rows = read_answers(phase.of("01_generate_data"))
    return [(r.text, len(r.answer_token_ids)) for r in rows if r.id not in asked and r.text.strip()]


@dataclass
class _Visit:
    phase: Phase
    cfg: BenchmarkParams
    arms: dict[str, Path | None]
    prompts: list[AnswerRow]
    asker: Asker
    points: list[Point]
    visit: Visit
    book: _Book
    gates: list[Gate]
    servers: dict[str, EngineServer] = field(default_factory=dict)

    def todo(self) -> list[tuple[Point, list[Task]]]:
        """Blocks with something left. One that is in flight as a whole is asked again as a
        whole: half a block has another load."""
        out = []
        for point in self.points:
            for block in blocks_of(self.visit.repeats, self.prompts, point.concurrency):
                left = [t for t in block if (point, t[0], t[1].id, t[2]) not in self.book.rows]
                if left:
                    out.append((point, left if point.concurrency == 1 else block))
        return out

    def measure(self) -> None:
        """Start the visit's servers through their gates, then ask what is left."""
        with ExitStack() as stack:
            if not self._start(stack):
                return
            warm = {(arm, 1, False) for arm in self.servers}
            for point, block in self.todo():
                for arm in {arm for arm, _, _ in block}:
                    key = (arm, point.concurrency, point.temperature > 0)
                    if key not in warm:
                        self._warm(arm, point)
                        warm.add(key)
                before = {arm: self._counters(arm) for arm in self.servers}
                try:
                    self._ask_block(point, block)
                finally:  # an interrupted benchmark keeps the counts of what it asked
                    self._add_counters(before)
            self._sample()
            self._ask_outside()
            for arm, server in self.servers.items():  # its log says by now what was mended
                self._note_server(arm, server)

    def _start(self, stack: ExitStack) -> bool:
        """One server an arm with the same number of threads, through its gate, which warms it."""
        threads, plain = free_cores(), []
        for arm in self.visit.repeats:
            drafter = self.arms[arm]
            config = engine_config(
                self.cfg, self.asker.target, self.asker.engine, self.asker.steps, drafter, threads
            )
            name = f"{config.engine}-K{config.num_speculative_tokens}-{arm.replace(' ', '-')}"
            log = self.phase.log_file(f"{name}-{self.visit.number}")
            server = EngineServer(config, log=log, say=self.phase.note)
            try:
                self.servers[arm] = stack.enter_context(server)
                self._note_server(arm, server)
                count = _JUDGED_PROMPTS if self._least(arm) > 1 else _GATE_PROMPTS
                most = self.prompts[: max(count, _GATE_PROMPTS)]
                asked = [
                    self.asker.ask(server, p, Point(config.engine), _GATE_TOKENS) for p in most
                ]
            except (EngineFailure, BadReply, BrokenRecord) as error:
                proof = what_it_proves(config.engine, arm, self._passed(REFERENCE))
                self._tell(Gate(config.engine, arm, False, str(error).split("\n")[0], proof))
                return False
            if arm == PLAIN:
                # More of the baseline's answers only where a later gate compares them.
                plain = asked
            elif len(plain) < len(asked) and PLAIN in self.servers:
                plain = [
                    self.asker.ask(self.servers[PLAIN], p, Point(config.engine), _GATE_TOKENS)
                    for p in most
                ]
            gate = judge(
                config.engine,
                arm,
                asked,
                plain[: len(asked)] if plain else asked,
                least_length=self._least(arm),
                exact=self.cfg.dtype == "float32" and bool(plain),
                reference_passed=self._passed(REFERENCE),
            )
            self._tell(gate)
            if not gate.passed:
                return False
        return True

    def _least(self, arm: str) -> float:
        demands = {
            REFERENCE: self.cfg.reference_acceptance_length,
            OWN: self.cfg.own_acceptance_length,
        }
        return demands.get(arm, 1.0)

    def _passed(self, arm: str) -> bool:
        mine = [g for g in self.gates if (g.engine, g.arm) == (self.asker.engine, arm)]
        return bool(mine) and mine[-1].passed

    def _tell(self, gate: Gate) -> None:
        self.gates.append(gate)
        said = "passed" if gate.passed else f"failed; it proves: {gate.proves}"
        self.phase.note(f"gate {gate.arm} on {gate.engine}: {said} ({gate.evidence})")

    def _warm(self, arm: str, point: Point) -> None:
        """As many short requests at once as the block will have, sampled as it will be: graphs and
        caches of that size, and kernels compiled at first use (SGLang's sampling: two minutes)."""
        load = point.concurrency
        picked = [self.prompts[i % len(self.prompts)] for i in range(load)]
        with ThreadPoolExecutor(load) as pool:
            list(
                pool.map(
                    lambda p: self.asker.ask(self.servers[arm], p, point, _GATE_TOKENS), picked
                )
            )

    def _ask_block(self, point: Point, block: list[Task]) -> None:
        def ask(task: Task) -> RequestRow:
            arm, prompt, repeat = task
            server = self.servers[arm]
            return self.asker.row(server, arm, prompt, point, repeat, self.visit.number)

        self._work(block, ask, self.book.add, point.concurrency)

    def samples_left(self) -> list[tuple[str, float, int]]:
        """(arm, temperature, seed) of samples that are not there yet: the first tokens of one
        prompt, each with a seed of its own."""
        wanted: list[tuple[str, float, int]] = []
        for heat in dict.fromkeys(p.temperature for p in self.points if p.temperature > 0):
            for arm in self.visit.repeats:
                # The arms' seeds are apart: equal ones would make the samples depend on each other.
                first = list(self.arms).index(arm) * self.cfg.lossless_samples
                wanted += [(arm, heat, first + i) for i in range(self.cfg.lossless_samples)]
        here = (self.asker.engine, self.asker.steps)
        told = read_jsonl(self.phase.folder / SAMPLES) if wanted else []
        done = {
            (r["arm"], r["temperature"], r["seed"])
            for r in told
            if (r["engine"], r["steps"]) == here
        }
        return [task for task in wanted if task not in done]

    def _sample(self) -> None:
        def ask(task: tuple[str, float, int]) -> dict[str, object]:
            arm, heat, seed = task
            point = Point(self.asker.engine, self.asker.steps, temperature=heat)
            prompt, server = self.prompts[0], self.servers[arm]
            streamed = self.asker.ask(server, prompt, point, SAMPLE_TOKENS, seed=seed)
            return {
                "engine": point.engine,
                "steps": point.steps,
                "temperature": heat,
                "arm": arm,
                "seed": seed,
                "token_ids": streamed.answer.answer_token_ids,
            }

        path = self.phase.folder / SAMPLES
        tasks = self.samples_left()
        self._work(tasks, ask, lambda row: append_line(path, row), _SAMPLES_IN_FLIGHT)

    def outside_left(self) -> list[str]:
        """Arms of the headline that ``vllm bench serve`` has not asked these prompts of."""
        head = self.book.headline
        if not self.cfg.bench_serve or head not in self.points:
            return []
        wanted = [p.id for p in outside_prompts(self.prompts)]
        done = {
            line["arm"]
            for line in read_jsonl(self.phase.folder / OUTSIDE)
            if line["point"] == asdict(head) and line["prompts"] == wanted
        }
        return [arm for arm in self.visit.repeats if arm not in done]

    def _ask_outside(self) -> None:
        head = self.book.headline

        def ask(task: tuple[str]) -> dict[str, Any]:
            (arm,) = task
            self.phase.note(f"{arm}: vllm bench serve asks the headline's prompts")
            asked, server = outside_prompts(self.prompts), self.servers[arm]
            told = bench_serve(
                [p.messages[0]["content"] for p in asked],
                server.url,
                server.config,
                tokens=self.cfg.max_new_tokens,
                concurrency=head.concurrency,
                temperature=head.temperature,
            )
            return outside_line(arm, head, asked, told)

        path = self.phase.folder / OUTSIDE
        self._work(
            [(a,) for a in self.outside_left()], ask, lambda line: append_line(path, line), 1
        )

    def _work(
        self, tasks: list[Any], ask: Callable[[Any], Any], keep: Callable[[Any], None], load: int
    ) -> None:
        """Ask with ``load`` in flight; a server that stops making tokens ends it, not patience.

        One at a time, an answer is on disk before the next is asked. More at once never wait for
        the disk: a line takes some 20 ms to be safe, and the load would not be what it is called.
        """
        waiting = list(reversed(tasks))
        handed_out = 1 if load == 1 else len(waiting)
        pool = ThreadPoolExecutor(load)
        running: dict[Future[Any], str] = {}
        watches = {arm: LoadWatch(s.url, STALL_S) for arm, s in self.servers.items()}
        try:
            while waiting or running:
                while waiting and len(running) < handed_out:
                    task = waiting.pop()
                    running[pool.submit(ask, task)] = task[0]
                done, _ = wait(running, timeout=LOOK_EVERY_S, return_when=FIRST_COMPLETED)
                for future in done:
                    running.pop(future)
                    keep(future.result())
                for arm in set(running.values()) if not done else ():
                    self._check_stall(arm, watches[arm])
        finally:  # what is in flight ends with its server
            pool.shutdown(wait=False, cancel_futures=True)

    def _check_stall(self, arm: str, watch: LoadWatch) -> None:
        for finding in watch.check():
            server = self.servers[arm]
            raise server.mute(finding.evidence).error(expected="tokens", where=server.log)

    def _counters(self, arm: str) -> dict[str, float]:
        return self.asker.counters(self.servers[arm])

    def _add_counters(self, before: dict[str, dict[str, float]]) -> None:
        """Differences of the engines' own counters, summed over blocks and pieces of a run."""
        path = self.phase.folder / "counters.json"
        summed = read_json(path) if path.exists() else {}
        for arm in self.servers:
            mine = summed.setdefault(self._name(arm), {})
            for name, value in self._counters(arm).items():
                mine[name] = mine.get(name, 0.0) + value - before[arm].get(name, 0.0)
        write_json(path, summed)

    def _note_server(self, arm: str, server: EngineServer) -> None:
        path = self.phase.folder / "servers.json"
        told = read_json(path) if path.exists() else {}
        told[self._name(arm)] = {
            "threads": server.threads,
            "ready_after_s": server.ready_after_s,
            "version": server.version,
            "mended": MENDED in server.log.read_text(encoding="utf-8", errors="replace")
            if server.log.exists()
            else False,
            "at": round(time.time()),
        }
        write_json(path, told)

    def _name(self, arm: str) -> str:
        return server_name(arm, self.asker.engine, self.asker.steps, self.book.headline)
