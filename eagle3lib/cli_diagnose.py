"""``eagle3 diagnose``: the causes of low acceptance of a run, or of anybody's drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.target.smollm2 import NAME

if TYPE_CHECKING:
    from eagle3lib.diagnose.cause import Cause
    from eagle3lib.diagnose.material import Material
    from eagle3lib.lab.params import DiagnoseParams

_USAGE = "eagle3 diagnose RUN, or with --target, --drafter and --prompts"


def diagnose(
    run: Annotated[str, typer.Argument(help="a run; left out with --prompts")] = "",
    target: Annotated[str, typer.Option(help="built-in name, folder or Hub id")] = NAME,
    drafter: Annotated[Path | None, typer.Option(help="folder of a drafter from elsewhere")] = None,
    prompts: Annotated[
        str,
        typer.Option(
            help="prompts to ask --server, or the target itself; or rows of ids answered "
            "before, with their rounds"
        ),
    ] = "",
    server: Annotated[str, typer.Option(help="address of a server with this drafter")] = "",
    steps: Annotated[int, typer.Option(help="K, drafted tokens a round; 0: as recorded")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, as served")] = "bfloat16",
    max_tokens: Annotated[int, typer.Option(help="longest answer asked for")] = 96,
    out: Annotated[Path | None, typer.Option(help="write findings.json here")] = None,
) -> None:
    """Name the causes of low acceptance: of RUN, or of --drafter on --target with --prompts.

    Examples: eagle3 diagnose demo; eagle3 diagnose --target T --drafter D --prompts p.jsonl
    --server http://localhost:8000
    """
    import torch

    from eagle3lib.diagnose.phase import diagnose as diagnosed
    from eagle3lib.diagnose.phase import report_of
    from eagle3lib.lab.machine import cores

    if run and (drafter or prompts or server):
        raise UserError("a run and a drafter from elsewhere are asked for at once", next=_USAGE)
    torch.set_num_threads(cores())
    material, cfg = (
        _of_run(run) if run else _of_prompts(target, drafter, prompts, server, steps, dtype,
                                             max_tokens)
    )  # fmt: skip
    metrics, causes, _ = diagnosed(material, cfg)
    for name in ("acceptance", "speed"):
        print(f"{name}: {metrics['verdicts'][name]}")
    print("\n" + causes_text(causes))
    if out:
        write_json(out, report_of(metrics))


def _of_run(run: str) -> tuple[Material, DiagnoseParams]:
    """A run, with the parameters that its phase 07 was given."""
    from eagle3lib.diagnose.material import read_material
    from eagle3lib.lab.params import DiagnoseParams
    from eagle3lib.lab.run import run_folder
    from eagle3lib.target.folder import open_target

    folder = run_folder(run)
    if not (folder / "manifest.json").exists():
        raise UserError(f"there is no run {run!r}", where=folder, next=_USAGE)
    name = (read_json(folder / "manifest.json").get("target") or {}).get("name")
    if not name:
        raise UserError("the run's manifest names no target", where=folder / "manifest.json")
    given = folder / DiagnoseParams.PHASE / "inputs.json"
    params = read_json(given)["params"] if given.exists() else {}
    chosen = {k: params[k] for k in ("tolerance", "good_acceptance_length") if k in params}
    cfg = DiagnoseParams(run=run, target=name, **chosen)
    return read_material(folder, open_target(name)), cfg


def _of_prompts(
    target: str,
    drafter: Path | None,
    prompts: str,
    server: str,
    steps: int,
    dtype: str,
    max_tokens: int,
) -> tuple[Material, DiagnoseParams]:
    from eagle3lib.diagnose.asked import asked_rows, with_steps
    from eagle3lib.diagnose.live import LiveTarget
    from eagle3lib.diagnose.material import foreign_material
    from eagle3lib.lab.params import DiagnoseParams
    from eagle3lib.lab.phase_params import hub_id
    from eagle3lib.target.folder import open_target
    from eagle3lib.target.model import DTYPES

    if not prompts:
        raise UserError("no prompts", expected="--prompts FILE, or a run", next=_USAGE)
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype} is not known", expected=f"one of {', '.join(DTYPES)}")
    if drafter is not None and not drafter.is_dir():
        raise UserError("there is no folder of a drafter", where=drafter, next=_USAGE)
    live = LiveTarget(open_target(target), dtype)
    source = prompts if hub_id(prompts) else Path(prompts)
    asked = asked_rows(source, live, server, max_tokens)
    rows, found = with_steps(asked.rows, steps)
    material = foreign_material(
        live, drafter, rows, found, answered_by=asked.by, counters=asked.counters
    )
    material.asked, material.server = prompts, server
    return material, DiagnoseParams(target=target)


def causes_text(causes: list[Cause]) -> str:
    """Every cause in a few lines, for a terminal."""
    from eagle3lib.diagnose.phase import verdict_line

    lines = [verdict_line(causes), ""]
    for c in causes:
        cost = "" if c.cost is None else f", costs {c.cost:.2f} tokens a round"
        lines += [f"{c.severity}: {c.title}  [{c.code}; {c.proof}{cost}]", f"  {c.evidence}"]
        lines += [f"  proof:  {c.experiment}"] if c.experiment else []
        lines += [f"  remedy: {c.remedy}"]
        lines += [f"  shows:  {row.kind} {row.id}: {row.shows}" for row in c.rows]
        lines += [f"  run:    {c.command}"] if c.command else []
        for trial in c.trials:
            lines += [f"  try:    {trial.what}: {trial.tells}"]
            lines += [f"          {command}" for command in trial.commands]
    return "\n".join(lines)
