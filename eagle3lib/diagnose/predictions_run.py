"""The answers of a run, viewed token by token (``predictions.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from eagle3lib.data.rows import read_answers
from eagle3lib.diagnose.live import LiveTarget
from eagle3lib.diagnose.predictions import AnswerView, ToView, view_answer
from eagle3lib.drafter.checkpoint import read_drafter
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import finished_run
from eagle3lib.lab.files import read_json
from eagle3lib.lab.machine import cores
from eagle3lib.measure.arms import OWN, drafter_folder, exported_drafter, read_requests
from eagle3lib.target.folder import Target
from eagle3lib.target.images import shows_images
from eagle3lib.target.model import DTYPES, TargetHead

Source = Literal["served", "heldout", "train"]


@dataclass(frozen=True)
class RunViews:
    """``of``: how many answers there are; ``views`` are those that were asked for. ``images``: how
    many of them are never viewed, since their prompts show images, which a text model can't see."""

    views: list[AnswerView]
    of: int
    steps: int  # K
    dtype: str
    slots: tuple[int, ...]
    source: Source
    images: int = 0


def answers_to_view(run: str, source: Source, arm: str = OWN) -> list[ToView]:
    """``served``: the first answers of a drafter's arm of the benchmark, and its rounds where the
    engine told them one by one; ``heldout`` and ``train``: answers of phase 01.

    Raises ``UserError`` for a run that lacks the phase, or an empty choice.
    """
    phase = "06_benchmark_serving" if source == "served" else "01_generate_data"
    place = finished_run(run, phase) / phase
    if source == "served":
        items = [
            ToView(r.prompt, r.set, r.prompt_token_ids, r.answer_token_ids, r.accepted, r.drafted)
            for r in read_requests(place)
            if (r.arm, r.repeat) == (arm, 0)
        ]
    else:
        items = [
            ToView(r.id, r.set, r.prompt_token_ids, r.answer_token_ids)
            for r in read_answers(place)
            if r.split == source
        ]
    items = [item for item in items if item.answer_token_ids]
    if not items:
        raise UserError(
            f"run {run!r} has no {source} answers", where=place, next="choose another source"
        )
    return items


def view_run(
    run: str,
    target: Target,
    source: Source,
    most: int = 0,
    arm: str = OWN,
    on_answer: Callable[[int], None] = lambda n: None,
) -> RunViews:
    """View ``most`` answers of a run (0: all), evenly picked over both prompt sets, with the
    drafter of ``arm``.

    Cost an answer: one forward of the target, K drafter steps from every token, and both heads.
    """
    folder, its_drafter = finished_run(run), _drafter_of(run, arm)
    found = answers_to_view(run, source, arm)
    items = [item for item in found if not shows_images(target, item.prompt_token_ids)]
    if not items:
        raise UserError(
            f"the prompts of all {len(found)} {source} answers of run {run!r} show images",
            where=folder,
            expected="text alone: the target's forward here is its text model's",
            next="choose another source",
        )
    picked = items if not most else [items[i * len(items) // most] for i in range(most)]
    picked = list({item.id: item for item in picked}.values())
    steps, dtype = served_as(folder)
    torch.set_num_threads(cores())
    head, states_of = TargetHead(target, dtype), LiveTarget(target, dtype)
    drafter = read_drafter(its_drafter, target.config, head.embedding, DTYPES[dtype])
    views = []
    for item in picked:
        views.append(view_answer(item, drafter, head, states_of, steps))
        on_answer(1)
    images = len(found) - len(items)
    return RunViews(views, len(found), steps, dtype, drafter.config.slots, source, images)


def _drafter_of(run: str, arm: str) -> Path:
    """The folder of an arm's drafter, the phase that it comes with finished: a run that names its
    drafter has no export."""
    folder = finished_run(run)
    found = drafter_folder(folder, arm)
    is_own = found == exported_drafter(folder)
    finished_run(run, "05_export_drafter" if is_own else "06_benchmark_serving")
    return found


def served_as(folder: Path) -> tuple[int, str]:
    """(K, dtype) of the benchmark; before there is one, K of the training's evaluations and the
    dtype of the captured states."""
    benchmark = folder / "06_benchmark_serving"
    if (benchmark / "manifest.json").exists():
        metrics = read_json(benchmark / "metrics.json")
        return int(metrics["num_speculative_tokens"]), str(metrics["dtype"])
    trained = read_json(folder / "04_train_drafter" / "inputs.json")["params"]
    captured = read_json(folder / "02_capture_hidden_states" / "inputs.json")["params"]
    return int(trained["num_speculative_tokens"]), str(captured["dtype"])
