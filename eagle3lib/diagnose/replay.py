"""The engine's rounds beside the simulator's, on the very answers that the engine gave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib.diagnose.live import StatesOf, live_states
from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.drafter.simulate import Conversation, Replay, simulate
from eagle3lib.lab.machine import cores
from eagle3lib.measure.accounting import Counts
from eagle3lib.measure.arms import PLAIN, RequestRow
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead


@dataclass(frozen=True)
class ReplayedAnswer:
    """One answer: what the engine recorded, what the simulator says, and what it could have
    drafted."""

    row: RequestRow
    simulated: Replay
    teacher_right: int  # answer tokens that are the captured states' own greedy choice
    inside_vocab: int  # answer tokens after the first that the draft vocabulary holds
    parted_gap: float | None  # nats between the arms' tokens where their answers part; None: equal

    def round_pairs(self) -> list[tuple[int, int, bool]]:
        """(engine's accepted, simulator's accepted, is the cut last round), round by round.

        Compared up to the first round that differs: after it the two stand at different positions.
        """
        assert self.row.accepted is not None
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
    target: Target,
    drafter_folder: Path,
    *,
    dtype: str,
    steps: int,
    plain: dict[str, list[int]] | None = None,
    states_of: StatesOf | None = None,
    on_answer: Callable[[int], None] = lambda n: None,
) -> list[ReplayedAnswer]:
    """Capture the states of the engine's answers and replay greedy speculation along them.

    ``rows``: requests of one drafter's arm, one repeat, each with the engine's round record;
    ``dtype`` as served. States come one conversation at a time, as in the engine with one request
    at a time.
    """
    torch.set_num_threads(cores())
    head, states_of = TargetHead(target, dtype), states_of or live_states(target, dtype)
    drafter = read_drafter(drafter_folder, target.config, head.embedding, DTYPES[dtype])
    out = []
    for row in rows:
        ids, prompt = row.prompt_token_ids + row.answer_token_ids, len(row.prompt_token_ids)
        states = states_of(ids, drafter.config.slots)
        tokens = torch.tensor(ids)
        replay = simulate(
            drafter, [Conversation(tokens, prompt, states[:, :-1].flatten(1))], steps
        )[0]
        log_probs = head.logits(states[prompt - 1 : -1, -1]).float().log_softmax(-1)
        answer = tokens[prompt:]
        out.append(
            ReplayedAnswer(
                row=row,
                simulated=replay,
                teacher_right=int((log_probs.argmax(-1) == answer).sum()),
                inside_vocab=int(drafter.t2d[answer[1:]].sum()),
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
    """Engine and simulator pooled over the same answers, and how many rounds are equal."""
    engine, simulator = Counts(), Counts()
    # A record of more steps than were asked for is to be diagnosed, not to be died of.
    width = max([steps, *(n for a in answers for n in a.row.accepted or [])])
    compared = equal = cut = 0
    for answer in answers:
        tokens = len(answer.row.answer_token_ids)
        engine.add(tokens, answer.row.accepted or [], answer.row.drafted or [], width)
        ours = answer.simulated.accepted
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
        "answers_equal": sum(all(a == b or c for a, b, c in x.round_pairs()) for x in answers),
        "teacher_agreement": _share(answers, lambda a: a.teacher_right, 0),
        "vocab_coverage": _share(answers, lambda a: a.inside_vocab, 1),
        "parted_from_plain": len(gaps),
        "largest_parted_gap": round(max(gaps), 4) if gaps else None,
    }


def _share(
    answers: list[ReplayedAnswer], count: Callable[[ReplayedAnswer], int], less: int
) -> float | None:
    total = sum(len(a.row.answer_token_ids) - less for a in answers)
    return round(sum(count(a) for a in answers) / total, 4) if total else None


def plain_answers(rows: list[RequestRow]) -> dict[str, list[int]]:
    """The plain arm's first answer to each prompt."""
    return {r.prompt: r.answer_token_ids for r in rows if (r.arm, r.repeat) == (PLAIN, 0)}


def first_repeat(rows: list[RequestRow], arm: str, set_name: str) -> list[RequestRow]:
    """The first answer to each prompt of a drafter's arm that carries a round record."""
    assert arm != PLAIN
    return [
        r for r in rows if (r.arm, r.set, r.repeat) == (arm, set_name, 0) and r.accepted is not None
    ]
