"""A second opinion on the headline: the same servers and prompts under ``vllm bench serve``.

Its client, its clock and the server's own counters, in our schema (``ArmResult``) beside ours over
the same prompts. It can ask prompts of one user message of text; one pass of each arm after the
other, so a machine's drift is in it: a check of our figures, not a second measurement as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eagle3lib.data.rows import AnswerRow
from eagle3lib.engine.bench_serve import BenchServe
from eagle3lib.engine.records import RoundCounts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding
from eagle3lib.measure.accounting import (
    Counts,
    PairedTiming,
    Speedup,
    check_identity,
    check_speedup,
    pooled_speedup,
    round_cost,
)
from eagle3lib.measure.arms import PLAIN, RequestRow
from eagle3lib.measure.points import Point
from eagle3lib.measure.result import (
    ArmResult,
    arm_result,
    cost_per_million,
    percentiles,
    rounded,
    throughput_of,
)

OUTSIDE = "outside.jsonl"
OURS, BENCH_SERVE = "ours", "vllm bench serve"
_SET = "workload"
_WHERE = "06_benchmark_serving: vllm bench serve"
_SPEEDS_APART, _LENGTHS_APART = 0.15, 0.02


def outside_prompts(prompts: Sequence[AnswerRow]) -> list[AnswerRow]:
    """The workload's prompts that it can ask. Raises ``UserError`` where there is none."""
    found = [
        p
        for p in prompts
        if p.set == _SET
        and [m["role"] for m in p.messages] == ["user"]
        and isinstance(p.messages[0]["content"], str)
        and not p.tools
        and p.sampling.get("thinking", "default") == "default"
    ]
    if not found:
        raise UserError(
            "no prompt of the workload is one that vllm bench serve can ask",
            expected="one user message of text, without tools",
            next="bench_serve=false",
        )
    return found


def outside_line(
    arm: str, point: Point, prompts: Sequence[AnswerRow], told: BenchServe
) -> dict[str, Any]:
    """One line of ``outside.jsonl``."""
    return {"arm": arm, "point": asdict(point), "prompts": [p.id for p in prompts], **asdict(told)}


def outside_results(
    lines: Sequence[dict[str, Any]], rows: list[RequestRow], point: Point, price_per_hour: float
) -> list[dict[str, Any]]:
    """For each arm that was asked from outside: our result and the other one, with ``client``.

    ``lines``: of ``outside.jsonl``; ``rows``: ours at ``point``. A line of another point is passed
    over; of two the later counts.
    """
    by_arm = {line["arm"]: line for line in lines if line["point"] == asdict(point)}
    out = []
    for arm, line in by_arm.items():
        asked = set(line["prompts"])
        mine = [r for r in rows if r.prompt in asked]
        if not any(r.arm == arm for r in mine):
            continue
        ours = _ours(rows, mine, arm, point, price_per_hour)
        theirs = _result(line, by_arm.get(PLAIN), point, price_per_hour).as_dict()
        known = {r.prompt: len(r.prompt_token_ids) for r in mine}
        pairs = zip(line["prompts"], line["prompt_tokens"], strict=True)
        others = sum(known.get(p, n) != n for p, n in pairs)
        out += [ours | {"client": OURS}]
        out += [theirs | {"client": BENCH_SERVE, "other_prompts": others}]
    return out


def _ours(
    rows: list[RequestRow], mine: list[RequestRow], arm: str, point: Point, price_per_hour: float
) -> dict[str, Any]:
    """``mine``: the ``rows`` of prompts that both clients asked. Several in flight, the others had
    their part of the machine: its speed is that of the whole block."""
    ours = arm_result(mine, arm, _SET, point, price_per_hour).as_dict()
    if point.concurrency == 1:
        return ours
    whole = throughput_of([r for r in rows if r.arm == arm], point.concurrency)
    return ours | {
        "throughput_tokens_per_s": round(whole, 2),
        "cost_per_million_tokens": cost_per_million(price_per_hour, whole),
    }


def _result(
    line: dict[str, Any], plain: dict[str, Any] | None, point: Point, price_per_hour: float
) -> ArmResult:
    tokens, seconds = sum(line["answer_tokens"]), sum(line["latency_s"])
    throughput = tokens / line["seconds"]
    result = ArmResult(
        arm=line["arm"],
        set=_SET,
        engine=point.engine,
        num_speculative_tokens=0 if line["arm"] == PLAIN else point.steps,
        compared_with_k=point.steps,
        concurrency=point.concurrency,
        temperature=point.temperature,
        context_tokens=point.context_tokens,
        requests=len(line["prompts"]),
        prompt_tokens=sum(line["prompt_tokens"]),
        tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(tokens / seconds, 2),
        throughput_tokens_per_s=round(throughput, 2),
        repeat_tokens_per_s=[round(tokens / seconds, 2)],
        latency_s=percentiles(line["latency_s"]) or {},
        first_token_s=percentiles(line["first_token_s"]),
        inter_token_s=None,  # it keeps no chunk's number of tokens
        inter_chunk_s=percentiles([w for waits in line["wait_s"] for w in waits]),
        cost_per_million_tokens=cost_per_million(price_per_hour, throughput),
    )
    return result if line["arm"] == PLAIN else _with_speculation(result, line, plain)


def _with_speculation(
    result: ArmResult, line: dict[str, Any], plain: dict[str, Any] | None
) -> ArmResult:
    told: dict[str, Any] = asdict(result)
    counts = _counts(line)
    length = counts.acceptance_length if counts else None
    told["acceptance"] = counts.as_dict() if counts else None
    if plain is not None and plain["prompts"] == line["prompts"]:
        columns = (plain["answer_tokens"], plain["latency_s"], line["answer_tokens"])
        pairs = [PairedTiming(*p) for p in zip(*columns, line["latency_s"], strict=True)]
        speed = pooled_speedup(pairs)
        told["speedup"] = {
            "value": round(speed.value, 4),
            "low": rounded(speed.low),
            "high": rounded(speed.high),
        }
        told["round_cost"] = round(round_cost(length, speed.value), 4) if length else None
    return ArmResult(**told)


def _counts(line: dict[str, Any]) -> Counts | None:
    if line["counts"] is None:
        return None
    told = RoundCounts(**line["counts"])
    return Counts(
        requests=len(line["prompts"]),
        tokens=sum(line["answer_tokens"]),
        rounds=told.rounds,
        drafted=told.drafted or 0,
        accepted=told.accepted,
        accepted_at=told.accepted_at or [],
    )


def check_outside(results: Sequence[dict[str, Any]]) -> list[Finding]:
    """Do the two clients tell the same? ``results`` as of ``outside_results``."""
    findings: list[Finding] = []
    for ours, theirs in zip(results[::2], results[1::2], strict=True):
        label = f"{_WHERE}, {theirs['arm']}"
        if theirs["other_prompts"]:
            findings.append(_other_prompts(theirs, label))
            continue
        findings += _check_speeds(ours, theirs, label)
        if theirs.get("acceptance"):
            findings += _check_rounds(ours, theirs, label)
    return findings


def _other_prompts(theirs: dict[str, Any], where: str) -> Finding:
    return Finding(
        "outside-other-prompts",
        "error",
        f"{theirs['other_prompts']} of {theirs['requests']} prompts had another number of tokens",
        "the server counted other prompt tokens for vllm bench serve than for us",
        "a chat template that renders text in parts otherwise: bench_serve=false",
        where,
    )


def _check_speeds(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> list[Finding]:
    name = "tokens_per_s" if ours["concurrency"] == 1 else "throughput_tokens_per_s"
    ratio = ours[name] / theirs[name]
    if abs(ratio - 1) <= _SPEEDS_APART:
        return []
    return [
        Finding(
            "outside-speed",
            "warning",
            f"{ours['arm']}: {ours[name]} tok/s by us, {theirs[name]} by vllm bench serve",
            f"they are {abs(ratio - 1):.0%} apart, {_SPEEDS_APART:.0%} or less is expected",
            "leave the machine to the benchmark (the second opinion is one later pass); if it "
            "stays, one of the clients holds the server back",
            where,
        )
    ]


def _check_rounds(ours: dict[str, Any], theirs: dict[str, Any], where: str) -> list[Finding]:
    told = theirs["acceptance"]
    names = ("requests", "tokens", "rounds", "drafted", "accepted", "accepted_at")
    found = check_identity(Counts(**{n: told[n] for n in names}), theirs["compared_with_k"])
    length, speed = told["acceptance_length"], theirs.get("speedup")
    if speed and length:
        rates = (0.0, theirs["tokens_per_s"], speed["value"], speed["low"], speed["high"])
        found += check_speedup(Speedup(*rates), length, where)
    our_length = (ours.get("acceptance") or {}).get("acceptance_length")
    if ours["temperature"] or not our_length or not length:
        return found
    if abs(our_length / length - 1) > _LENGTHS_APART:
        found.append(
            Finding(
                "outside-acceptance",
                "warning",
                f"acceptance length {our_length:.3f} by us, {length:.3f} by vllm bench serve",
                "greedy answers to the same prompts: only near-ties of bfloat16 may differ",
                "dtype=float32, where both must be equal, tells a tie from a fault",
                where,
            )
        )
    return found
