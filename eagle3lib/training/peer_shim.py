"""``python peer_shim.py train OPTIONS``: ``speculators train`` on a machine without an accelerator.

Run by the peer's own interpreter (``.venv-peer``), never imported. speculators 0.9.0 has no choice
of device: its trainer sends the model and every batch to accelerator 0, opens autocast for "cuda"
where there is none, and waits for the accelerator between the marks of its step timer. The package
stays as it is installed; the trainer is told "cpu" in the two fields that it looks at, and there is
nothing to wait for.
"""

from __future__ import annotations

from functools import wraps

import torch
from speculators.__main__ import app
from speculators.train.trainer import Trainer

_own_setup = Trainer.setup_trainer


@wraps(_own_setup)
def _setup_on_cpu(trainer: Trainer) -> None:
    """The first thing that the trainer calls after it has chosen its device."""
    trainer.local_rank = trainer.device_type = "cpu"
    _own_setup(trainer)


if __name__ == "__main__":
    Trainer.setup_trainer = _setup_on_cpu
    torch.accelerator.synchronize = lambda *_, **__: None
    app()
