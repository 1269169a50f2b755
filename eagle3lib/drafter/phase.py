"""Phases 03 and 05: the vocabulary map out of counts, the serving folder out of a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from huggingface_hub import ModelCard, ModelCardData

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.checkpoint import read_drafter, write_drafter
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map, count_tokens, coverage_counts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import replace_folder, write_text
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead

_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def answer_counts(rows: list[AnswerRow]) -> Counter[int]:
    """Counts over the answers that are trained on."""
    return count_tokens(row.answer_token_ids for row in rows if row.trained)


def coverage_table(vocab: VocabMap, rows: list[AnswerRow]) -> pd.DataFrame:
    """Share of answer tokens that the draft vocabulary holds, where it was counted and held out."""
    groups = [("workload", "train"), ("workload", "heldout"), ("general", "heldout")]
    out = []
    for name, split in groups:
        answers = [r.answer_token_ids for r in rows if (r.set, r.split) == (name, split)]
        inside, total = coverage_counts(vocab, answers)
        if total:
            out.append(
                {
                    "set": name,
                    "split": split,
                    "tokens": total,
                    "inside": inside,
                    "coverage": inside / total,
                }
            )
    return pd.DataFrame(out)


def coverage_curve(rows: list[AnswerRow], target: Target) -> pd.DataFrame:
    """Held-out coverage by size of the draft vocabulary, and what its head costs (bytes, bf16)."""
    counts, curve = answer_counts(rows), []
    for size in [s for s in _SIZES if s < target.vocab_size] + [target.vocab_size]:
        vocab = build_vocab_map(counts, target.vocab_size, size, target.stop_ids())
        table = coverage_table(vocab, rows)
        for _, line in table[table.split == "heldout"].iterrows():
            curve.append(
                {
                    "draft_vocab_size": size,
                    "set": line["set"],
                    "coverage": line["coverage"],
                    "head_bytes": size * target.hidden_size * 2,
                }
            )
    return pd.DataFrame(curve)


def export_drafter(
    drafter: Drafter, folder: Path, dtype: str, target: Target, trained_on: str
) -> Path:
    """Write the serving folder whole or not at all, with its model card."""

    def build(temporary: Path) -> None:
        write_drafter(temporary, drafter, DTYPES[dtype])
        write_text(temporary / "README.md", _model_card(drafter.config, target, trained_on))

    return replace_folder(folder, build)


def _model_card(config: DrafterConfig, target: Target, trained_on: str) -> str:
    data = ModelCardData(tags=["eagle3", "speculative-decoding"], base_model=target.name)
    body = f"""# EAGLE-3 drafter for {target.name}

One Llama-type layer over the target's states before layers {list(config.slots)}, proposing
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
