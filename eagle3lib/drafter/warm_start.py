"""Training from somebody's drafter: any checkpoint of the right shape, with its own vocabulary map.

A checkpoint's head has one row a token of its own map. Training it under another map would start
with a head whose rows mean other tokens: it loads, it trains, and most of what was bought is gone.
So another map is refused, unless it is asked for; then rows of kept tokens move to their new place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from eagle3lib.drafter.checkpoint import read_drafter, set_vocab
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead


def vocab_of(drafter: Drafter) -> VocabMap:
    return VocabMap(drafter.d2t.cpu(), drafter.t2d.cpu())


def checkpoint_vocab(folder: Path, target: Target, head: TargetHead) -> VocabMap:
    """The map of a drafter's folder, checked with everything else in it."""
    return vocab_of(read_drafter(folder, target.config, head.embedding, torch.bfloat16))


def load_for_training(
    folder: Path,
    target: Target,
    head: TargetHead,
    *,
    vocab: VocabMap | None = None,
    slots: tuple[int, ...] | None = None,
    replace_vocab: bool = False,
) -> Drafter:
    """A drafter in fp32 to go on training, from a folder of any style and kind that is read.

    ``vocab`` and ``slots`` are those that the training works with; both must be the checkpoint's.
    With ``replace_vocab`` another map is taken: rows of the head move with their tokens, tokens
    that are new get the target's own rows (zeros where the drafter has another width). Raises
    ``UserError`` that names both sides; a wrong shape names the tensors.
    """
    drafter = read_drafter(folder, target.config, head.embedding, torch.float32)
    if slots is not None and drafter.config.slots != slots:
        raise UserError(
            f"the checkpoint reads the target's states {list(drafter.config.slots)}, the captured "
            f"ones are {list(slots)}",
            expected="the same slots",
            where=folder,
            next="capture the states that it reads (parameter slots of phase 02), then train: "
            "eagle3 run PROFILE 02 04",
        )
    if vocab is None or _same_map(vocab_of(drafter), vocab):
        return drafter
    if not replace_vocab:
        raise UserError(
            f"the checkpoint has its own vocabulary map ({_compared(vocab_of(drafter), vocab)})",
            expected="that very map: a warm start keeps it",
            where=folder,
            next="build the map from the checkpoint (parameter warm_start of 03_build_vocab_map), "
            "or ask for another one explicitly (replace_vocab)",
        )
    return _with_vocab(drafter, vocab, head.head)


def _same_map(one: VocabMap, other: VocabMap) -> bool:
    return torch.equal(one.t2d, other.t2d)


def _compared(own: VocabMap, other: VocabMap) -> str:
    shared = int((own.t2d & other.t2d).sum()) if own.t2d.shape == other.t2d.shape else 0
    return f"{len(own.d2t)} tokens; the given one has {len(other.d2t)}, {shared} of them the same"


def _with_vocab(drafter: Drafter, vocab: VocabMap, target_head: Tensor) -> Drafter:
    """The same drafter over another map."""
    own, size = vocab_of(drafter), len(vocab.d2t)
    changed = Drafter(replace(drafter.config, draft_vocab_size=size))
    rest = {k: v for k, v in drafter.state_dict().items() if k not in ("lm_head.weight", "d2t")}
    changed.load_state_dict(rest, strict=False)
    with torch.no_grad():
        rows = torch.zeros_like(changed.lm_head.weight)
        if target_head.shape[1] == rows.shape[1]:
            rows.copy_(target_head[vocab.target_ids])
        kept = own.t2d[vocab.target_ids]
        rows[kept] = drafter.lm_head.weight[own.draft_ids[vocab.target_ids[kept]]]
        changed.lm_head.weight.copy_(rows)
    set_vocab(changed, vocab)
    return changed.eval()
