"""The explorer notebooks under ``notebooks/explore/``: their parameters, and the run they look at.

An explorer changes no artefact of a run; it is rendered to outputs/RUN/explore/NAME.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.phase_params import NotebookParams
from eagle3lib.lab.run import existing_run, run_folder

# Told by its word as a parameter; measure/arms.py names the arms.
WhichDrafter = Literal["own", "reference"]
_WHICH_DRAFTER = "own, or reference, the benchmark's second arm with a drafter"


class HiddenStatesParams(NotebookParams):
    PHASE: ClassVar[str] = "explore/hidden_states"

    layers: Literal["all", "stored"] = Field(
        "all", description="all (runs the target here), or stored, the slots of phase 02 alone"
    )
    conversations: int = Field(16, ge=2, description="conversations that are read, evenly picked")
    positions: int = Field(
        512, ge=32, description="answer positions that lens and similarities are of, evenly picked"
    )
    num_speculative_tokens: int = Field(3, ge=1, le=16, description="K of the simulator")
    ablation_slots: str = Field(
        "first,default,last",
        description="slots to train on, as 2-15-27 or first, default, last",
    )
    ablation_epochs: int = Field(
        0, ge=0, description="passes of each short training with other slots, 0 trains none"
    )
    ablation_tokens: int = Field(
        4000, ge=200, description="answer tokens that each of these trainings sees a pass"
    )


class AcceptanceCurvesParams(NotebookParams):
    PHASE: ClassVar[str] = "explore/acceptance_curves"

    drafter: WhichDrafter = Field("own", description=_WHICH_DRAFTER)
    more_runs: str = Field(
        "", description="other runs drawn beside the published figures, parted by commas"
    )
    most_steps: int = Field(8, ge=1, le=16, description="largest K of the expected speed-ups")
    most_concurrency: int = Field(
        64, ge=1, description="most requests in flight of the expected speed-ups"
    )


class DrafterPredictionsParams(NotebookParams):
    PHASE: ClassVar[str] = "explore/drafter_predictions"

    drafter: WhichDrafter = Field("own", description=_WHICH_DRAFTER)
    source: Literal["served", "heldout", "train"] = Field(
        "served", description="served (the benchmark's answers), heldout or train (phase 01's)"
    )
    answers: int = Field(100, ge=0, description="most answers that are viewed, 0 for all")
    page_megabytes: float = Field(
        10.0, gt=0, description="most data in the page, answers beyond it are counted, not drawn"
    )


class CompareRunsParams(NotebookParams):
    PHASE: ClassVar[str] = "explore/compare_runs"

    runs: str = Field(
        "", description="runs that are compared with the first one, run, parted by commas"
    )
    resamples: int = Field(2000, ge=200, description="draws of the bootstrap over prompts")


EXPLORERS: dict[str, type[NotebookParams]] = {
    model.PHASE.removeprefix("explore/"): model
    for model in (
        HiddenStatesParams,
        AcceptanceCurvesParams,
        DrafterPredictionsParams,
        CompareRunsParams,
    )
}


def explorer(name: str) -> type[NotebookParams]:
    """The parameters of an explorer by its name. Raises ``UserError`` that lists the known ones."""
    if name not in EXPLORERS:
        raise UserError(f"no explorer {name!r}", expected=f"one of: {', '.join(EXPLORERS)}")
    return EXPLORERS[name]


def explore_folder(run: str) -> Path:
    return run_folder(run) / "explore"


def finished_run(run: str, *phases: str) -> Path:
    """The folder of a run whose ``phases`` are whole. Raises ``UserError`` that names what it lacks
    and the command that makes it."""
    folder = existing_run(run)
    lacking = [name for name in phases if not (folder / name / "manifest.json").exists()]
    if lacking:
        numbers = " ".join(name.split("_")[0] for name in lacking)
        raise UserError(
            f"run {run!r} has not finished {', '.join(lacking)}",
            expected=f"{', '.join(phases)}, done",
            where=folder,
            next=f"eagle3 run PROFILE run={run} {numbers}   (PROFILE: the run's own, such as demo)",
        )
    return folder
