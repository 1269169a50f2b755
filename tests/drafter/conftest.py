"""Drafter folders made on the fly, and what is done to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib import cli
from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.target.model import TargetHead


class Folder:
    """A drafter's folder that a test spoils."""

    def __init__(self, path: Path, drafter: Any):
        self.path, self.drafter = path, drafter

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.path / "config.json").read_text())

    def change(self, **changes: Any) -> Folder:
        """Set keys of config.json; None takes one out."""
        config = self.config | changes
        kept = {k: v for k, v in config.items() if not (k in changes and v is None)}
        (self.path / "config.json").write_text(json.dumps(kept))
        return self

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path / "model.safetensors")

    def put(self, *without: str, **tensors: torch.Tensor) -> Folder:
        """Set tensors (``__`` in a name is a dot), take others out."""
        kept = {k: v for k, v in self.tensors.items() if k not in without}
        named = {k.replace("__", "."): v.contiguous() for k, v in tensors.items()}
        save_file(kept | named, self.path / "model.safetensors")
        return self


@pytest.fixture(scope="module")
def target_head(tiny_target):
    return TargetHead(tiny_target)


@pytest.fixture
def make_folder(random_drafter, target_head, tiny_target, tmp_path):
    """``make_folder(**config) -> Folder``; 90 of 300 tokens, the target's embeddings."""

    def make(name: str = "drafter", **changes: Any) -> Folder:
        theirs = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        drafter = random_drafter(20, **({"draft_vocab_size": 90} | theirs | changes))
        if not changes.get("own_embeddings"):
            drafter.embed_tokens.weight.data.copy_(target_head.embedding)
        (tmp_path / name).mkdir()
        write_drafter(tmp_path / name, drafter, torch.float32, tiny_target.config)
        return Folder(tmp_path / name, drafter)

    return make


@pytest.fixture
def eagle3(monkeypatch, capsys):
    """Runs the command in this process: (exit code, what it printed, its errors)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["eagle3", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return stopped.value.code or 0, out, err

    return run
