"""How often the target's own greedy token is the answer's token: by kind of answer.

A drafter is measured against what the target would say next. Greedy answers of the target are its
own words throughout (near 100 %, but for rounding); sampled ones less so; answers that somebody
else gave are far from it, and a drafter that learns from them learns to be rejected. The captured
states tell exactly, for every token, without asking a server for logprobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from eagle3lib.data.rows import AnswerRow
from eagle3lib.target.capture import teacher_agreement
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateEntry, StateStore

KIND = ("set", "token_ids_from", "thinking", "temperature")


def on_policy_counts(
    store: StateStore, head: TargetHead, rows: Iterable[AnswerRow], most_rows: int = 20
) -> list[dict[str, Any]]:
    """One line a kind: ``KIND``, and how many of its answer tokens are the target's greedy ones.

    Counted over ``most_rows`` answers of each kind, evenly picked: the head over a large vocabulary
    is slow on a CPU. States of rows that are not in ``rows`` are left out.
    """
    by_id = {row.id: row for row in rows}
    kinds: dict[tuple[Any, ...], list[StateEntry]] = {}
    for entry in store.entries:
        if entry.id in by_id:
            kinds.setdefault(_kind(by_id[entry.id]), []).append(entry)
    lines = []
    for kind, entries in sorted(kinds.items(), key=lambda item: tuple(map(str, item[0]))):
        picked = entries[:: -(-len(entries) // most_rows)]
        counts = [
            teacher_agreement(head, row.token_ids, row.last, row.entry.prompt_tokens)
            for row in store.rows(picked)
        ]
        greedy, tokens = (sum(part) for part in zip(*counts, strict=True))
        line = {"answers": len(picked), "of": len(entries), "greedy": greedy, "tokens": tokens}
        lines.append(dict(zip(KIND, kind, strict=True)) | line)
    return lines


def _kind(row: AnswerRow) -> tuple[Any, ...]:
    sampling = row.sampling
    thinking, temperature = sampling.get("thinking", "default"), sampling.get("temperature")
    return row.set, row.token_ids_from, thinking, temperature
