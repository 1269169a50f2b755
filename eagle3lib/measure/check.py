"""What makes a benchmark's numbers unusable, or less than they look."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from eagle3lib.data.rows import is_looping
from eagle3lib.engine.records import RoundCounts, check_record
from eagle3lib.lab.finding import Finding
from eagle3lib.measure.accounting import Counts, check_identity, check_speedup, pooled_speedup
from eagle3lib.measure.arms import PLAIN, RequestRow, at_point, counts_of, paired
from eagle3lib.measure.lossless import check_lossless
from eagle3lib.measure.outside import check_outside
from eagle3lib.measure.points import Point

_WHERE = "06_benchmark_serving"
_LOOPING_SHARE = 0.2
_DRIFT = 0.05
_UNEXPLAINED = 0.1
_PROMPTS_A_READER = 4  # fewer, and much of a block runs below its load
_LEAST_PROMPT_TOKENS = 400  # below it chance decides whether word pairs recur
_RECURRING_SHARE = 0.005
_SURE_ACCEPTED = 30  # as many by the greedy rate: a quarter as often, none by chance is 1 in 1,800


def check_benchmark(rows: list[RequestRow], metrics: dict[str, Any]) -> list[Finding]:
    """All checks. ``rows`` may be the headline's alone: points without rows are not judged."""
    findings: list[Finding] = []
    lines = metrics.get("points", metrics["arms"])
    for line in lines:
        here = _rows_at(rows, line, metrics)
        if line["arm"] != PLAIN and here:
            length = _length_at_less(line, lines)
            findings += _check_line(here, line, metrics["num_speculative_tokens"], length)
    findings += check_baseline(rows)
    findings += check_workload(rows)
    findings += check_drift(metrics.get("drift", []))
    findings += check_lossless(metrics.get("lossless", []))
    findings += check_sampled(rows, metrics["num_speculative_tokens"])
    findings += check_mended(rows, metrics.get("servers", {}))
    findings += check_outside(metrics.get("outside", []))
    return findings + _check_counters(metrics)


def _rows_at(
    rows: list[RequestRow], line: dict[str, Any], metrics: dict[str, Any]
) -> list[RequestRow]:
    steps = metrics["num_speculative_tokens"]
    point = Point(
        line.get("engine", "vllm"),
        line.get("compared_with_k", steps),
        line.get("concurrency", 1),
        line.get("temperature", 0.0),
        line.get("context_tokens", 0),
    )
    return at_point(rows, point, steps)


def _length_at_less(line: dict[str, Any], lines: list[dict[str, Any]]) -> float | None:
    """The acceptance length of the same point at the lowest load that tells it: greedily it is the
    same at any load, and an engine may tell rounds of lone requests only. None where it samples."""

    def but_for_load(other: dict[str, Any]) -> list[Any]:
        names = ("arm", "set", "engine", "compared_with_k", "temperature", "context_tokens")
        return [other.get(name) for name in names]

    known = [
        (other.get("concurrency", 1), told["acceptance_length"])
        for other in lines
        if but_for_load(other) == but_for_load(line) and not line.get("temperature")
        if (told := other.get("acceptance")) and told["acceptance_length"]
    ]
    return min(known)[1] if known else None


def _check_line(
    here: list[RequestRow], line: dict[str, Any], run_steps: int, elsewhere: float | None
) -> list[Finding]:
    """``elsewhere``: the acceptance length to hold a speed-up against where no round is known."""
    arm, name = line["arm"], line["set"]
    steps = line.get("compared_with_k", run_steps)
    mine = [r for r in here if (r.arm, r.set) == (arm, name)]
    if not mine:
        return []
    counts, findings = counts_of(mine, steps), []
    label = f"{_WHERE}: {arm}, {name}, {mine[0].point.label}"
    pairs = paired(here, arm, name)
    if not counts.rounds:
        judged = pairs and elsewhere is not None
        findings = check_speedup(pooled_speedup(pairs), elsewhere, label) if judged else []
        return [
            *findings,
            Finding(
                "no-round-record",
                "warning",
                f"nothing is known of the rounds of {arm} ({name})",
                "no record a request, and chunks tell rounds of lone requests only",
                "vLLM 0.32 or newer, SGLang with meta_info, or concurrency 1",
                label,
            ),
        ]
    findings += check_identity(counts, steps)
    for row in mine:
        if row.counts is not None:
            told = RoundCounts(**row.counts)
            findings += check_record(
                told, len(row.answer_token_ids), steps, f"{label}, {row.prompt}"
            )
    if pairs and counts.acceptance_length is not None:
        speedup = pooled_speedup(pairs)
        findings += check_speedup(speedup, counts.acceptance_length, label)
        if line.get("concurrency", 1) == 1:  # in flight together, they wait for others' prefills
            findings += _check_explained(line, counts.acceptance_length, label)
    if line.get("concurrency", 1) > 1 and len(pairs) < _PROMPTS_A_READER * line["concurrency"]:
        findings.append(_thin_load(len(pairs), line["concurrency"], label))
    return findings


def _check_explained(line: dict[str, Any], length: float, label: str) -> list[Finding]:
    """Acceptance length over the cost of a round, taken from the clock, must give the speed-up."""
    cost, speedup = line.get("round_cost_streamed"), line.get("speedup") or {}
    if not cost or not speedup.get("value"):
        return []
    expected = length / cost
    if abs(expected / speedup["value"] - 1) <= _UNEXPLAINED:
        return []
    return [
        Finding(
            "unexplained-speedup",
            "note",
            f"rounds explain a speed-up of {expected:.2f}, measured is {speedup['value']:.2f}",
            f"{length:.2f} tokens a round over {cost:.2f} plain steps a round, without the prefill",
            "the rest is the prefill and cut last rounds: longer answers show the rounds alone",
            label,
        )
    ]


def _thin_load(prompts: int, concurrency: int, label: str) -> Finding:
    return Finding(
        "thin-load",
        "note",
        f"{prompts} prompts for {concurrency} requests in flight",
        "towards its end a block runs below its load",
        f"{_PROMPTS_A_READER * concurrency} prompts or more (workload_prompts)",
        label,
    )


def check_baseline(rows: list[RequestRow]) -> list[Finding]:
    """Every drafter's point has the engine alone beside it: same engine, same K's servers, same
    load, same prompts. A baseline of another engine is none."""
    asked: dict[Point, dict[str, set[str]]] = {}
    for row in rows:
        asked.setdefault(row.point, {}).setdefault(row.arm, set()).add(row.prompt)
    findings = []
    for point, arms in asked.items():
        missing = {p for arm in arms for p in arms[arm]} - arms.get(PLAIN, set())
        if missing:
            findings.append(
                Finding(
                    "no-baseline",
                    "error",
                    f"{len(missing)} prompts have no request to the engine alone ({point.label})",
                    "a speed-up is taken from the same engine, flags, load and prompts",
                    "run phase 06 again: it asks for what is missing",
                    _WHERE,
                )
            )
    return findings


def check_workload(rows: list[RequestRow]) -> list[Finding]:
    """Looping answers are easy to draft, random prompts impossible: no measure of a drafter."""
    findings = []
    for name in dict.fromkeys(r.set for r in rows):
        plain = [r for r in rows if (r.set, r.arm) == (name, PLAIN)]
        share = sum(is_looping(r.answer_token_ids) for r in plain) / max(len(plain), 1)
        if share > _LOOPING_SHARE:
            findings.append(_no_measure(f"{share:.0%} of the answers loop ({name})"))
        if looks_random([r.prompt_token_ids for r in plain]):
            findings.append(_no_measure(f"the prompts are random tokens ({name})"))
    return findings


def _no_measure(found: str) -> Finding:
    return Finding(
        "no-measure-of-acceptance",
        "warning",
        found,
        "no measure of acceptance: drafters are for text that a target really reads and writes",
        "measure on prompts of your own; keep these for the cost of a round",
        _WHERE,
    )


def looks_random(prompts: list[list[int]]) -> bool:
    """Whether almost no pair of neighbouring tokens recurs, as it does in any language.

    Pairs that every prompt has are the template's and do not count. Too few tokens: no.
    """
    unique = list({tuple(p) for p in prompts})
    pairs = [set(pairwise(p)) for p in unique]
    if len(unique) < 2:
        return False
    common = set.intersection(*pairs)
    seen: dict[tuple[int, int], int] = {}
    for ids in unique:
        for pair in pairwise(ids):
            if pair not in common:
                seen[pair] = seen.get(pair, 0) + 1
    total = sum(seen.values())
    recurring = sum(n for n in seen.values() if n > 1)
    return total >= _LEAST_PROMPT_TOKENS and recurring / total < _RECURRING_SHARE


def check_drift(drift: list[dict[str, Any]]) -> list[Finding]:
    """In A-B-A blocks a change of the baseline is as large as the error it brings; side by side
    the turns even it out."""
    return [
        Finding(
            "drift",
            "warning" if line["blocks"] else "note",
            f"the engine alone changed by {line['change']:+.1%} meanwhile ({line['point']})",
            f"{line['first_tokens_per_s']} tok/s at first, {line['last_tokens_per_s']} at last",
            "differences below it say nothing; leave the machine to the benchmark"
            if line["blocks"]
            else "arms take turns, so it meets all alike; leave the machine to the benchmark",
            _WHERE,
        )
        for line in drift
        if abs(line["change"]) > _DRIFT
    ]


def check_sampled(rows: list[RequestRow], run_steps: int) -> list[Finding]:
    """A drafter that the engine accepts greedily is not right never where it samples: then the
    engine's way of accepting is broken, not the drafter. Needs a temperature of 0 among them."""
    by_arm: dict[tuple[str, str, int], list[RequestRow]] = {}
    for row in rows:
        if row.arm != PLAIN:
            by_arm.setdefault((row.arm, row.engine, row.steps or run_steps), []).append(row)
    findings = []
    for (arm, engine, steps), mine in by_arm.items():
        greedy = counts_of([r for r in mine if not r.temperature], steps)
        for heat in sorted({r.temperature for r in mine} - {0.0}):
            sampled = counts_of([r for r in mine if r.temperature == heat], steps)
            expected = sampled.rounds * greedy.accepted / greedy.rounds if greedy.rounds else 0
            if not sampled.accepted and expected >= _SURE_ACCEPTED:
                findings.append(_never_accepted(arm, engine, heat, sampled, greedy))
    return findings


def _never_accepted(arm: str, engine: str, heat: float, sampled: Counts, greedy: Counts) -> Finding:
    return Finding(
        "sampling-accepts-nothing",
        "warning",
        f"{engine} accepts no draft of {arm} at temperature {heat:g}, and does at 0",
        f"{sampled.rounds} rounds at {heat:g}: acceptance length exactly 1; {greedy.rounds} at 0: "
        f"{greedy.acceptance_length:.2f}",
        "a fault of the engine's sampler, not of the drafter: serve greedily or without a drafter; "
        "vLLM on a CPU: unset VLLM_PLUGINS, so that eagle3 mends it (docs/serving.md)",
        f"{_WHERE}: {arm}, {engine}, T={heat:g}",
    )


def check_mended(rows: list[RequestRow], servers: dict[str, Any]) -> list[Finding]:
    """Figures above temperature 0 are of an engine that we mended: another start of it has none of
    them."""
    mended = sorted(name for name, told in servers.items() if told.get("mended"))
    if not mended or not any(r.temperature for r in rows):
        return []
    return [
        Finding(
            "sampling-mended",
            "note",
            "above temperature 0 these are figures of vLLM as eagle3 mended it",
            f"{mended[0]}: its log says so; as it comes, it reads temperatures that nobody wrote",
            "started by anybody else on a CPU: greedy, or no drafter (vLLM issue 55005)",
            _WHERE,
        )
    ]


def _check_counters(metrics: dict[str, Any]) -> list[Finding]:
    """The servers' counters and the per-request records tell of the same rounds."""
    findings = []
    for name, counters in metrics["counters"].items():
        told = metrics["counted"].get(name)
        if not counters.get("drafts") or told is None:
            continue
        if (counters["drafts"], counters.get("accepted_tokens")) != tuple(told):
            findings.append(
                Finding(
                    "counters-differ",
                    "warning",
                    f"{name}: the server counted {counters['drafts']:.0f} rounds and "
                    f"{counters.get('accepted_tokens', 0):.0f} accepted drafts, its answers "
                    f"{told[0]} and {told[1]}",
                    "the same numbers",
                    "another client used the server, or the benchmark was killed on its way",
                    _WHERE,
                )
            )
    return findings


def counted(rows: list[RequestRow], headline: Point) -> dict[str, list[int]]:
    """Rounds and accepted drafts of all requests to a server, by its key in counters.json."""
    by_server: dict[str, list[RequestRow]] = {}
    for row in rows:
        name = server_name(row.arm, row.engine, row.steps or headline.steps, headline)
        by_server.setdefault(name, []).append(row)
    pooled = {n: counts_of(mine, mine[0].steps or headline.steps) for n, mine in by_server.items()}
    return {name: [counts.rounds, counts.accepted] for name, counts in pooled.items()}


def server_name(arm: str, engine: str, steps: int, headline: Point) -> str:
    """The arm, with engine and K where they are not the headline's."""
    same = (engine, steps) == (headline.engine, headline.steps)
    return arm if same else f"{arm} ({engine}, K={steps})"
