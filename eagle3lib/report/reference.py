"""docs/reference/: parameters and artefacts, written from the models that own them.

    python -m eagle3lib.report.reference            write both pages (make docs)

A test compares the pages with what this module would write, so they can't be stale.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator

from eagle3lib.data.prompts import Reject
from eagle3lib.diagnose.cause import Cause
from eagle3lib.engine.bench_serve import BenchServe
from eagle3lib.engine.records import RoundCounts
from eagle3lib.engine.servers import ServerState
from eagle3lib.engine.settings import ServeParams
from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.files import write_text
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.manifest import PhaseInputs, PhaseManifest, RunManifest, WholePhase
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.progress import ProgressFile
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.profile import ArmProfile
from eagle3lib.target.states import StateEntry

FOLDER = ROOT / "docs" / "reference"
_MADE = "*Written by `make docs` from the code. Edit the models, not this page.*"
# File -> the class whose fields one line, or one entry, of it has.
_ARTEFACTS: dict[str, tuple[type, ...]] = {
    "manifest.json of a run": (RunManifest, WholePhase),
    "manifest.json of a phase": (PhaseManifest,),
    "inputs.json of a phase": (PhaseInputs,),
    "progress.json of a phase that runs": (ProgressFile,),
    "01_generate_data/rejects.jsonl": (Reject,),
    "02_capture_hidden_states/states/index.json, under conversations": (StateEntry,),
    "06_benchmark_serving/requests.jsonl, sweeps.jsonl": (RequestRow, RoundCounts),
    "06_benchmark_serving/outside.jsonl, beside arm, point and prompts": (BenchServe,),
    "07_diagnose_acceptance/findings.json, under findings": (Cause,),
    "profile/profile.json of eagle3 profile, under arms": (ArmProfile,),
    "outputs/.servers/ID.json": (ServerState,),
}


def parameters_page() -> str:
    """Every parameter of every phase, explorer and server: type, default, limits, help."""
    parts = [
        "# Parameters",
        _MADE,
        "A profile sets them (`params/NAME.yaml`: `common:` and a section a phase), the command "
        "line stands above it. *Free*: another value reruns nothing. *Grows*: a larger value keeps "
        "what is there and adds to it. Any other change makes the phase, and those after it, run "
        "again.",
    ]
    for name, model in (PHASES | EXPLORERS).items():
        parts += [f"## {name}", _parameters(model)]
    parts += [
        "## eagle3 serve",
        "Also the words of a phase's `engine_settings`, `vllm_settings` and `sglang_settings`, but "
        "for those that the phase has parameters for.",
        _parameters(ServeParams),
    ]
    return "\n\n".join(parts) + "\n"


def _parameters(model: type[BaseModel]) -> str:
    free, growing = getattr(model, "FREE", ()), getattr(model, "GROWING", ())
    rows = []
    for name, info in model.model_fields.items():
        note = "free" if name in free else "grows" if name in growing else ""
        # A validator is code, shown with its address in memory: what it takes stands in the help.
        rules = [rule for rule in info.metadata if not isinstance(rule, BeforeValidator)]
        limits = ", ".join(map(_limit, rules))
        row = (f"`{name}`", _type(info.annotation), _code(info.default), limits, note)
        rows.append((*row, info.description or ""))
    return _table(("parameter", "type", "default", "limits", "", "what it is"), rows)


def _limit(rule: Any) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(rule, n):g}" for n, sign in signs.items() if hasattr(rule, n)]
    return found[0] if found else str(rule)


def artefacts_page() -> str:
    """The fields of every file of a run that has a model behind it."""
    parts = [
        "# Artefacts",
        _MADE,
        "Records within a run's files, field by field. The whole folder, the rows of "
        "`answers.jsonl` and the arithmetic are in [formats.md](../formats.md), an update's line "
        "of `metrics.jsonl` in [training.md](../training.md), a drafter's `config.json` in "
        "[engines.md](../engines.md). A field with a default may be left out.",
    ]
    for file, models in _ARTEFACTS.items():
        parts.append(f"## {file}")
        for model in models:
            where = Path(inspect.getfile(model)).relative_to(ROOT)
            said = " ".join((model.__doc__ or "").split()).replace("``", "`")
            parts += [f"`{model.__name__}` in `{where}`. {said}", _fields(model)]
    return "\n\n".join(parts) + "\n"


def _fields(model: type) -> str:
    comments = {}
    for parent in reversed([c for c in model.__mro__ if c is not object]):
        found = re.findall(r"^    (\w+): [^\n#]*#\s*(.+)$", inspect.getsource(parent), re.MULTILINE)
        comments |= dict(found)
    types = get_type_hints(model)
    rows = []
    for entry in fields(model):
        made = entry.default_factory is not MISSING
        default = entry.default_factory() if made else entry.default  # type: ignore[misc]
        shown = "" if default is MISSING else _code(default)
        rows.append(
            (
                f"`{entry.name}`",
                _type(types[entry.name]),
                shown,
                comments.get(entry.name, "").replace("``", "`"),
            )
        )
    return _table(("field", "type", "default", "what it is"), rows)


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(str(value) for value in annotation.__args__)
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = str(annotation) if get_origin(annotation) else text  # list[int], not list
    return text.replace(" | ", " or ").replace("typing.", "")


def _code(value: Any) -> str:
    return f"`{value!r}`" if value != "" else '`""`'


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines
    )


PAGES = {"parameters.md": parameters_page, "artefacts.md": artefacts_page}


def write_reference() -> list[Path]:
    """Write the pages; returns their paths."""
    for name, page in PAGES.items():
        write_text(FOLDER / name, page())
    return [FOLDER / name for name in PAGES]


if __name__ == "__main__":
    print(*write_reference(), sep="\n")
