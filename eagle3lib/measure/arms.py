"""Run the arms: same flags, same prompts, one request at a time, alternating, warm.

Every request is one line of ``requests.jsonl`` when it is whole; a benchmark that was interrupted
asks for the rest. Two servers stay up side by side; only one is asked at a time.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.engine.client import Client
from eagle3lib.engine.launch import EngineConfig, EngineServer
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, write_json
from eagle3lib.lab.machine import free_cores
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.lab.phase_params import resolve
from eagle3lib.lab.run import Phase
from eagle3lib.measure.accounting import Counts, PairedTiming

PLAIN, REFERENCE, OWN = "engine alone", "reference drafter", "own drafter"


@dataclass(frozen=True)
class RequestRow:
    """One timed request. ``accepted`` and ``drafted`` are the engine's record, round by round."""

    arm: str
    set: str
    prompt: str
    repeat: int
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    finish_reason: str
    duration_s: float
    accepted: list[int] | None
    drafted: list[int] | None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.arm, self.prompt, self.repeat


def arms_of(cfg: BenchmarkParams, own: Path) -> dict[str, Path | None]:
    """Arms in their fixed order: engine alone, then a known-good drafter if one is named, then
    ours."""
    arms: dict[str, Path | None] = {PLAIN: None}
    if cfg.reference_drafter:
        folder = resolve(cfg.reference_drafter)
        if not (folder / "config.json").exists():
            raise UserError(
                "the reference drafter has no config.json",
                where=folder,
                next="set parameter reference_drafter to a drafter's folder",
            )
        arms[REFERENCE] = folder
    arms[OWN] = own
    return arms


def benchmark_prompts(phase: Phase, cfg: BenchmarkParams) -> list[AnswerRow]:
    """Held-out prompts of both sets, in the order of their ids."""
    rows = sorted(read_answers(phase.of("01_generate_data")), key=lambda r: r.id)
    chosen = []
    for name, count in (("workload", cfg.workload_prompts), ("general", cfg.general_prompts)):
        found = [r for r in rows if (r.set, r.split, r.repeat) == (name, "heldout", 0)]
        if len(found) < count:
            raise UserError(
                f"{count} held-out prompts of the {name} set are asked for, "
                f"{len(found)} were answered",
                where=phase.of("01_generate_data"),
                next=f"raise heldout_{name} of phase 01, or lower {name}_prompts",
            )
        chosen += found[:count]
    return chosen


def run_arms(
    phase: Phase,
    cfg: BenchmarkParams,
    arms: dict[str, Path | None],
    prompts: list[AnswerRow],
    target: Path,
) -> list[RequestRow]:
    """Ask every prompt of every arm ``repeats`` times; the order of arms turns with each prompt."""
    path = phase.folder / "requests.jsonl"
    done = {row.key: row for row in read_requests(phase.folder)}
    plan = [
        (arm, prompt, repeat)
        for repeat in range(cfg.repeats)
        for i, prompt in enumerate(prompts)
        for arm in _turned(list(arms), i + repeat)
    ]
    todo = [(a, p, r) for a, p, r in plan if (a, p.id, r) not in done]
    if not todo:
        return list(done.values())
    with ExitStack() as stack:
        clients = _start(stack, phase, cfg, arms, target)
        before = {arm: c.speculation_counters() for arm, c in clients.items()}
        try:
            with (
                path.open("a", encoding="utf-8") as file,
                phase.progress(len(plan), "requests", "benchmark", len(plan) - len(todo)) as bar,
            ):
                for arm, prompt, repeat in todo:
                    row = _ask(clients[arm], arm, prompt, repeat, cfg)
                    file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                    done[row.key] = row
                    bar.update(1)
        finally:  # an interrupted benchmark keeps the counts of what it asked
            _add_counters(phase.folder / "counters.json", before, clients)
    return list(done.values())


def _turned(arms: list[str], by: int) -> list[str]:
    by %= len(arms)
    return arms[by:] + arms[:by]


def _start(
    stack: ExitStack, phase: Phase, cfg: BenchmarkParams, arms: dict[str, Path | None], target: Path
) -> dict[str, Client]:
    """One server an arm, with the same number of threads, each warmed by two requests."""
    threads, clients, started = free_cores(), {}, {}
    for arm, drafter in arms.items():
        engine = EngineConfig(
            target,
            cfg.dtype,
            cfg.max_model_len,
            max_num_seqs=4,
            drafter=drafter,
            num_speculative_tokens=cfg.num_speculative_tokens,
            compile=cfg.compile,
            threads=threads,
        )
        log = phase.log_file(f"vllm-{arm.replace(' ', '-')}")
        server = stack.enter_context(EngineServer(engine, log=log, say=phase.note))
        clients[arm] = Client(server.url)
        started[arm] = {"threads": server.threads, "ready_after_s": server.ready_after_s}
    write_json(phase.folder / "servers.json", started)
    for client in clients.values():
        for text in ("Hello!", "Count to twenty."):
            client.chat([{"role": "user", "content": text}], max_tokens=24, temperature=0.0)
    return clients


def _ask(
    client: Client, arm: str, prompt: AnswerRow, repeat: int, cfg: BenchmarkParams
) -> RequestRow:
    # Tools and thinking as when the answer was made: other prompt tokens are another workload.
    answer = client.chat(
        prompt.messages,
        max_tokens=cfg.max_new_tokens,
        temperature=0.0,
        tools=prompt.tools,
        thinking=prompt.sampling.get("thinking", "default"),
    )
    return RequestRow(
        arm=arm,
        set=prompt.set,
        prompt=prompt.id,
        repeat=repeat,
        prompt_token_ids=answer.prompt_token_ids,
        answer_token_ids=answer.answer_token_ids,
        finish_reason=answer.finish_reason,
        duration_s=round(answer.duration_s, 5),
        accepted=answer.rounds.accepted if answer.rounds else None,
        drafted=answer.rounds.drafted if answer.rounds else None,
    )


def _add_counters(
    path: Path, before: dict[str, dict[str, float]], clients: dict[str, Client]
) -> None:
    """Differences of the engines' own counters, summed over the pieces of an interrupted
    benchmark."""
    summed = read_json(path) if path.exists() else {}
    for arm, client in clients.items():
        mine = summed.setdefault(arm, {})
        for name, value in client.speculation_counters().items():
            mine[name] = mine.get(name, 0.0) + value - before[arm].get(name, 0.0)
    write_json(path, summed)


def read_requests(folder: Path) -> list[RequestRow]:
    return [RequestRow(**row) for row in read_jsonl(folder / "requests.jsonl")]


def counts_of(rows: list[RequestRow], steps: int) -> Counts:
    """Pooled counts of requests that the engine gave a round record for."""
    counts = Counts()
    for row in rows:
        if row.accepted is not None and row.drafted is not None:
            counts.add(len(row.answer_token_ids), row.accepted, row.drafted, steps)
    return counts


def paired(rows: list[RequestRow], arm: str, set_name: str) -> list[PairedTiming]:
    """One entry a prompt: all its repeats in the plain arm and in ``arm``."""
    sums: dict[str, dict[str, list[float]]] = defaultdict(lambda: {PLAIN: [0, 0.0], arm: [0, 0.0]})
    for row in rows:
        if row.set == set_name and row.arm in (PLAIN, arm):
            tokens_seconds = sums[row.prompt][row.arm]
            tokens_seconds[0] += len(row.answer_token_ids)
            tokens_seconds[1] += row.duration_s
    return [
        PairedTiming(int(s[PLAIN][0]), s[PLAIN][1], int(s[arm][0]), s[arm][1])
        for s in sums.values()
    ]


def output_differences(rows: list[RequestRow], arm: str) -> pd.DataFrame:
    """Prompts whose answers differ between the plain arm and ``arm``, and where they part."""
    answers: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for row in rows:
        answers[row.prompt].setdefault(row.arm, row.answer_token_ids)
    out: list[dict[str, Any]] = []
    for prompt, by_arm in answers.items():
        plain, spec = by_arm[PLAIN], by_arm[arm]
        if plain != spec:
            at = next(
                (i for i, (a, b) in enumerate(zip(plain, spec, strict=False)) if a != b),
                min(len(plain), len(spec)),
            )
            out.append(
                {
                    "prompt": prompt,
                    "differs_at": at,
                    "plain": plain[at : at + 1],
                    "with_drafter": spec[at : at + 1],
                }
            )
    return pd.DataFrame(out, columns=["prompt", "differs_at", "plain", "with_drafter"])
