"""Question 1: is it measured right? One small function a cause; each looks at counts alone."""

from __future__ import annotations

import math
from typing import Any

from eagle3lib.data.rows import is_looping
from eagle3lib.diagnose.cause import Cause, bars, rows_of
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.material import Material
from eagle3lib.diagnose.told import mean_length, pooled_length, told_rounds
from eagle3lib.measure.accounting import check_identity
from eagle3lib.measure.arms import PLAIN, RequestRow, counts_of

_WHERE = "06_benchmark_serving"
_AGAIN = "eagle3 run PROFILE 06"
_MANY = 0.3  # share of the requests from which the workload itself is at fault
# A model that knows the language gives a token of a sensible prompt a few nats; random ids cost
# about ln(vocabulary) and more.
_RANDOM_SHARE_OF_LOG_VOCAB = 0.75


def measured(e: Evidence) -> list[Cause]:
    return [
        *drafted_per_round(e.material),
        *counters(e.material),
        *reported_length(e.material),
        *identity(e.material),
        *looping(e.material),
        *temperature(e.material),
        *random_prompts(e),
        *client_template(e.material),
        *arms(e.material),
        *trained_prompts(e.material),
    ]


def _cause(code: str, severity: Any, title: str, evidence: str, remedy: str, **more: Any) -> Cause:
    more.setdefault("command", _AGAIN)
    return Cause(code, severity, title, evidence, remedy, _WHERE, question=1, **more)


def drafted_per_round(m: Material) -> list[Cause]:
    """K of the record against K of the benchmark; SGLang's draft tokens count the root."""
    drafted = [n for r in m.own_rows for n in r.drafted or []]
    if not drafted or not m.steps:
        return []
    commonest = max(set(drafted), key=drafted.count)
    if commonest == m.steps:
        return []
    off = " (SGLang's draft tokens count the root: 4 there are K = 3)"
    return [
        _cause(
            "k-mistranslated", "error",
            f"the engine drafts {commonest} tokens a round, {m.steps} were asked for",
            f"{drafted.count(commonest)} of {len(drafted)} rounds" + off,
            f"give the engine K = {m.steps}: --speculative-num-steps {m.steps} "
            f"--speculative-num-draft-tokens {m.steps + 1} in SGLang",
            experiment="the engine's own record of drafted tokens, round by round",
        )
    ]  # fmt: skip


def counters(m: Material) -> list[Cause]:
    """The server's counters beside the sum of the per-request records."""
    found = []
    for arm, counted in (m.benchmark.get("counters") or {}).items():
        drafts = counted.get("drafts") if counted else None
        rounds = sum(told_rounds(r)[0] for r in m.requests if r.arm == arm)
        if drafts is None or not rounds or drafts == rounds:
            continue
        found.append(
            _cause(
                "counters-cumulative", "error" if drafts > rounds else "warning",
                f"{arm}: the server counted {drafts:.0f} rounds, its answers {rounds}",
                "counters grow since the server's start and count every client",
                "take differences around the benchmark, on a server that nobody else uses",
                experiment="both counts of the same requests, side by side",
                series=bars(
                    "Rounds of the same requests", "rounds",
                    {"the server's counters": drafts, "its answers": float(rounds)},
                ),
            )
        )  # fmt: skip
    return found


def reported_length(m: Material) -> list[Cause]:
    """The acceptance length that was reported against the one that the records give."""
    for line in m.benchmark.get("arms", []):
        if line["arm"] == PLAIN or not line.get("acceptance"):
            continue
        rows = [r for r in m.requests if (r.arm, r.set) == (line["arm"], line["set"])]
        said, pooled, mean = (
            line["acceptance"]["acceptance_length"], pooled_length(rows), mean_length(rows),
        )  # fmt: skip
        if said is None or pooled is None or mean is None or abs(said - pooled) < 0.002:
            continue
        numbers = f"reported {said:.3f}; pooled {pooled:.3f}, mean of requests {mean:.3f}"
        if abs(said - (pooled - 1)) < 0.002:
            code, title = "length-without-own-token", "the length leaves out the target's own token"
        elif abs(said - mean) < 0.002:
            code, title = "mean-not-pooled", "the length is a mean of the requests' own lengths"
        else:
            code, title = "length-differs", "the reported length does not follow from the records"
        return [
            _cause(
                code, "error", title, numbers,
                "report 1 + accepted / rounds, summed over all requests and divided once",
                cost=abs(said - pooled), proof="shown",
                experiment="the length computed again from the per-request records",
                series=bars(
                    "Acceptance length of one record", "tokens a round",
                    {"reported": said, "pooled": pooled, "mean of requests": mean},
                ),
            )
        ]  # fmt: skip
    return []


def identity(m: Material) -> list[Cause]:
    """tokens = requests + rounds + accepted - cut, with 0 <= cut <= K a request, for each one."""
    rows = [r for r in m.own_rows if r.accepted is not None]
    widths = [n for r in rows for told in (r.drafted, r.accepted) for n in told or []]
    steps = max([m.steps or 0, *widths])
    broken = [r for r in rows if check_identity(counts_of([r], steps), steps)]
    if not broken:
        return []
    r = broken[0]
    rounds, accepted = told_rounds(r)
    return [
        _cause(
            "accounting", "error",
            f"tokens don't follow from rounds in {len(broken)} of {len(m.own_rows)} requests",
            f"request {r.prompt}: {len(r.answer_token_ids)} tokens, {rounds} rounds, "
            f"{accepted} accepted",
            "the record is not whole, or of another request: update the adapter to the engine",
            proof="shown", experiment="tokens = 1 + rounds + accepted - cut, request by request",
            rows=rows_of("prompt", ((x.prompt, f"{len(x.answer_token_ids)} tokens, "
                         f"{len(x.accepted or [])} rounds, {sum(x.accepted or [])} accepted")
                         for x in broken)),
        )
    ]  # fmt: skip


def looping(m: Material) -> list[Cause]:
    rows = m.own_rows
    loops = [r for r in rows if is_looping(r.answer_token_ids)]
    if not rows or len(loops) / len(rows) < _MANY:
        return []
    rest = pooled_length([r for r in rows if not is_looping(r.answer_token_ids)])
    return [
        _cause(
            "looping-workload", "warning",
            f"{len(loops)} of {len(rows)} benchmark answers repeat themselves",
            f"acceptance length {pooled_length(loops) or 0:.2f} on them, "
            + ("no other answers" if rest is None else f"{rest:.2f} on the others"),
            "a repeated stretch is easy to draft: use prompts that the target answers well",
            experiment="acceptance with and without the looping answers",
            rows=rows_of("prompt", ((r.prompt, f"its {len(r.answer_token_ids)} answer tokens end "
                         "in a repeated stretch") for r in loops)),
            series=bars("Acceptance length", "tokens a round",
                        {"looping answers": pooled_length(loops), "the others": rest}),
        )
    ]  # fmt: skip


def temperature(m: Material) -> list[Cause]:
    heat = m.benchmark.get("temperature", 0.0)
    if not heat:
        return []
    return [
        _cause(
            "sampled-benchmark", "warning", f"the benchmark was sampled at temperature {heat:g}",
            "greedy drafts are accepted less often the hotter the target is sampled",
            "diagnose at temperature 0; compare lengths at equal temperatures alone",
            experiment="the same prompts at temperature 0",
        )
    ]  # fmt: skip


def random_prompts(e: Evidence) -> list[Cause]:
    other = {r.prompt for r in _other_ids(e.material)}  # a client's fault, named by its own rule
    views = [v for v in e.views if v.id not in other]
    nats = [v.prompt_nats for v in views]
    limit = _RANDOM_SHARE_OF_LOG_VOCAB * math.log(e.material.target.vocab_size)
    wild = [n for n in nats if n > limit]
    if not nats or len(wild) / len(nats) < _MANY:
        return []
    return [
        _cause(
            "random-workload", "error",
            f"{len(wild)} of {len(nats)} benchmark prompts are noise to the target",
            f"{sum(nats) / len(nats):.1f} nats the middle token of a prompt; ids drawn blindly "
            f"cost about {math.log(e.material.target.vocab_size):.1f}",
            "random tokens measure no acceptance: benchmark with prompts of the workload",
            proof="shown", experiment="the target's own log-likelihood of each prompt",
            rows=rows_of("prompt", ((v.id, f"{v.prompt_nats:.1f} nats its middle token")
                         for v in sorted(views, key=lambda v: -v.prompt_nats))),
            series=bars("The middle token of a prompt", "nats",
                        {"these prompts": sum(nats) / len(nats), "taken for noise from": limit,
                         "drawn blindly": math.log(e.material.target.vocab_size)}),
        )
    ]  # fmt: skip


def _other_ids(m: Material) -> list[RequestRow]:
    """Requests whose prompt ids are not those that the same prompt had in phase 01."""
    known = {r.id: r.prompt_token_ids for r in m.answers}
    return [r for r in m.own_rows if known.get(r.prompt, r.prompt_token_ids) != r.prompt_token_ids]


def client_template(m: Material) -> list[Cause]:
    """Prompt ids of the benchmark against those of the data."""
    known = {r.id: r.prompt_token_ids for r in m.answers}
    both = [r for r in m.own_rows if r.prompt in known]
    other = _other_ids(m)
    if not other:
        return []
    r = other[0]
    return [
        _cause(
            "client-template", "error",
            f"{len(other)} of {len(both)} benchmark prompts have other ids than in phase 01",
            f"prompt {r.prompt}: last ids {r.prompt_token_ids[-8:]} in the benchmark, "
            f"{known[r.prompt][-8:]} in the data",
            "let the server render the messages (chat endpoint), with the same thinking and tools",
            proof="shown", experiment="the same prompts' ids side by side",
            rows=rows_of("prompt", ((x.prompt, f"ends in {x.prompt_token_ids[-8:]}, in the data in "
                         f"{known[x.prompt][-8:]}") for x in other)),
            command="eagle3 tokens answers.jsonl",
        )
    ]  # fmt: skip


def arms(m: Material) -> list[Cause]:
    """The arms must differ in the drafter alone."""
    threads = {arm: s.get("threads") for arm, s in m.servers.items()}
    versions = {arm: s.get("engine") for arm, s in m.servers.items() if s.get("engine")}
    for name, values in (("threads", threads), ("engine", versions)):
        if len(set(values.values())) > 1:
            said = ", ".join(f"{arm} {value}" for arm, value in values.items())
            return [
                _cause(
                    "unequal-arms", "error", f"the arms differ in {name}: {said}",
                    "a speed-up compares one engine with itself, with and without a drafter",
                    "start both arms with the same flags on the same machine",
                    experiment="what each server was started with",
                )
            ]  # fmt: skip
    return []


def trained_prompts(m: Material) -> list[Cause]:
    """Prompts of the benchmark, id by id, among those that were trained on."""
    trained = {tuple(r.prompt_token_ids) for r in m.answers if r.trained}
    rows = m.own_rows
    seen = [r for r in rows if tuple(r.prompt_token_ids) in trained]
    if not rows or len(seen) / len(rows) < 0.05:
        return []
    rest = pooled_length([r for r in rows if r not in seen])
    return [
        _cause(
            "trained-prompts", "warning",
            f"{len(seen)} of {len(rows)} benchmark prompts were trained on",
            f"acceptance length {pooled_length(seen) or 0:.2f} on them, "
            + ("no other prompts" if rest is None else f"{rest:.2f} on the others"),
            "benchmark held-out prompts: what was memorised will not be asked again",
            experiment="prompt ids of the benchmark looked up among the training rows",
            rows=rows_of("prompt", ((r.prompt, "among the trained prompts, id by id")
                         for r in seen)),
            series=bars("Acceptance length", "tokens a round",
                        {"trained prompts": pooled_length(seen), "the others": rest}),
        )
    ]  # fmt: skip
