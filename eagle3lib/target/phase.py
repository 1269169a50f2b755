"""Phase 02: states of every answered conversation, proven against the answers themselves."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from eagle3lib.data.rows import read_answers
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.machine import cores
from eagle3lib.lab.params import CaptureParams
from eagle3lib.lab.run import Phase
from eagle3lib.target.capture import CaptureResult, capture, teacher_agreement
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead
from eagle3lib.target.states import StateStore


def capture_answers(
    phase: Phase, cfg: CaptureParams, target: Target, slots: tuple[int, ...]
) -> CaptureResult:
    """Capture the states of all answers of phase 01 into ``states/``; resumes at the last shard."""
    torch.set_num_threads(cores())
    rows = read_answers(phase.of("01_generate_data"))
    tokens = sum(len(r.prompt_token_ids) + len(r.answer_token_ids) for r in rows)
    with phase.progress(tokens, "tokens", "hidden states") as bar:
        return capture(
            target,
            rows,
            phase.folder / "states",
            slots=slots,
            dtype=cfg.dtype,
            batch_tokens=cfg.batch_tokens,
            shard_rows=cfg.shard_rows,
            state_format=cfg.state_format,
            on_tokens=bar.update,
        )


def agreement_table(store: StateStore, target: Target, most_rows: int = 60) -> pd.DataFrame:
    """How often lm_head(norm(state)) gives the next served token: for the pre-norm last state,
    which must be near 100 % on greedy answers, and for two wrong states that a bug would store
    instead."""
    head = TargetHead(target)
    kinds = {
        "last, pre-norm (stored)": [0, 0],
        "last, already normed": [0, 0],
        "highest slot": [0, 0],
    }
    for row in store.rows(_spread(store.entries, most_rows)):
        last = row.last.float()
        slot = row.slots[:, -last.shape[1] :].float()
        for name, states in zip(kinds, (last, head.normed(last), slot), strict=True):
            right, total = teacher_agreement(head, row.token_ids, states, row.entry.prompt_tokens)
            kinds[name][0] += right
            kinds[name][1] += total
    return pd.DataFrame(
        [
            {"state": k, "agree": r, "answer tokens": t, "share": r / max(t, 1)}
            for k, (r, t) in kinds.items()
        ]
    )


def _spread(items: list[Any], most: int) -> list[Any]:
    return items[:: max(1, len(items) // most)][:most]


def check_teacher(share: float, floor: float, *, greedy: bool) -> list[Finding]:
    """The stored states must say what the target said; sampled answers may differ from its
    greedy."""
    if share >= floor or not greedy:
        return []
    return [
        Finding(
            "teacher-agreement",
            "error",
            f"the captured states give only {share:.1%} of the served answer tokens",
            f"at least {floor:.0%} for greedy answers (parameter min_teacher_agreement)",
            "check layer, norm and dtype of the capture; compare with the table of wrong states",
            "states",
        )
    ]


def was_greedy(phase: Phase) -> bool:
    """Whether phase 01 asked for greedy answers."""
    manifest = read_json(phase.of("01_generate_data") / "manifest.json")
    return bool(manifest["inputs"]["params"]["temperature"] == 0)
