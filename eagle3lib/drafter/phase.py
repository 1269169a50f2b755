"""Phases 03 and 05: the vocabulary map out of counts, the serving folder out of a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from eagle3lib.drafter.card import facts_of_run, model_card
from eagle3lib.drafter.checkpoint import read_drafter, write_drafter
from eagle3lib.drafter.doctor import Diagnosis, EngineChoice, examine
from eagle3lib.drafter.doctor_probe import ask_engine
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map
from eagle3lib.drafter.warm_start import checkpoint_vocab
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import replace_folder, write_text
from eagle3lib.lab.finding import raise_errors
from eagle3lib.lab.params import ExportParams, VocabParams
from eagle3lib.lab.phase_params import resolve
from eagle3lib.lab.run import run_folder
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
    drafter: Drafter, folder: Path, cfg: ExportParams, target: Target, trained_on: str
) -> Path:
    """Write the serving folder whole or not at all, with its model card. Raises ``UserError`` where
    the engines of ``serve_with`` can't be told its layers."""
    about = facts_of_run(
        run_folder(cfg.run),
        target.name,
        target.fingerprint,
        trained_on,
        cfg.base_model,
        cfg.licence,
    )

    def build(temporary: Path) -> None:
        write_drafter(
            temporary,
            drafter,
            DTYPES[cfg.dtype],
            target.config,
            for_sglang=cfg.serve_with == "both",
            max_shard_mib=cfg.max_shard_mib,
        )
        write_text(temporary / "README.md", model_card(drafter.config, about))

    return replace_folder(folder, build)


def served_files(folder: Path) -> list[Path]:
    """Config and weights: what decides a drafter. Its card may be written again (`eagle3 card`)."""
    return [folder / "config.json", *sorted(folder.glob("model*.safetensors*"))]


def check_export(folder: Path, target: Target, cfg: ExportParams) -> Diagnosis:
    """The doctor's examination of what was written, for the engines that it is for. Raises
    ``UserError`` with its errors."""
    engine: EngineChoice = "all" if cfg.serve_with == "both" else "vllm"
    found = examine(folder, target, engine, ask=ask_engine if cfg.ask_engines else None)
    raise_errors(found.findings)
    return found


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
