"""The notebooks as files: their parameter cells written from the models, their execution by
papermill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.phase_params import SOURCES_VARIABLE, NotebookParams
from eagle3lib.lab.profile import load_profile

NOTEBOOKS = ROOT / "notebooks"
# Papermill's and nbconvert's terminals can't draw: the MIME type keeps the figure's data in the
# notebook, JupyterLab draws it, and report/html.py turns it into a figure that needs no network.
_RENDERER = "plotly_mimetype"
_KERNEL_START_S = 300  # papermill's 60 s are too few beside other work on two cores


class NotebookError(RuntimeError):
    """A cell failed for a reason that is not the user's: the executed notebook is the crash
    report."""


def parameter_cell(demo: NotebookParams) -> str:
    """One parameter a line with type, value and help, as papermill's line regex reads it.

    The values are the demo's: a notebook that is opened and run as it is makes the demo run (an
    explorer looks at it).
    """
    lines = []
    for name, field in type(demo).model_fields.items():
        value = demo.as_given(name)
        shown = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
        lines.append(f"{name}: {type(value).__name__} = {shown}  # {field.description}")
    return "\n".join(lines)


def write_parameter_cells(*, check_only: bool = False) -> list[str]:
    """Bring every ``parameters`` cell in step with its model: the demo's values in a phase's
    notebook, the defaults in an explorer's.

    Returns the names of the notebooks that were (with ``check_only``: would be) changed.
    """
    changed = []
    explorers = {model.PHASE: model() for model in EXPLORERS.values()}
    for phase, demo in (load_profile("demo") | explorers).items():
        path = NOTEBOOKS / f"{phase}.ipynb"
        notebook = read_notebook(path)
        cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
        if len(cells) != 1:
            raise UserError(
                f"{len(cells)} cells are tagged 'parameters'", expected="one", where=path
            )
        if cells[0].source == parameter_cell(demo):
            continue
        changed.append(path.name)
        if not check_only:
            cells[0].source = parameter_cell(demo)
            path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return changed


def read_notebook(path: Path) -> Any:
    if not path.exists():
        raise UserError("a notebook is missing", where=path, next="git checkout notebooks")
    return nbformat.read(path, as_version=4)


def execute(params: NotebookParams, output: Path) -> None:
    """Run a notebook into ``output``, which is kept also when a cell fails.

    Raises ``UserError`` with the message of a user's mistake, ``NotebookError`` for anything else.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    output.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PLOTLY_RENDERER", _RENDERER)
    source = NOTEBOOKS / f"{params.PHASE}.ipynb"
    try:
        with (
            _stderr_into(output.with_suffix(".log")),
            _sources_told(params),
            # A name of its own: all kernels of a working folder would share the default one, and
            # of two runs at once one would wait for a kernel that hears the other.
            tempfile.TemporaryDirectory(prefix="eagle3-") as sockets,
        ):
            papermill.execute_notebook(
                str(source),
                str(output),
                parameters=params.model_dump(mode="json"),
                kernel_name="python3",
                cwd=str(NOTEBOOKS),
                progress_bar=False,
                start_timeout=_KERNEL_START_S,
                autosave_cell_every=30,
                # Over TCP each kernel warns that its channels are not encrypted.
                config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
            )
    except PapermillExecutionError as error:
        if error.ename == "UserError":
            raise UserError(_plain(error.evalue)) from None
        raise NotebookError(
            f"{params.PHASE} failed in cell {error.exec_count}: "
            f"{error.ename}: {_plain(error.evalue)}\n"
            f"  in:       {output}\n  next:     open it, the cell and its traceback are there"
        ) from None
    except DeadKernelError:
        raise NotebookError(
            f"the kernel of {params.PHASE} died, most often for want of memory\n"
            f"  in:       {output}"
        ) from None


@contextlib.contextmanager
def _sources_told(params: NotebookParams) -> Iterator[None]:
    """The kernel inherits where each parameter's value comes from."""
    sources = {line["parameter"]: line["from"] for line in params.table()}
    os.environ[SOURCES_VARIABLE] = json.dumps(sources)
    try:
        yield
    finally:
        del os.environ[SOURCES_VARIABLE]


@contextlib.contextmanager
def _stderr_into(log: Path) -> Iterator[None]:
    """Send this process's standard error, which kernels inherit, into a file: a kernel that is
    stopped by Ctrl-C prints tracebacks of its own sockets, which tell a user nothing."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with log.open("ab") as sink:
            os.dup2(sink.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
