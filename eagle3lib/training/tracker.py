"""Metrics: always ``metrics.jsonl``, and one of trackio, tensorboard or wandb beside it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_jsonl, write_text
from eagle3lib.lab.params import TrainParams

Row = dict[str, Any]
_MODULES = {
    "trackio": "trackio",
    "tensorboard": "torch.utils.tensorboard",  # needs the package tensorboard
    "wandb": "wandb",
}


class Tracker:
    """Writes rows on rank 0, and nothing on the others."""

    def __init__(self, cfg: TrainParams, metrics: Path, *, writes: bool):
        self._metrics, self._writes = metrics, writes
        self._kind: str = cfg.tracker if writes else "none"
        self._run: Any = _open(cfg, metrics.parent) if self._kind != "none" else None

    def truncate(self, update: int, *, keep: bool) -> None:
        """Forget rows after ``update`` (they are made again); without ``keep`` forget all."""
        if self._writes:
            rows = [r for r in read_jsonl(self._metrics) if keep and r["update"] <= update]
            write_text(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, row: Row) -> None:
        if not self._writes:
            return
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._kind == "tensorboard":
            for name, value in scalars(row).items():
                self._run.add_scalar(name, value, row["update"])
        elif self._run is not None:
            self._run.log(scalars(row), step=row["update"])

    def close(self) -> None:
        if self._kind == "tensorboard":
            self._run.close()
        elif self._run is not None:
            self._run.finish()


def _open(cfg: TrainParams, folder: Path) -> Any:
    try:
        module = importlib.import_module(_MODULES[cfg.tracker])
    except ImportError:
        raise UserError(
            f"tracker is {cfg.tracker}, and its package is not installed",
            expected=f"the package {cfg.tracker}, or tracker: none",
            next=f"pip install {cfg.tracker}",
        ) from None
    if cfg.tracker == "tensorboard":
        return module.SummaryWriter(str(folder / "tensorboard"))
    return module.init(project="eagle3", name=cfg.run, config=cfg.model_dump(mode="json"))


def scalars(row: Row) -> dict[str, float]:
    """The numbers of a row under flat names: ``train/loss/step1``, ``heldout/workload/length``."""
    if row["kind"] == "train":
        found = {f"train/{k}": row[k] for k in ("learning_rate", "grad_norm", "tokens_per_s")}
        for number, step in enumerate(row["steps"], start=1):
            found[f"train/loss/step{number}"] = step["loss"]
            found[f"train/right/step{number}"] = step["right"] / max(step["inside"], 1)
        return found
    found = {}
    for name, counts in row["sets"].items():
        found[f"heldout/{name}/length"] = counts["acceptance_length"]
    for name, estimate in row.get("estimates", {}).items():
        for kind in ("top1", "sampled"):
            found[f"heldout/{name}/{kind}_length"] = estimate[f"{kind}_length"]
    return {name: value for name, value in found.items() if value is not None}
