"""The drafter that a training starts from: fresh, or another one's weights (a warm start)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from eagle3lib.drafter.checkpoint import read_drafter, set_vocab
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams, resolve
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead
from eagle3lib.training.checkpoints import load_weights


def new_drafter(
    target: Target, head: TargetHead, vocab: VocabMap, slots: tuple[int, ...], seed: int
) -> Drafter:
    """A fresh drafter: embedding, head rows and final norm start as the target's, the rest random.

    The embedding stays the target's (SGLang serves with the target's whatever a checkpoint holds).
    """
    config = DrafterConfig.for_target(target.config, len(vocab.d2t))
    _check_slots(slots, config.slots, "the drafter's")
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and not name.startswith("embed_tokens"):
                parameter.normal_(0.0, 0.02, generator=generator)
        drafter.embed_tokens.weight.copy_(head.embedding)
        drafter.lm_head.weight.copy_(head.head[vocab.target_ids])
        drafter.norm.weight.copy_(head.norm)
    drafter.embed_tokens.weight.requires_grad_(False)
    set_vocab(drafter, vocab)
    return drafter


def warm_drafter(
    cfg: TrainParams, target: Target, head: TargetHead, vocab: VocabMap, slots: tuple[int, ...]
) -> Drafter:
    """The drafter of folder ``cfg.warm_start`` in fp32.

    Raises ``UserError`` for tensors of another shape or name, for other slots, and for a vocabulary
    map that is not phase 03's. With ``replace_vocab_map`` the head is seated anew on phase 03's:
    rows of tokens that both hold are kept, the others are the target's.
    """
    folder = resolve(cfg.warm_start)
    drafter = read_drafter(folder, target.config, head.embedding, torch.float32)
    _check_slots(slots, drafter.config.slots, f"those of {folder}")
    own = VocabMap(drafter.d2t, drafter.t2d)
    if not torch.equal(own.t2d, vocab.t2d):
        if not cfg.replace_vocab_map:
            both = int((own.t2d & vocab.t2d).sum())
            raise UserError(
                f"phase 03's map holds {len(vocab.d2t):,} tokens, {both:,} of them in the warm "
                "start's",
                expected=f"the warm start's own map of {len(own.d2t):,} tokens",
                where=folder,
                next="build phase 03 from this drafter's map, or set replace_vocab_map: true",
            )
        drafter = _reseated(drafter, own, vocab, head)
    for parameter in drafter.parameters():
        parameter.requires_grad_(True)
    drafter.embed_tokens.weight.requires_grad_(False)
    return drafter.train()


def trained_drafter(checkpoint: Path, target: Target) -> Drafter:
    """The drafter of a training's checkpoint, fp32, in the shape that its own config says."""
    config = DrafterConfig.from_folder(checkpoint, target.config["num_hidden_layers"])
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(TargetHead(target).embedding)
    load_weights(drafter, checkpoint)
    return drafter.eval()


def _reseated(drafter: Drafter, own: VocabMap, vocab: VocabMap, head: TargetHead) -> Drafter:
    """The same drafter with a head of another draft vocabulary."""
    rows = head.head[vocab.target_ids].clone()
    before = own.draft_ids[vocab.target_ids]
    rows[before >= 0] = drafter.lm_head.weight.detach()[before[before >= 0]]
    made = Drafter(replace(drafter.config, draft_vocab_size=len(rows)))
    kept = {k: v for k, v in drafter.state_dict().items() if not k.startswith(("d2t", "lm_head"))}
    made.load_state_dict(kept | {"d2t": vocab.d2t, "t2d": vocab.t2d, "lm_head.weight": rows})
    return made


def _check_slots(captured: tuple[int, ...], wanted: tuple[int, ...], whose: str) -> None:
    if captured != wanted:
        raise UserError(
            f"states were captured at slots {list(captured)}",
            expected=f"{list(wanted)}, {whose}",
            next="eagle3 run PROFILE 02",
        )
