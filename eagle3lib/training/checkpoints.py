"""Checkpoints of a training: what a resumed run starts from, and the best one so far.

    checkpoints/last/   weights (fp32), optimizer, position: written every so many seconds
    checkpoints/best/   weights with the best acceptance length on held-out answers of the workload

All that a run needs to go on is there: the order of rows is a function of (seed, epoch), the
learning rate one of the update's number, and nothing else is random.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3lib.drafter.checkpoint import drafter_tensors
from eagle3lib.drafter.model import Drafter
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, replace_folder, write_json
from eagle3lib.training.optim import Named

_WEIGHTS, _OPTIMIZER, _STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class Folders:
    """Where a training job reads and writes."""

    phase: Path
    states: Path
    vocab: Path
    answers: Path | None = None  # of phase 01: read where states are live

    @property
    def last(self) -> Path:
        return self.phase / "checkpoints" / "last"

    @property
    def best(self) -> Path:
        return self.phase / "checkpoints" / "best"

    @property
    def metrics(self) -> Path:
        return self.phase / "metrics.jsonl"


@dataclass
class Position:
    """Where a training is."""

    update: int = 0  # updates made
    updates: int = 0  # updates of the whole training
    epoch: int = 0  # epochs finished
    best_length: float = 0.0
    seconds: float = 0.0


def has_checkpoint(folder: Path) -> bool:
    return (folder / _STATE).exists()


def save_checkpoint(
    folder: Path, drafter: Drafter, position: Position, optimizer: Named | None = None
) -> None:
    """Replace ``folder`` in one rename; a kill leaves the old one or the new one."""

    def build(temporary: Path) -> None:
        own = drafter.config.own_embeddings
        tensors = drafter_tensors(drafter, torch.float32, embeddings=own)
        save_file({n: t.cpu() for n, t in tensors.items()}, temporary / _WEIGHTS)
        if optimizer is not None:
            save_file(optimizer, temporary / _OPTIMIZER)
        write_json(temporary / "config.json", drafter.config.as_hf_config("float32"))
        write_json(temporary / _STATE, asdict(position))

    replace_folder(folder, build)


def read_position(folder: Path, updates: int) -> Position:
    """Raises ``UserError`` for a checkpoint of another plan (other data, epochs or batches)."""
    position = Position(**read_json(folder / _STATE))
    if position.updates != updates:
        raise UserError(
            f"the checkpoint is of a training of {position.updates} updates",
            expected=f"{updates} updates, as data and parameters now give",
            where=folder,
            next="delete this folder to train anew",
        )
    return position


def read_weights(folder: Path) -> Named:
    return _read(folder / _WEIGHTS)


def read_optimizer(folder: Path) -> Named:
    return _read(folder / _OPTIMIZER)


def _read(path: Path) -> Named:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"a file of the checkpoint can't be read: {error}",
            where=path,
            next="delete the checkpoint's folder to train from the start",
        ) from None


def load_weights(drafter: Drafter, checkpoint: Path) -> None:
    """Weights of a training checkpoint; the embedding stays as it is (the target's)."""
    missing = drafter.load_state_dict(read_weights(checkpoint), strict=False).missing_keys
    assert all(name.startswith(("embed_tokens", "_rotary")) for name in missing), missing
