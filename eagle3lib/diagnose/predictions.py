"""Answers token by token: the draft step that gave each token, and where none did, why.

Every token of an answer has exactly one kind. A round that starts at answer token ``at`` with w
drafts and accepts c of them gives the tokens at + 1 .. at + c (accepted) and, unless the answer
ends before it, at + c + 1, the target's own: a bonus where c = w, a miss where the next draft was
wrong. What a miss is called is decided in the order of ``MISSES``, the first that fits. The rounds
are the engine's where it told them, else the simulator's; drafts are always the simulator's, at the
very positions where those rounds stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from eagle3lib.diagnose.live import StatesOf
from eagle3lib.diagnose.served import accepted_at, round_starts
from eagle3lib.drafter.model import Drafter, Step, unroll
from eagle3lib.drafter.rows import PackedRows
from eagle3lib.target.model import TargetHead

PREFILL, ACCEPTED, BONUS = "prefill", "accepted", "bonus"
ENGINE, OUTSIDE, OTHER, TIE, FIRST, CHAIN = "engine", "outside", "other", "tie", "first", "chain"
MISSES = (ENGINE, OUTSIDE, OTHER, TIE, FIRST, CHAIN)
KINDS = {
    PREFILL: "first token, from the prefill",
    ACCEPTED: "accepted draft",
    BONUS: "target's own, after a round whose drafts were all accepted",
    ENGINE: "miss: the simulator drafts it, the engine did not accept it",
    OUTSIDE: "miss: outside the draft vocabulary",
    OTHER: "miss: not the target's first choice (sampled, or rounded otherwise)",
    TIE: "miss: near tie of the target's first two",
    FIRST: "miss at the first step, from the target's own states",
    CHAIN: "miss at a later step, from the drafter's own states",
}
TIE_NATS = 0.2  # the better of two holds 1.22 times the probability of the other
TOP = 5
_CHUNK = 512  # positions whose logits exist at a time
Choice = tuple[int, float]  # target id, probability


@dataclass(frozen=True)
class ToView:
    """One answered conversation. ``accepted`` and ``drafted``: the engine's record, if it told."""

    id: str
    set: str
    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    accepted: list[int] | None = None
    drafted: list[int] | None = None


@dataclass(frozen=True)
class Round:
    """A round from answer token ``start`` with ``width`` drafts. ``simulated``: those that the
    drafter has right there. Drafts beyond the answer's end are not counted, and a round that
    reaches it is not ``compared``: what the target would have said next is not known."""

    start: int
    accepted: int
    width: int
    simulated: int
    compared: bool
    state_rms: list[float]  # of the target's state that the round was drafted from, by slot
    drafter_rms: list[float]  # of the drafter's own state at each of its steps, before its norm

    @property
    def parted(self) -> bool:
        return self.compared and self.simulated != self.accepted


@dataclass(frozen=True)
class Token:
    """``step``: draft step of this token; 0, and ``drafter`` empty, where it was not drafted."""

    id: int
    kind: str
    step: int
    round: int  # -1 for the first token
    inside: bool
    target_p: float
    target: list[Choice]
    drafter_p: float | None
    drafter: list[Choice]


@dataclass(frozen=True)
class AnswerView:
    """``recorded``: the rounds are the engine's; ``problem`` says why its record is not used."""

    id: str
    set: str
    prompt_token_ids: list[int]
    tokens: list[Token]
    rounds: list[Round]
    recorded: bool
    problem: str

    @property
    def ends_within_round(self) -> bool:
        return bool(self.rounds) and self.tokens[-1].kind == ACCEPTED


@torch.no_grad()
def view_answer(
    item: ToView, drafter: Drafter, head: TargetHead, states_of: StatesOf, steps: int
) -> AnswerView:
    """One forward of the target, one unroll of ``steps`` steps, and both heads at every token."""
    ids, prompt = item.prompt_token_ids + item.answer_token_ids, len(item.prompt_token_ids)
    answer = torch.tensor(item.answer_token_ids)
    states = states_of(ids, drafter.config.slots)
    made = _drafted(drafter, torch.tensor(ids), prompt, states[:, :-1], steps)
    counts = accepted_at(_drafts(made, steps), item.answer_token_ids)
    problem = record_problem(item)
    recorded = item.accepted is not None and not problem
    spans = _recorded(item, steps) if recorded else _simulated(counts, len(answer), steps)
    rms = states[prompt - 1 :, :-1].float().square().mean(-1).sqrt()
    own_rms = _own_rms(made)
    rounds = [
        _round(counts[at], at, c, w, len(answer), rms[at].tolist(), own_rms[at, :w].tolist())
        for at, c, w in spans
    ]
    target = _looked_up(head.logits, states[prompt - 1 : -1, -1].to(head.norm.dtype), answer)
    tokens = _tokens(answer, rounds, target, made, drafter)
    return AnswerView(
        item.id, item.set, item.prompt_token_ids, tokens, rounds, recorded, problem
    )  # fmt: skip


def record_problem(item: ToView) -> str:
    """Why a record of rounds can't be laid on its answer; empty where it can, or there is none."""
    accepted, tokens = item.accepted, len(item.answer_token_ids)
    if accepted is None:
        return ""
    if item.drafted is not None and len(item.drafted) != len(accepted):
        return f"{len(accepted)} rounds accepted and {len(item.drafted)} drafted"
    # The last round needs the token that it starts from and one after it.
    if accepted and round_starts(accepted)[-1] + 2 > tokens:
        return f"{len(accepted)} rounds reach beyond the answer's {tokens} tokens"
    if 1 + sum(accepted) + len(accepted) < tokens:
        return f"the rounds give {1 + sum(accepted) + len(accepted)} of {tokens} tokens"
    return ""


def _recorded(item: ToView, steps: int) -> list[tuple[int, int, int]]:
    assert item.accepted is not None
    widths = item.drafted or [steps] * len(item.accepted)
    return list(zip(round_starts(item.accepted), item.accepted, widths, strict=True))


def _simulated(counts: list[int], answer_tokens: int, steps: int) -> list[tuple[int, int, int]]:
    spans, at = [], 0
    while at < answer_tokens - 1:
        spans.append((at, counts[at], steps))
        at += counts[at] + 1
    return spans


def _round(
    mine: int, at: int, theirs: int, width: int, answer_tokens: int,
    rms: list[float], own_rms: list[float],
) -> Round:  # fmt: skip
    mine, left = min(mine, width), answer_tokens - 1 - at
    compared = max(mine, theirs) < left
    told = ([float(f"{x:.3g}") for x in of] for of in (rms, own_rms))
    return Round(at, min(theirs, left), width, mine, compared, *told)


def _drafted(
    drafter: Drafter, ids: Tensor, prompt: int, slots: Float[Tensor, "T S H"], steps: int
) -> list[Step]:
    if len(ids) - prompt < 2:
        return []
    weight = drafter.fc.weight
    states = slots.flatten(1).to(weight.device, weight.dtype)
    return unroll(drafter, PackedRows.pack([ids], [prompt]), states, steps, feed="draft")


def _drafts(made: list[Step], steps: int) -> Int64[Tensor, "P K"]:
    drafts = [step.drafts for step in made if step.drafts is not None]
    return torch.stack(drafts, 1).cpu() if drafts else torch.empty(0, steps, dtype=torch.int64)


def _own_rms(made: list[Step]) -> Float[Tensor, "P K"]:
    """Size of what each step's draft is read from. It grows or shrinks from step to step where a
    drafter was never trained on its own states, or feeds back the wrong side of its norm."""
    sizes = [step.hidden.float().square().mean(-1).sqrt() for step in made]
    return torch.stack(sizes, 1).cpu() if sizes else torch.empty(0, 0)


@dataclass(frozen=True)
class _Looked:
    """What a head says at some positions: its first choices, and how it holds the true token."""

    p: list[float]
    top: list[list[Choice]]
    margin: list[float]  # nats of the true token above the best other one, -inf if it has none


def _looked_up(
    logits: Callable[[Tensor], Tensor], states: Tensor, truth: Tensor,
    names: Callable[[Tensor], Tensor] = lambda ids: ids,
) -> _Looked:  # fmt: skip
    """``truth``: the head's own ids, -1 where it has none for the token. ``names``: those ids as
    the target's."""
    out = _Looked([], [], [])
    for part, wanted in zip(states.split(_CHUNK), truth.split(_CHUNK), strict=True):
        log_probs = logits(part).float().log_softmax(-1)
        wanted = wanted.to(log_probs.device)
        own = log_probs.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        own = own.masked_fill(wanted < 0, -torch.inf)
        best = log_probs.topk(min(TOP, log_probs.shape[-1]))
        other = torch.where(best.indices[:, 0] == wanted, best.values[:, 1], best.values[:, 0])
        out.p.extend(own.exp().tolist())
        out.margin.extend((own - other).tolist())
        ids = names(best.indices.flatten()).view_as(best.indices)
        pairs = zip(ids.tolist(), best.values.exp().tolist(), strict=True)
        out.top.extend([list(zip(i, p, strict=True)) for i, p in pairs])
    return out


def _tokens(
    answer: Tensor, rounds: list[Round], target: _Looked, made: list[Step], drafter: Drafter
) -> list[Token]:
    places = list(token_places(rounds, len(answer)))
    picked = [(i, step, r) for i, (step, r) in enumerate(places) if 0 < step <= len(made)]
    own_ids = torch.full((drafter.config.vocab_size,), -1)
    own_ids[drafter.target_ids(torch.arange(len(drafter.d2t), device=drafter.d2t.device)).cpu()] = (
        torch.arange(len(drafter.d2t))
    )
    looked = {}
    if picked:
        hidden = torch.stack([made[step - 1].hidden[rounds[r].start] for _, step, r in picked])
        wanted = own_ids[answer[[i for i, _, _ in picked]]]
        found = _looked_up(drafter.logits, hidden, wanted, drafter.target_ids)
        looked = {i: n for n, (i, _, _) in enumerate(picked)}
    tokens = []
    for i, (step, r) in enumerate(places):
        inside, n = bool(own_ids[answer[i]] >= 0), looked.get(i)
        kind = kind_of(i, rounds[r] if r >= 0 else None, inside, target.margin[i])
        tokens.append(
            Token(int(answer[i]), kind, step, r, inside, target.p[i], target.top[i],
                  None if n is None else found.p[n], [] if n is None else found.top[n])
        )  # fmt: skip
    return tokens


def token_places(rounds: list[Round], answer_tokens: int) -> Iterable[tuple[int, int]]:
    """(draft step, round) of every answer token: step 0 where nothing was drafted for it."""
    yield 0, -1
    for number, r in enumerate(rounds):
        end = rounds[number + 1].start if number + 1 < len(rounds) else answer_tokens - 1
        for i in range(r.start + 1, end + 1):
            step = i - r.start
            yield (step if step <= r.width else 0), number


def kind_of(index: int, of: Round | None, inside: bool, margin: float) -> str:
    """The one kind of answer token ``index``, which round ``of`` gave.

    ``margin``: nats by which the target holds the token above every other one.
    """
    if of is None:
        return PREFILL
    step = index - of.start
    if step <= of.accepted:
        return ACCEPTED
    if step > of.width:
        return BONUS
    if step <= of.simulated:
        return ENGINE
    if not inside:
        return OUTSIDE
    if margin <= -TIE_NATS:
        return OTHER
    if margin < TIE_NATS:
        return TIE
    return FIRST if step == 1 else CHAIN


def kind_counts(views: Iterable[AnswerView]) -> dict[str, int]:
    """Tokens of every kind; together all tokens of the answers."""
    found = Counter(t.kind for v in views for t in v.tokens)
    return {kind: found[kind] for kind in KINDS}


def step_counts(views: Iterable[AnswerView], steps: int) -> list[dict[str, Any]]:
    """One line a draft step: tokens accepted there, and missed there by kind."""
    found = Counter((t.step, t.kind) for v in views for t in v.tokens)
    return [
        {"step": k, ACCEPTED: found[k, ACCEPTED]} | {kind: found[k, kind] for kind in MISSES}
        for k in range(1, steps + 1)
    ]


def parted_rounds(views: Iterable[AnswerView]) -> tuple[int, int]:
    """(rounds in which engine and simulator differ, rounds compared) of recorded answers."""
    rounds = [r for v in views if v.recorded for r in v.rounds if r.compared]
    return sum(r.parted for r in rounds), len(rounds)


def summary(
    views: Sequence[AnswerView], of: int, steps: int, dtype: str, images: int = 0
) -> dict[str, Any]:
    """A few facts about what is viewed. ``images``: answers left out since their prompts show
    some."""
    rounds = [r for v in views for r in v.rounds]
    parted, compared = parted_rounds(views)
    tokens, recorded = sum(len(v.tokens) for v in views), sum(v.recorded for v in views)
    refused = Counter(v.problem for v in views if v.problem)
    return {
        "answers viewed": f"{len(views):,} of {of:,}"
        + (f", {images:,} left out: their prompts show images" if images else ""),
        "tokens": tokens,
        "drafts a round (K), numbers": f"{steps}, {dtype}",
        "acceptance length": 1 + sum(r.accepted for r in rounds) / max(len(rounds), 1),
        "answers whose rounds the engine told": recorded,
        "records that do not fit their answers": "; ".join(refused) or "none",
        "rounds in which engine and simulator differ": f"{parted:,} of {compared:,} compared",
    }
