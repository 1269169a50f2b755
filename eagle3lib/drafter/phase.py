"""Phases 03 and 05: the vocabulary map out of counts, the serving folder out of a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData

from eagle3lib.drafter.checkpoint import read_drafter, write_drafter
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map
from eagle3lib.drafter.warm_start import checkpoint_vocab
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import replace_folder, write_text
from eagle3lib.lab.params import VocabParams, resolve
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead


def make_vocab(
    cfg: VocabParams, target: Target, counts: Counter[int], size: int, forced: dict[int, str]
) -> VocabMap:
    """The map of the run: built from counts and forced ids, or a warm start's own.

    Raises ``UserError`` when a warm start's map and ``draft_vocab_size`` disagree: the rows of the
    checkpoint's head belong to the tokens of its own map.
    """
    if not cfg.warm_start:
        return build_vocab_map(counts, target.vocab_size, size, forced)
    folder = resolve(cfg.warm_start)
    vocab = checkpoint_vocab(folder, target, TargetHead(target))
    if cfg.draft_vocab_size not in (0, len(vocab.d2t)):
        raise UserError(
            f"draft_vocab_size is {cfg.draft_vocab_size}, the checkpoint's own map holds "
            f"{len(vocab.d2t)} tokens",
            expected="0, which keeps the checkpoint's map, or its very size",
            where=folder,
            next="set draft_vocab_size: 0; for another map build it without warm_start, and ask "
            "the training to replace the checkpoint's",
        )
    return vocab


def export_drafter(
    drafter: Drafter, folder: Path, dtype: str, target: Target, trained_on: str
) -> Path:
    """Write the serving folder whole or not at all, with its model card."""

    def build(temporary: Path) -> None:
        write_drafter(temporary, drafter, DTYPES[dtype], target.config)
        write_text(temporary / "README.md", _model_card(drafter.config, target, trained_on))

    return replace_folder(folder, build)


def _model_card(config: DrafterConfig, target: Target, trained_on: str) -> str:
    data = ModelCardData(tags=["eagle3", "speculative-decoding"], base_model=target.name)
    kind = "MLA" if config.mla else "Llama"
    body = f"""# EAGLE-3 drafter for {target.name}

One {kind}-type layer over the target's states before layers {list(config.slots)}, proposing
{config.draft_vocab_size:,} of {config.vocab_size:,} tokens. {trained_on}

    vllm serve TARGET --speculative-config \\
      '{{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}}'

It drafts for this very target (fingerprint {target.fingerprint}); another one will reject its
drafts.
"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


@torch.no_grad()
def export_parity(
    trained: Drafter,
    folder: Path,
    dtype: str,
    target: Target,
    sample: list[Conversation],
    steps: int,
) -> dict[str, Any]:
    """Logits of the drafter in memory against those of the folder read back, same dtype and rows.

    Raises ``UserError`` unless the largest difference is finite. Also says how far the export's
    dtype moved the logits away from the fp32 weights.
    """
    again = read_drafter(folder, target.config, TargetHead(target).embedding, DTYPES[dtype])
    rows = PackedRows.pack([c.token_ids for c in sample], [c.prompt_tokens for c in sample])
    states = torch.cat([c.states for c in sample])

    def logits(drafter: Drafter) -> torch.Tensor:
        made = unroll(drafter, rows, states.to(drafter.fc.weight.dtype), steps, feed="truth")
        return torch.stack([drafter.logits(step.hidden).float() for step in made])

    exact, reloaded = logits(trained), logits(again)
    same = logits(trained.to(DTYPES[dtype]))
    difference = float((same - reloaded).abs().max())
    if not torch.isfinite(reloaded).all():
        raise UserError(
            "the exported drafter's logits are not finite",
            where=folder,
            next="train again with a lower learning_rate, or look at the checkpoint",
        )
    return {
        "positions": int(same.shape[0] * same.shape[1]),
        "max_logit_difference": difference,
        "max_difference_from_fp32": round(float((exact - reloaded).abs().max()), 4),
        "greedy_equal_to_fp32": round(
            float((exact.argmax(-1) == reloaded.argmax(-1)).float().mean()), 4
        ),
    }


def check_parity(parity: dict[str, Any], limit: float, folder: Path) -> None:
    if parity["max_logit_difference"] > limit:
        raise UserError(
            f"the folder read back differs by {parity['max_logit_difference']:.3g} in logits",
            expected=f"at most {limit:g} (parameter max_logit_difference)",
            where=folder,
            next="this is a fault of the export: it does not count as written",
        )
