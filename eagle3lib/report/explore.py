"""Run an explorer notebook over a run and render it: outputs/RUN/explore/NAME.html."""

from __future__ import annotations

from pathlib import Path

from eagle3lib.lab.explore import explore_folder, finished_run
from eagle3lib.lab.notebooks import execute
from eagle3lib.lab.phase_params import NotebookParams
from eagle3lib.report.html import TO_THE_PAGE, render_notebook
from eagle3lib.report.page import refresh_page


def run_explorer(params: NotebookParams) -> Path:
    """Execute the notebook and return its page, which the run's page links from then on. The
    executed notebook stands beside it, also when a cell failed.

    Raises ``UserError`` for a run that is not there or lacks what the notebook reads, and
    ``NotebookError`` for anything else.
    """
    finished_run(params.run)  # before a folder is made for a name that was mistyped
    name = params.PHASE.removeprefix("explore/")
    executed = explore_folder(params.run) / f"{name}.ipynb"
    execute(params, executed)
    page = render_notebook(executed, executed.with_suffix(".html"), links=TO_THE_PAGE)
    refresh_page(params.run)
    return page
