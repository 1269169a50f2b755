"""``eagle3 explore``: look into a run with one of the explorer notebooks."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3lib.lab.explore import explorer
from eagle3lib.lab.profile import read_values


def explore(
    name: Annotated[str, typer.Argument(help="an explorer: a notebook of notebooks/explore")],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="its parameters")
    ] = None,
    run: Annotated[str, typer.Option(help="the run to look at")] = "demo",
) -> None:
    """Run the explorer NAME over a run and render it to outputs/RUN/explore/NAME.html.

    Example: eagle3 explore acceptance_curves --run demo
    """
    from eagle3lib.report.explore import run_explorer

    values = read_values(words or []) | {"run": run}
    told = dict.fromkeys(values, "the command line")
    print(run_explorer(explorer(name).checked(values, "the command line").told(told)))
