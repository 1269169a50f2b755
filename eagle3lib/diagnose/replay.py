"""The engine's rounds beside the simulator's, on the very answers that the engine gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.live import StatesOf
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.simulate import Conversation, Replay, simulate
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.arms import PLAIN, RequestRow, counts_of
from eagle3lib.target.model import TargetHead


@dataclass(frozen=True)
class ReplayedAnswer:
    """One answer: what the engine recorded, what the simulator says, and what it could have
    drafted. What only a drafter can tell is None without one."""

    row: RequestRow
    simulated: Replay | None
    teacher_right: int  # answer tokens that are the captured states' own greedy choice
    inside_vocab: int | None  # answer tokens after the first that the draft vocabulary holds
    parted_gap: float | None  # nats between the arms' tokens where their answers part; None: equal

    def round_pairs(self) -> list[tuple[int, int, bool]]:
        """(engine's accepted, simulator's accepted, is the cut last round), round by round.

        Compared up to the first round that differs: after it the two stand at different positions.
        Nothing is where the engine told no rounds one by one, or no drafter was at hand.
        """
        if self.row.accepted is None or self.simulated is None:
            return []
        pairs = []
        last = len(self.simulated.accepted) - 1
        for i, (theirs, ours) in enumerate(
            zip(self.row.accepted, self.simulated.accepted, strict=False)
        ):
            pairs.append((theirs, ours, self.simulated.cut and i == last))
            if theirs != ours:
                break
        return pairs


def replay_answers(
    rows: list[RequestRow],
    head: TargetHead,
    states_of: StatesOf,
    drafter: Drafter | None,
    *,
    steps: int,
    slots: tuple[int, ...],
    plain: dict[str, list[int]] | None = None,
    on_answer: Callable[[int], None] = lambda n: None,
) -> list[ReplayedAnswer]:
    """Capture the states of the engine's answers and replay greedy speculation along them.

    ``rows``: requests of one drafter's arm, one repeat; ``head``, ``states_of`` and ``drafter`` in
    the dtype that was served; ``slots``: the drafter's. States come one conversation at a time, as
    in the engine with one request at a time.
    """
    out = []
    for row in rows:
        ids, prompt = row.prompt_token_ids + row.answer_token_ids, len(row.prompt_token_ids)
        states, tokens = states_of(ids, slots), torch.tensor(ids)
        log_probs = head.logits(states[prompt - 1 : -1, -1]).float().log_softmax(-1)
        answer = tokens[prompt:]
        said = Conversation(tokens, prompt, states[:, :-1].flatten(1))
        out.append(
            ReplayedAnswer(
                row=row,
                simulated=simulate(drafter, [said], steps)[0] if drafter else None,
                teacher_right=int((log_probs.argmax(-1) == answer).sum()),
                inside_vocab=int(drafter.t2d[answer[1:]].sum()) if drafter else None,
                parted_gap=_parted_gap(
                    log_probs, row.answer_token_ids, (plain or {}).get(row.prompt)
                ),
            )
        )
        on_answer(1)
    return out


def _parted_gap(log_probs: Tensor, answer: list[int], plain: list[int] | None) -> float | None:
    """How far apart the target holds the two tokens where this answer leaves the plain arm's, nats.

    Near 0 it is a tie that rounding decides; a large gap is a token that the target did not want.
    """
    pairs = zip(answer, plain or [], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    return (
        None if at is None else float((log_probs[at, answer[at]] - log_probs[at, plain[at]]).abs())
    )


def compare_counts(answers: list[ReplayedAnswer], steps: int, dtype: str) -> dict[str, Any]:
    """Engine and simulator pooled over the same answers, and how many rounds are equal. Of rounds
    that the engine did not tell, and of a drafter that was not at hand, the counts are zero."""
    simulator = Counts()
    # A record of more steps than were asked for is to be diagnosed, not to be died of.
    width = max([steps, *(n for a in answers for n in a.row.accepted or [])])
    engine = counts_of([a.row for a in answers], width)
    compared = equal = cut = 0
    for answer in answers:
        if answer.simulated is not None:
            ours = answer.simulated.accepted
            tokens = len(answer.row.answer_token_ids)
            simulator.add(tokens, ours, [steps] * len(ours), steps)
        for theirs, mine, is_cut in answer.round_pairs():
            cut += is_cut
            compared += not is_cut
            equal += (theirs == mine) and not is_cut
    gaps = [a.parted_gap for a in answers if a.parted_gap is not None]
    return {
        "answers": len(answers),
        "dtype": dtype,
        "engine": engine.as_dict(),
        "simulator": simulator.as_dict(),
        "rounds_compared": compared,
        "rounds_equal": equal,
        "cut_last_rounds": cut,
        "answers_equal": sum(
            all(a == b or c for a, b, c in x.round_pairs())
            for x in answers
            if x.row.accepted is not None and x.simulated is not None
        ),
        "teacher_agreement": _share(answers, lambda a: a.teacher_right, 0),
        "vocab_coverage": _share(answers, lambda a: a.inside_vocab, 1),
        "parted_from_plain": len(gaps),
        "largest_parted_gap": round(max(gaps), 4) if gaps else None,
    }


def _share(
    answers: list[ReplayedAnswer], count: Callable[[ReplayedAnswer], int | None], less: int
) -> float | None:
    told = [(n, len(a.row.answer_token_ids) - less) for a in answers if (n := count(a)) is not None]
    total = sum(tokens for _, tokens in told)
    return round(sum(n for n, _ in told) / total, 4) if total else None


def plain_answers(rows: list[RequestRow]) -> dict[str, list[int]]:
    """The plain arm's first answer to each prompt."""
    return {r.prompt: r.answer_token_ids for r in rows if (r.arm, r.repeat) == (PLAIN, 0)}


def first_repeat(rows: list[RequestRow], arm: str, set_name: str) -> list[RequestRow]:
    """The first answer to each prompt of a drafter's arm; where the engine told rounds one by one,
    those that carry them."""
    assert arm != PLAIN
    first = [
        r for r in rows
        if (r.arm, r.set, r.repeat) == (arm, set_name, 0) and r.answer_token_ids
    ]  # fmt: skip
    return [r for r in first if r.accepted is not None] or first
