"""The drafter that a training starts from: fresh, or another one's weights (a warm start)."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3lib.drafter.checkpoint import set_vocab
from eagle3lib.drafter.config import OPTIONS, DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.drafter.warm_start import load_for_training
from eagle3lib.lab.params import TrainParams
from eagle3lib.lab.phase_params import resolve
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead
from eagle3lib.training.checkpoints import load_weights


def new_drafter(
    cfg: TrainParams, target: Target, head: TargetHead, vocab: VocabMap, slots: tuple[int, ...]
) -> Drafter:
    """A fresh drafter over the captured ``slots``: embedding, head rows and final norm start as the
    target's, the rest random.

    The embedding stays the target's (SGLang serves with the target's whatever a checkpoint holds).
    """
    options = {name: getattr(cfg, name) for name in OPTIONS}
    config = DrafterConfig.for_target(
        target.config,
        len(vocab.d2t),
        kind=cfg.drafter_kind,
        slots=slots,
        intermediate_size=cfg.intermediate_size,
        **options,
    )
    generator = torch.Generator().manual_seed(cfg.seed)
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
    """The drafter of folder ``cfg.warm_start`` in fp32, see ``load_for_training``. An embedding of
    its own stays its own, and is not trained further."""
    drafter = load_for_training(
        resolve(cfg.warm_start),
        target,
        head,
        vocab=vocab,
        slots=slots,
        replace_vocab=cfg.replace_vocab_map,
    )
    for parameter in drafter.parameters():
        parameter.requires_grad_(True)
    drafter.embed_tokens.weight.requires_grad_(False)
    return drafter.train()


def trained_drafter(checkpoint: Path, target: Target) -> Drafter:
    """The drafter of a training's checkpoint, fp32, in the shape that its own config says."""
    config = read_drafter_config(checkpoint, target.config["num_hidden_layers"])
    drafter = Drafter(config)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(TargetHead(target).embedding)
    load_weights(drafter, checkpoint)
    return drafter.eval()
