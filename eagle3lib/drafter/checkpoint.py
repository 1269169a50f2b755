"""Read and write drafters as SGLang/SpecForge-style folders: config.json and model.safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lib.drafter.config import DrafterConfig, check_drafter_config
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap, check_vocab_map
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.finding import Finding, raise_errors

WEIGHTS = "model.safetensors"
# Both engines also read the layer under this name; vLLM's own trainer writes it.
_RENAME = (("layers.0.", "midlayer."),)


def drafter_tensors(drafter: Drafter, dtype: torch.dtype, *, embeddings: bool) -> dict[str, Tensor]:
    """The checkpoint's tensors. Without embeddings an engine uses the target's (SGLang always
    does)."""
    tensors = {}
    for name, value in drafter.state_dict().items():
        if name.startswith("_rotary") or (name.startswith("embed_tokens") and not embeddings):
            continue
        tensors[name] = (value.to(dtype) if value.is_floating_point() else value).contiguous()
    return tensors


def write_drafter(folder: Path, drafter: Drafter, dtype: torch.dtype) -> None:
    """Write a serving folder into ``folder`` (made by ``replace_folder``, so it appears whole)."""
    tensors = drafter_tensors(drafter, dtype, embeddings=False)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    write_json(
        folder / "config.json", drafter.config.as_hf_config(str(dtype).removeprefix("torch."))
    )


def read_drafter(
    folder: Path, target_config: dict[str, Any], target_embedding: Tensor, dtype: torch.dtype
) -> Drafter:
    """Load a Llama-type drafter; raises ``UserError`` naming what is missing, extra or
    misshapen."""
    config = DrafterConfig.from_folder(folder, target_config["num_hidden_layers"])
    raise_errors(check_drafter_config(config, target_config))
    tensors = _read_weights(folder)
    if "d2t" not in tensors:
        if config.draft_vocab_size != config.vocab_size:
            raise UserError(
                "the drafter has a reduced vocabulary but no d2t tensor",
                expected="d2t [draft_vocab_size] int64",
                where=folder / WEIGHTS,
                next="export it again: engines would silently use ids 0..D-1",
            )
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
    if "t2d" not in tensors:
        tensors["t2d"] = _t2d_from(tensors["d2t"], config.vocab_size)
    raise_errors(check_vocab_map(tensors["d2t"], tensors["t2d"], str(folder / WEIGHTS)))
    tensors.setdefault("embed_tokens.weight", target_embedding)
    drafter = Drafter(config)
    raise_errors(check_tensors(drafter, tensors, str(folder / WEIGHTS)))
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval()


def _t2d_from(d2t: Tensor, vocab_size: int) -> Tensor:
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    ids = torch.arange(len(d2t)) + d2t
    t2d[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return t2d


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.exists():
        raise UserError("the drafter has no weights", expected=WEIGHTS, where=folder)
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise UserError(
            f"the weights can't be read: {error}",
            where=path,
            next="copy the file again, it is cut short",
        ) from None
    for old, new in _RENAME:
        tensors = {
            k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in tensors.items()
        }
    return tensors


def check_tensors(drafter: Drafter, tensors: dict[str, Tensor], where: str) -> list[Finding]:
    """Names and shapes of a checkpoint against the model of its own config."""
    expected = {k: v for k, v in drafter.state_dict().items() if not k.startswith("_rotary")}
    findings = []
    for name in sorted(expected.keys() - tensors.keys()):
        findings.append(
            Finding(
                "tensor-missing",
                "error",
                f"tensor {name} is missing",
                f"shape {tuple(expected[name].shape)}",
                "export it again",
                where,
            )
        )
    for name in sorted(tensors.keys() - expected.keys()):
        findings.append(
            Finding(
                "tensor-unknown",
                "error",
                f"tensor {name} has no place in this model",
                "a Llama-type EAGLE-3 drafter without extra norms",
                "this version reads plain EAGLE-3 checkpoints only",
                where,
            )
        )
    for name in sorted(expected.keys() & tensors.keys()):
        found, wanted = tuple(tensors[name].shape), tuple(expected[name].shape)
        if found != wanted:
            findings.append(
                Finding(
                    "tensor-shape",
                    "error",
                    f"tensor {name} is {found}",
                    f"{wanted}, from config.json",
                    "use weights and config of one export",
                    where,
                )
            )
    return findings


def set_vocab(drafter: Drafter, vocab: VocabMap) -> None:
    drafter.d2t.copy_(vocab.d2t)
    drafter.t2d.copy_(vocab.t2d)
