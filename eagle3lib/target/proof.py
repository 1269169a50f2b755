"""Proof that captured states are what they are said to be, before anything is trained on them.

``gather_facts`` reads every shard once: tokens, lengths, damage, doubles, and what the target's
head makes of the states; ``check_states`` judges them. Which of the target's layers each stored
slot really is, layers.py measures.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding
from eagle3lib.target.capture import teacher_agreement
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateEntry, StateRow, StateStore, state_problem

AGAIN = "delete the states and run 02_capture_hidden_states again"
_FLAT_STD = 1e-6  # below it, states hold no information in any dtype


@dataclass(frozen=True)
class ShardFacts:
    """What one shard holds, all counts; a row is a conversation."""

    shard: str
    rows: int
    tokens: int
    not_finite: int  # states (of one position in one slot) with NaN or infinity
    zero: int  # states that are zero throughout
    damaged: list[str]  # "id: what is wrong", those that can't be read among them
    wrong_tokens: list[str]  # ids whose tokens are not those of the answer
    std: float  # over all finite values of the slots
    agree: int  # answer tokens that the states' own greedy choice equals
    answer_tokens: int
    low: list[str]  # ids whose agreement is under half of the floor


@dataclass(frozen=True)
class StateFacts:
    """The proof's raw material; ``check_states`` judges it, a notebook shows it."""

    shards: list[ShardFacts]
    missing: list[str]  # answers without states
    unknown: list[str]  # states without an answer
    doubles: list[tuple[str, str]]  # rows of other tokens with the very same states
    swapped: list[tuple[str, str]]  # rows whose states continue the other's tokens

    @property
    def agree(self) -> int:
        return sum(s.agree for s in self.shards)

    @property
    def answer_tokens(self) -> int:
        return sum(s.answer_tokens for s in self.shards)


def gather_facts(
    store: StateStore, rows: list[AnswerRow], head: TargetHead, *, floor: float
) -> StateFacts:
    """Read every row of the store once. ``floor`` is the least share of greedy answer tokens."""
    wanted = {row.id: row.prompt_token_ids + row.answer_token_ids for row in rows}
    names = Counter(e.id for e in store.entries)
    by_shard: dict[str, list[StateEntry]] = {}
    for entry in store.entries:
        by_shard.setdefault(entry.shard, []).append(entry)
    first: dict[str, tuple[str, str]] = {}  # hash of states -> id, hash of tokens
    doubles: list[tuple[str, str]] = []

    unreadable: dict[str, list[str]] = {}

    def watched(shard: str, entries: list[StateEntry]) -> Iterable[StateRow]:
        for entry in entries:
            try:
                row = store.row(entry)
            except UserError as error:
                unreadable.setdefault(shard, []).append(f"{entry.id}: {error.found}")
                continue
            states, tokens = _digest(row.slots), _digest(row.token_ids)
            before = first.setdefault(states, (row.entry.id, tokens))
            if before[1] != tokens:
                doubles.append((before[0], row.entry.id))
            yield row

    shards = [
        _shard_facts(name, watched(name, entries), wanted, head, floor)
        for name, entries in sorted(by_shard.items())
    ]
    for shard in shards:
        shard.damaged.extend(unreadable.get(shard.shard, []))
    low = {name for shard in shards for name in shard.low}
    return StateFacts(
        shards=shards,
        missing=sorted(set(wanted) - set(names)),
        unknown=sorted((set(names) - set(wanted)) | {n for n, count in names.items() if count > 1}),
        doubles=doubles,
        swapped=_swapped(store, [e for e in store.entries if e.id in low], head, floor),
    )


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest()


def _shard_facts(
    name: str,
    rows: Iterable[StateRow],
    wanted: dict[str, list[int]],
    head: TargetHead,
    floor: float,
) -> ShardFacts:
    count = {"rows": 0, "tokens": 0, "not_finite": 0, "zero": 0, "agree": 0, "answer_tokens": 0}
    damaged, wrong, low = [], [], []
    values, total, squares = 0, 0.0, 0.0
    for row in rows:
        entry = row.entry
        # Only the last states from the end of the prompt on are ever read.
        read_last = row.last[entry.first_taught :].float()
        per_slot = row.slots.unflatten(1, (-1, row.last.shape[1])).float()  # [T, S, H]
        for states in (per_slot, read_last[:, None]):
            count["not_finite"] += int((~torch.isfinite(states)).any(-1).sum())
            count["zero"] += int((states.abs().amax(-1) == 0).sum())
        if len(row.last) != entry.tokens or len(row.token_ids) != entry.tokens:
            damaged.append(
                f"{entry.id}: {len(row.last)} states, {entry.tokens} tokens in the index"
            )
        elif problem := state_problem(per_slot, row.token_ids):
            damaged.append(f"{entry.id}: {problem}")
        if entry.id in wanted and row.token_ids.tolist() != wanted[entry.id]:
            wrong.append(entry.id)
        right, answer = teacher_agreement(head, row.token_ids, row.last, entry.prompt_tokens)
        low += [entry.id] if answer and right < floor / 2 * answer else []
        finite = per_slot[torch.isfinite(per_slot)].double()
        values, total = values + finite.numel(), total + float(finite.sum())
        squares += float(finite.square().sum())
        for key, more in (("rows", 1), ("tokens", entry.tokens), ("agree", right)):
            count[key] += more
        count["answer_tokens"] += answer
    mean = total / max(values, 1)
    std = max(squares / max(values, 1) - mean**2, 0.0) ** 0.5
    return ShardFacts(name, damaged=damaged, wrong_tokens=wrong, std=std, low=low, **count)


def _swapped(
    store: StateStore, entries: list[StateEntry], head: TargetHead, floor: float, most: int = 40
) -> list[tuple[str, str]]:
    """Pairs among rows of low agreement whose states speak of the other's tokens."""
    rows = list(store.rows(entries[:most]))
    pairs = []
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            if len(one.token_ids) == len(other.token_ids) and all(
                _continues(head, a.last, b, floor) for a, b in ((one, other), (other, one))
            ):
                pairs.append((one.entry.id, other.entry.id))
    return pairs


def _continues(head: TargetHead, last: Tensor, row: StateRow, floor: float) -> bool:
    right, total = teacher_agreement(head, row.token_ids, last, row.entry.prompt_tokens)
    return right >= floor * total


def check_states(facts: StateFacts, floor: float, *, greedy: bool) -> list[Finding]:
    """Findings on a store's facts; errors are what must not be trained on.

    ``floor`` is the least share of answer tokens that the head makes of the states, and judged
    only where the answers were ``greedy``.
    """
    found = [
        _named("states-missing", facts.missing, "answers have no states"),
        _named("states-unknown", facts.unknown, "states belong to no answer, or stand twice"),
        _named("states-doubled", [f"{a} = {b}" for a, b in facts.doubles],
               "pairs of other tokens have the very same states"),
        _named("states-swapped", [f"{a} <-> {b}" for a, b in facts.swapped],
               "pairs of conversations have each other's states"),
    ]  # fmt: skip
    for shard in facts.shards:
        found += _shard_findings(shard, floor if greedy else 0.0)
    share = facts.agree / max(facts.answer_tokens, 1)
    if greedy and share < floor:
        found.append(
            Finding(
                "teacher-agreement",
                "error",
                f"the captured states give only {share:.1%} of the served answer tokens",
                f"at least {floor:.0%} for greedy answers (parameter min_teacher_agreement)",
                "see what check_layers says of layer and norm; is this the target that answered?",
                "states",
            )
        )
    return [finding for finding in found if finding is not None]


def _shard_findings(shard: ShardFacts, floor: float) -> list[Finding | None]:
    states = f"of {shard.tokens} tokens"
    lonely = [
        name for name in shard.low if floor and shard.agree >= floor * shard.answer_tokens / 2
    ]
    return [
        _named("states-not-finite", [str(shard.not_finite)] * bool(shard.not_finite),
               f"states {states} hold NaN or infinity", shard.shard),
        _named("states-zero", [str(shard.zero)] * bool(shard.zero),
               f"states {states} are zero throughout", shard.shard),
        _named("states-damaged", shard.damaged, "conversations are damaged", shard.shard),
        _named("states-tokens", shard.wrong_tokens,
               "conversations hold other tokens than their answers", shard.shard),
        _named("states-flat", [f"{shard.std:.2e}"] * (shard.std < _FLAT_STD),
               "standard deviation: the states hold nothing", shard.shard),
        _named("states-of-another", lonely,
               "conversations have states that speak of other tokens", shard.shard),
    ]  # fmt: skip


def _named(code: str, names: list[str], what: str, where: str = "states") -> Finding | None:
    if not names:
        return None
    title = f"{names[0] if len(names) == 1 and names[0].isdigit() else len(names)} {what}"
    return Finding(code, "error", title, ", ".join(names[:5]), AGAIN, where)
