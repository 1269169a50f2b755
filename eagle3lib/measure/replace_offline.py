"""The offline half of ``eagle3 gate``: both drafters replayed along a run's held-out answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.drafter.simulate import Conversation, simulate
from eagle3lib.lab.machine import cores
from eagle3lib.measure.replace import PairedRounds
from eagle3lib.target.folder import Target
from eagle3lib.target.forward import forward_states
from eagle3lib.target.images import check_text
from eagle3lib.target.model import DTYPES, TargetHead, load_target


def offline_pairs(
    rows: Sequence[AnswerRow],
    target: Target,
    old: Path,
    new: Path,
    *,
    dtype: str,
    steps: int,
    on_answer: Callable[[int], None] = lambda n: None,
) -> list[PairedRounds]:
    """Rounds of both drafters on each answer, K = ``steps``. The target's states are made once for
    each drafter's own slots. Cost: one forward of the target an answer and drafter. Raises
    ``UserError`` for an answer to images: the text model can't see them."""
    for row in rows:
        check_text(target, row.prompt_token_ids + row.answer_token_ids, row.id)
    torch.set_num_threads(cores())
    model, head = load_target(target, dtype), TargetHead(target, dtype)
    drafters = [
        read_drafter(folder, target.config, head.embedding, DTYPES[dtype]) for folder in (old, new)
    ]
    pairs = []
    for row in rows:
        ids, prompt = row.prompt_token_ids + row.answer_token_ids, len(row.prompt_token_ids)
        found: list[int] = []
        for drafter in drafters:
            states = forward_states(model, [ids], drafter.config.slots)[0]
            item = Conversation(torch.tensor(ids), prompt, states[:, :-1].flatten(1))
            accepted = simulate(drafter, [item], steps)[0].accepted
            found += [len(accepted), sum(accepted)]
        pairs.append(PairedRounds(*found))
        on_answer(1)
    return pairs
