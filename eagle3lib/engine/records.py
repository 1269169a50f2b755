"""What engines tell about speculation, brought to one record whatever engine and version.

::

    vLLM, per request    metrics.speculative_decoding: acceptance_histogram, num_spec_steps,
                         num_accepted_draft_tokens, num_draft_tokens; "detailed" adds the rounds
                         in their order (per_step_accepted, per_step_drafted)
    vLLM, counters       spec_decode_num_{drafts,draft_tokens,accepted_tokens,..._per_pos}_total,
                         which only grow: differences
    SGLang, meta_info    spec_verify_ct and, by version,
                             spec_num_correct_drafts, spec_num_proposed_drafts,
                             spec_correct_drafts_histogram                            (newest)
                             spec_accepted_drafts, spec_proposed_drafts
                             spec_accept_token_num, spec_draft_token_num,
                             spec_accept_histogram                                    (0.5.5 on)
                             nothing more than the verify count                       (older)
    streamed chunks      of a request that runs alone, where no record exists: a chunk is a round

SGLang's ``spec_accept_length`` is completion tokens over verify rounds, so it holds the cut last
round and the prefill's token; vLLM's mean acceptance length is 1 + accepted / rounds. Neither is
stored: both follow from the counts, which obey tokens = 1 + rounds + accepted - cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding

# (accepted drafts, drafted tokens, rounds by accepted drafts), the newest names first: where an
# engine keeps the old ones as well, they say the same.
_SGLANG_NAMES = (
    ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
    ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
)
_PREFILL_TOKENS = 1


@dataclass(frozen=True)
class RoundCounts:
    """One request's rounds, without their order. None: the engine does not tell it."""

    rounds: int
    accepted: int
    drafted: int | None
    accepted_at: list[int] | None  # [k]: rounds that accepted step k too
    source: str


class BrokenRecord(UserError):
    """An engine's record whose numbers contradict each other."""


def vllm_counts(metrics: Any) -> RoundCounts | None:
    """Out of a reply's ``metrics``; None without a record. Raises ``BrokenRecord``."""
    told = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(told, dict):
        return None
    if "acceptance_histogram" not in told:
        by_round = told.get("per_step_accepted")
        if by_round is None:
            return None
        drafted = told.get("per_step_drafted") or []
        return _of_rounds(by_round, sum(drafted), max(drafted, default=0), "vllm per request")
    histogram = told["acceptance_histogram"]
    counts = RoundCounts(
        rounds=told.get("num_spec_steps", sum(histogram)),
        accepted=told.get("num_accepted_draft_tokens", _accepted(histogram)),
        drafted=told.get("num_draft_tokens"),
        accepted_at=_at_least(histogram),
        source="vllm per request",
    )
    return _consistent(counts, histogram, told)


def sglang_counts(meta: dict[str, Any], steps: int | None = None) -> RoundCounts | None:
    """Out of ``meta_info``; None when the server did not speculate. Raises ``BrokenRecord``.

    ``steps``: drafted per round where the server does not tell the drafted tokens (older versions
    give the verify count alone; accepted drafts are then what the tokens leave over).
    """
    rounds = meta.get("spec_verify_ct")
    if not rounds:
        return None
    names = next((n for n in _SGLANG_NAMES if n[0] in meta), None)
    if names is None:
        accepted = meta["completion_tokens"] - _PREFILL_TOKENS - rounds
        drafted = rounds * steps if steps else None
        # What a last round accepted beyond the end is lost here.
        return RoundCounts(rounds, max(accepted, 0), drafted, None, "sglang verify count")
    histogram = meta.get(names[2])
    if histogram and not histogram[0] and _accepted(histogram) == meta[names[0]] + rounds:
        histogram = histogram[1:]  # by acceptance length: the target's own token is counted too
    counts = RoundCounts(
        rounds=rounds,
        accepted=meta[names[0]],
        drafted=meta.get(names[1]),
        accepted_at=_at_least(histogram) if histogram else None,
        source="sglang meta_info",
    )
    return _consistent(counts, histogram, meta)


def told_counts(record: dict[str, Any] | None) -> RoundCounts | None:
    """What either engine's per-request record says, by its keys. Raises ``BrokenRecord``."""
    if record and "spec_verify_ct" in record:
        return sglang_counts(record)
    return vllm_counts(record)


def counter_counts(before: dict[str, float], after: dict[str, float]) -> RoundCounts | None:
    """Differences of a server's counters (``Client.speculation_counters``); None without any.

    Raises ``BrokenRecord`` when a counter fell: the server was started anew in between.
    """
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    fallen = [name for name, value in grown.items() if value < 0]
    if fallen:
        raise BrokenRecord(
            f"the server's counters fell: {', '.join(fallen)}",
            expected="counters that only grow between two looks at one server",
            next="measure again on a server that is not started anew meanwhile",
        )
    if "drafts" not in grown:
        return None
    steps = sum(name.startswith("accepted_at_") for name in grown)
    return RoundCounts(
        rounds=int(grown["drafts"]),
        accepted=int(grown.get("accepted_tokens", 0)),
        drafted=int(grown.get("draft_tokens", 0)),
        accepted_at=[int(grown[f"accepted_at_{k}"]) for k in range(steps)],
        source="vllm counters",
    )


def chunk_counts(chunk_tokens: Sequence[int], steps: int) -> RoundCounts:
    """Chunks of one streamed request that ran alone: the prefill's token, then a chunk a round.

    Accepted drafts beyond the end are not seen here, so a last round counts what was kept of it.
    Raises ``BrokenRecord`` when a chunk holds more than K + 1 tokens: the chunks were merged on
    their way.
    """
    sizes = [n for n in chunk_tokens if n]
    if sizes and (sizes[0] != _PREFILL_TOKENS or max(sizes) > steps + 1):
        raise BrokenRecord(
            f"streamed chunks of {max(sizes)} tokens, the first of {sizes[0]}",
            expected=f"1 token, then 1 to {steps + 1} a chunk, for K={steps}",
            next="one request at a time, without a proxy that buffers; or a per-request record",
        )
    accepted = [n - 1 for n in sizes[1:]]
    return _of_rounds(accepted, len(accepted) * steps, steps, "streamed chunks")


def check_record(counts: RoundCounts, tokens: int, steps: int, where: str = "") -> list[Finding]:
    """One request's record against its identity: as many as K accepted drafts may be cut by the end
    of the answer, which both engines count all the same (seen in vLLM 0.26 and 0.32, SGLang
    0.5.15)."""
    cut = _PREFILL_TOKENS + counts.rounds + counts.accepted - tokens
    if 0 <= cut <= steps:
        return []
    return [
        Finding(
            "record-identity",
            "error",
            f"a record of {counts.rounds} rounds and {counts.accepted} accepted drafts does not "
            f"give {tokens} tokens",
            f"tokens = 1 + rounds + accepted - cut, cut from 0 to {steps}; source: {counts.source}",
            "the engine's fields have another meaning in this version: report it with this record",
            where,
        )
    ]


def _of_rounds(accepted: Sequence[int], drafted: int, steps: int, source: str) -> RoundCounts:
    at = [sum(a > k for a in accepted) for k in range(steps)]
    return RoundCounts(len(accepted), sum(accepted), drafted, at, source)


def _accepted(histogram: Sequence[int]) -> int:
    return sum(j * n for j, n in enumerate(histogram))


def _at_least(histogram: Sequence[int]) -> list[int]:
    """Rounds by accepted drafts 0..K as rounds that accepted step 1..K too."""
    return [sum(histogram[k:]) for k in range(1, len(histogram))]


def _consistent(
    counts: RoundCounts, histogram: Sequence[int] | None, told: dict[str, Any]
) -> RoundCounts:
    sums = (counts.rounds, counts.accepted)
    broken = histogram and (sum(histogram), _accepted(histogram)) != sums
    more = counts.drafted is not None and counts.accepted > counts.drafted
    if broken or more:
        kept = {k: v for k, v in told.items() if "spec" in k or "accept" in k or "draft" in k}
        raise BrokenRecord(
            f"the engine's record contradicts itself: {kept}"[:400],
            expected="a histogram that sums to the rounds and to the accepted drafts, no more of "
            "them than drafted",
            next="report it to the engine; eagle3 does not average over broken counts",
        )
    return counts
