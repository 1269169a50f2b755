"""``eagle3``: the command line. It runs the notebooks themselves; nothing here computes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from eagle3lib import (
    cli_campaign,
    cli_diagnose,
    cli_drafter,
    cli_explore,
    cli_measure,
    cli_profile,
    cli_serve,
)
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.notebooks import NotebookError, write_parameter_cells
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import load_profile, parse_arguments, phase_name
from eagle3lib.target.smollm2 import NAME

app = typer.Typer(
    name="eagle3",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="EAGLE-3 drafters: from a target to a served, measured, explained speed-up.",
)


@app.command()
def run(
    profile: Annotated[str, typer.Argument(help="a profile: a name in params/, or a .yaml file")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PHASE|NAME=VALUE]...", help="phases, values")
    ] = None,
    force: Annotated[
        bool, typer.Option(help="run notebooks also when done; whole artefacts are kept")
    ] = False,
) -> None:
    """Run all phases of PROFILE, or those named. What is done and unchanged is skipped.

    Examples: eagle3 run demo; eagle3 run demo 04_train_drafter epochs=3; eagle3 run demo 06 07
    """
    from eagle3lib.report.runner import run_profile

    phases, overrides = parse_arguments(words or [])
    params = load_profile(profile, phases, overrides)
    try:
        run_profile(params, phases or list(PHASES), force=force)
    except KeyboardInterrupt:
        print("\neagle3: interrupted; run the same command again to continue", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def report(
    profile: Annotated[str, typer.Argument(help="a profile, or the name of a run")],
    copy_to: Annotated[
        Path | None, typer.Option(help="write a small copy here, figures drawn through a CDN")
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="one zip to send: reports, metrics, parameters, no weights")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option(help="write the page's figures into this folder")
    ] = None,
    format: Annotated[str, typer.Option(help="png, pdf or svg, of --figures")] = "png",
) -> None:
    """Render a run's notebooks and write its page again."""
    from eagle3lib.report.bundle import write_bundle, write_figures
    from eagle3lib.report.page import build_page

    run = _run_name(profile)
    print(build_page(run, copy_to=copy_to))
    if bundle:
        print(write_bundle(run, bundle))
    if figures:
        print("\n".join(str(path) for path in write_figures(run, figures, format)))


@app.command()
def status(
    profile: Annotated[str, typer.Argument(help="a profile, or the name of a run")] = "demo",
) -> None:
    """Show every phase and gate of a run, what was decided, and the next command."""
    from eagle3lib.report.campaign import status_text

    print(status_text(_run_name(profile)))


@app.command()
def params(
    phase: Annotated[
        str | None, typer.Argument(help="a phase, or explore/NAME; all, if left out")
    ] = None,
) -> None:
    """List the parameters with type, default and help."""
    models = PHASES | {model.PHASE: model for model in EXPLORERS.values()}
    chosen = list(models) if phase is None else [phase if phase in models else phase_name(phase)]
    for name in chosen:
        print(name)
        for field, info in models[name].model_fields.items():
            print(f"  {field:32} {info.default!r:38} {info.description}")


@app.command()
def tokens(
    file: Annotated[Path, typer.Argument(help="answers.jsonl of a run, or JSONL with messages")],
    row: Annotated[int, typer.Option(help="which row, counted from 1")] = 1,
    target: Annotated[str, typer.Option(help="built-in name, folder or Hub id")] = NAME,
    thinking: Annotated[
        bool | None, typer.Option(help="the template's switch, its own default if left out")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option(help="run the code that a tokenizer brings with it, Kimi's does")
    ] = False,
) -> None:
    """Print a row with its trained tokens marked; a prompt that differs from the template first."""
    from eagle3lib.data.template import load_chat_template, thinking_arguments
    from eagle3lib.data.tokens_view import read_row, row_text, view_row
    from eagle3lib.target.folder import open_target

    found = read_row(file, row)
    opened = open_target(target)
    template = load_chat_template(
        opened.folder,
        opened.stop_ids(),
        thinking_arguments(thinking),
        trust_remote_code=trust_remote_code,
    )
    views = view_row(found, template, f"row {row} of {file.name}")
    print("\n\n".join(row_text(v, template, colour=sys.stdout.isatty()) for v in views))


@app.command()
def plan(
    target: Annotated[str, typer.Argument(help="a profile, a folder, a config.json or a Hub id")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="values of 00_plan")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the numbers as JSON")] = False,
    engines: Annotated[bool, typer.Option(help="ask the installed engines (20 s)")] = True,
) -> None:
    """What a target costs, whether it fits, and whether speculation pays; from its config alone.

    Exits with 2 when the plan can't fit. Example: eagle3 plan Qwen/Qwen3-8B gpu=h100 epochs=3
    """
    import json

    from eagle3lib.lab.finding import raise_errors
    from eagle3lib.plan.command import plan_of
    from eagle3lib.plan.plan import plan_text

    made = plan_of(target, words or [], engines=engines)
    found = {"findings": [f.as_dict() for f in made.findings]}
    print(json.dumps(made.numbers | found, indent=2) if as_json else plan_text(made))
    raise_errors(made.findings)


@app.command()
def notebooks(
    check: Annotated[
        bool, typer.Option(help="change nothing, exit 1 when a cell is out of step")
    ] = False,
) -> None:
    """Write the notebooks' parameter cells from the parameter models."""
    changed = write_parameter_cells(check_only=check)
    for name in changed:
        print(f"{name}: {'out of step, run: eagle3 notebooks' if check else 'written'}")
    if check and changed:
        raise typer.Exit(1)


for _command in (
    cli_serve.serve,
    cli_serve.ps,
    cli_serve.stop,
    cli_drafter.convert,
    cli_drafter.doctor,
    cli_drafter.card,
    cli_measure.watch,
    cli_measure.gate,
    cli_profile.profile,
    cli_diagnose.diagnose,
    cli_explore.explore,
    cli_campaign.note,
    cli_campaign.clean,
):
    app.command()(_command)


def _run_name(profile_or_run: str) -> str:
    """A profile's run, or the word itself when it is no profile."""
    try:
        return load_profile(profile_or_run)["00_plan"].run
    except UserError:
        if Path(profile_or_run).suffix:
            raise
        return profile_or_run


def main() -> None:
    """Exit codes: 0 done, 1 a phase failed, 2 a mistake in what was asked, 130 interrupted."""
    # On Ctrl-C the notebook client's tasks die with their kernel, and asyncio logs each one's
    # traceback; what a cell raised comes to us as an exception of its own.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    try:
        app()
    except UserError as error:
        print(f"eagle3: {error}", file=sys.stderr)
        sys.exit(2)
    except NotebookError as error:
        print(f"eagle3: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
