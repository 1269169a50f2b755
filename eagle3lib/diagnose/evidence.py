"""All that is measured about a run, once; the rules read it and nothing else.

Cost for a demo run: one target forward over the recorded answers and six training rows, and one
unroll of the drafter a variant: about half a minute on two cores. Every number has its baseline: a
drafter fed zero states, the unigram and bigram of the training, the states captured afresh.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.groups import Group, acceptance_groups
from eagle3lib.diagnose.live import neighbours
from eagle3lib.diagnose.material import Material
from eagle3lib.diagnose.outcomes import Outcome, is_explained, outcomes
from eagle3lib.diagnose.served import Answered, Setting
from eagle3lib.diagnose.variants import engine_variants, mended_variants, wider_variants
from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.measure.arms import RequestRow
from eagle3lib.target.images import text_entries
from eagle3lib.target.states import StateEntry, StateRow

_FRESH_ROWS = 6
_SCANNED_ROWS = 200
_TEACHER_ROWS = 40  # each costs the target's whole head over its answer


@dataclass(frozen=True)
class TargetView:
    """How the target sees one recorded conversation, in nats a token and shares."""

    id: str
    set: str
    prompt_nats: float  # of the prompt's middle token: a few rare words are no noise
    answer_nats: float
    entropy: float
    greedy_right: int
    answer_tokens: int
    inside_vocab: int
    seen_in_prompt: int  # answer tokens that prompt lookup (the last two tokens) would propose


@dataclass(frozen=True)
class StoredRow:
    """One stored conversation against the states of the same tokens captured now: for every way
    in which it may have gone wrong, the share of tokens (or the error) that fits it."""

    id: str
    fits: str  # the hypothesis with the least error: "as stored" when all is well
    error: float  # its relative error
    stored_error: float  # of "as stored"
    last_fits: str
    last_error: float
    teacher_stored: float
    teacher_fresh: float


@dataclass
class Evidence:
    """What the rules read. Tables are empty and numbers None where there was nothing to measure."""

    material: Material
    answered: list[Answered] = field(default_factory=list)
    engine_table: list[Outcome] = field(default_factory=list)
    mended_table: list[Outcome] = field(default_factory=list)
    views: list[TargetView] = field(default_factory=list)
    stored: list[StoredRow] = field(default_factory=list)
    broken_states: list[tuple[str, str]] = field(default_factory=list)  # id, what is wrong
    teacher_training: float | None = None  # greedy share of training answers, by stored states
    groups: list[Group] = field(default_factory=list)
    text_read: bool = True  # by the target's tokenizer; without it no groups by text


def collect(m: Material, *, every_variant: bool = True) -> Evidence:
    """Measure everything that the material allows. Without ``every_variant`` an engine whose record
    is the drafter's own is asked no further."""
    e = Evidence(m)
    e.groups, e.text_read = acceptance_groups(m)
    if m.own_rows:
        for row in m.own_rows:
            _one_answer(e, row)
    if m.drafter is not None and m.steps and e.answered:
        base, layers = Setting(m.drafter, m.drafter.config.slots, m.steps), m.target.num_layers
        rope = {"rope_type": "default"} | rope_parameters(m.target.config, "the target's config")
        mended = mended_variants(layers, rope, m.head.embedding)
        e.mended_table = outcomes(base, mended, e.answered)
        e.engine_table = e.mended_table[:1]
        differs = e.engine_table[0].rounds_equal < e.engine_table[0].rounds
        if every_variant or differs or not m.is_recorded:
            e.engine_table = outcomes(base, engine_variants(layers), e.answered, e.mended_table)
            if m.is_recorded and not is_explained(e.engine_table):
                e.engine_table += outcomes(base, wider_variants(layers), e.answered,
                                           e.engine_table)[1:]  # fmt: skip
    if m.store is not None:
        _scan_store(e)
    return e


def _one_answer(e: Evidence, row: RequestRow) -> None:
    m = e.material
    ids, prompt = row.prompt_token_ids + row.answer_token_ids, len(row.prompt_token_ids)
    layers = neighbours(m.slots, m.target.num_layers)
    states = m.states_of(ids, layers)
    tokens = torch.tensor(ids)
    e.answered.append(
        Answered(
            row.prompt, row.set, tokens, prompt, states[:, :-1], layers, row.accepted, row.drafted
        )
    )
    e.views.append(_view(m, row, tokens, states[:, -1]))


@torch.no_grad()
def _view(m: Material, row: RequestRow, tokens: Tensor, last: Tensor) -> TargetView:
    prompt = len(row.prompt_token_ids)
    log_probs = m.head.logits(last[:-1].to(m.head.norm.dtype)).float().log_softmax(-1)
    nats = -log_probs.gather(1, tokens[1:, None])[:, 0]
    answer = log_probs[prompt - 1 :]
    t2d = m.drafter.t2d if m.drafter else (m.vocab.t2d if m.vocab else None)
    rest = tokens[prompt + 1 :]
    return TargetView(
        row.prompt,
        row.set,
        float(nats[: prompt - 1].median()) if prompt > 1 else 0.0,
        float(nats[prompt - 1 :].mean()),
        float(-(answer.exp() * answer).sum(-1).mean()),
        int((answer.argmax(-1) == tokens[prompt:]).sum()),
        len(tokens) - prompt,
        int(t2d[rest].sum()) if t2d is not None else len(rest),
        lookup_hits(tokens.tolist(), prompt),
    )


def lookup_hits(ids: list[int], prompt: int) -> int:
    """Answer tokens after the first that follow an earlier occurrence of the two tokens before
    them: what drafting from the text itself would get."""
    follower: dict[tuple[int, int], int] = {}
    hits = 0
    for i in range(2, len(ids)):
        pair = (ids[i - 2], ids[i - 1])
        if i > prompt and follower.get(pair) == ids[i]:
            hits += 1
        follower[pair] = ids[i]
    return hits


def _scan_store(e: Evidence) -> None:
    """Cheap checks on many rows, and a fresh capture of a few spread over lengths."""
    store, m = e.material.store, e.material
    assert store is not None
    entries = store.entries[:: max(1, len(store.entries) // _SCANNED_ROWS)]
    right = total = 0
    # A fresh forward is the text model's alone: it can't be laid beside states that saw images.
    text = m.attempt(4, lambda: text_entries(store, entries, m.target.media_ids), [])
    alike = {x.id for x in text}
    fresh = {x.id for x in text[:: max(1, len(text) // _FRESH_ROWS)][:_FRESH_ROWS]}
    asked = {x.id for x in entries[:: max(1, len(entries) // _TEACHER_ROWS)]} | fresh
    for entry in entries:
        row = m.attempt(4, lambda entry=entry: store.row(entry), None)  # type: ignore[misc]
        if row is None:
            return
        problem = _row_problem(row)
        if problem:
            e.broken_states.append((entry.id, problem))
        if entry.id not in asked:
            continue
        agree, count = _teacher(m, row.token_ids, row.last, entry)
        suspicious = count and agree / count < 0.8 and len(e.stored) < 2 * _FRESH_ROWS
        if entry.split != "heldout":
            right, total = right + agree, total + count
        if (entry.id in fresh or (suspicious and entry.id in alike)) and not problem:
            e.stored.append(_against_fresh(m, row, store.slots))
    e.teacher_training = right / total if total else None


def _row_problem(row: StateRow) -> str:
    """NaN, zeros, positions stuck at one state, fewer states than tokens."""
    if len(row.slots) != row.entry.tokens or len(row.token_ids) != row.entry.tokens:
        return f"{len(row.slots)} states for {row.entry.tokens} tokens"
    # Last states before the first taught position are not stored: nothing reads them.
    slots = row.slots.unflatten(1, (-1, row.last.shape[1])).unbind(1)
    named = [(f"slot {i + 1}", x) for i, x in enumerate(slots)]
    for name, x in (*named, ("last", row.last[row.entry.first_taught :])):
        wide = x.float()
        if not torch.isfinite(wide).all():
            return f"{name} is not finite"
        if bool((wide.abs().amax(-1) == 0).any()):
            return f"{name} is all zero at {int((wide.abs().amax(-1) == 0).sum())} positions"
        stuck = int((wide[1:] == wide[:-1]).all(-1).sum())
        if stuck > 2:
            return f"{name} does not change over {stuck} positions"
    return ""


def _teacher(m: Material, ids: Tensor, last: Tensor, entry: StateEntry) -> tuple[int, int]:
    prompt = max(entry.prompt_tokens, 1)
    if prompt >= len(ids):
        return 0, 0
    predicted = m.head.greedy(last[prompt - 1 : -1].to(m.head.norm.dtype))
    return int((predicted == ids[prompt:]).sum()), len(ids) - prompt


@torch.no_grad()
def _against_fresh(m: Material, row: StateRow, slots: tuple[int, ...]) -> StoredRow:
    layers = neighbours(slots, m.target.num_layers)
    fresh = m.states_of(row.token_ids.tolist(), layers).float()
    at = {layer: i for i, layer in enumerate(layers)}

    def chosen(by: int) -> Tensor | None:
        wanted = [s + by for s in slots]
        if any(w not in at for w in wanted):
            return None
        return fresh[:, [at[w] for w in wanted]].flatten(1)

    plain = chosen(0)
    assert plain is not None
    guesses = {"as stored": plain, "one token late": plain.roll(1, 0),
               "one token early": plain.roll(-1, 0), "slots + 1": chosen(1),
               "slots - 1": chosen(-1)}  # fmt: skip
    errors = {k: _distance(row.slots.float(), g) for k, g in guesses.items() if g is not None}
    best = min(errors, key=lambda k: errors[k])
    last = fresh[:, -1]
    normed = m.head.normed(last.to(m.head.norm.dtype)).float()
    ends = {"as stored": last, "already normed": normed, "one token late": last.roll(1, 0),
            "one token early": last.roll(-1, 0)}  # fmt: skip
    first = row.entry.first_taught
    misses = {k: _distance(row.last[first:].float(), g[first:]) for k, g in ends.items()}
    agree, count = _teacher(m, row.token_ids, row.last, row.entry)
    again, _ = _teacher(m, row.token_ids, last, row.entry)
    ending = min(misses, key=lambda k: misses[k])
    return StoredRow(
        row.entry.id, best, errors[best], errors["as stored"], ending, misses[ending],
        agree / max(count, 1), again / max(count, 1),
    )  # fmt: skip


def _distance(stored: Tensor, guess: Tensor) -> float:
    """Median over positions of the relative error: the ends of a shifted row don't count."""
    error = (stored - guess).norm(dim=-1) / guess.norm(dim=-1).clamp(min=1e-12)
    return float(error.median())


def unseen_share(training: Counter[int], served: list[int]) -> float:
    """Share of tokens that no training answer holds."""
    return sum(training[t] == 0 for t in served) / len(served) if served else 0.0


def cross_entropy(training: Counter[int], served: list[int], vocab_size: int) -> float:
    """Nats a token of ``served`` under the training answers' unigram, add-one smoothed."""
    total = sum(training.values()) + vocab_size
    return -sum(math.log((training[t] + 1) / total) for t in served) / max(len(served), 1)


def facts(e: Evidence) -> dict[str, Any]:
    """Numbers for ``metrics.json``."""
    tokens = sum(v.answer_tokens for v in e.views)
    return {
        "engine_table": [o.as_dict() for o in e.engine_table],
        "mended_table": [o.as_dict() for o in e.mended_table],
        "target_entropy_nats": _mean([v.entropy for v in e.views]),
        "prompt_lookup_share": _ratio(sum(v.seen_in_prompt for v in e.views), tokens),
        "greedy_share": _ratio(sum(v.greedy_right for v in e.views), tokens),
        "teacher_training": e.teacher_training,
        "groups": [g.as_dict() for g in e.groups],
        "stored_rows": [s.__dict__ for s in e.stored],
    }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None
