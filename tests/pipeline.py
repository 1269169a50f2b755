"""The tiny run: every notebook, parameterised by papermill, executed and checked by nbval.

nbval takes no parameters, so papermill writes the ``tiny`` profile into a copy first. The run is
made once a test session and shared: the notebook tests look at each notebook's result, the engine
test at the rounds that vLLM recorded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from eagle3lib.lab.notebooks import NOTEBOOKS
from eagle3lib.lab.profile import load_profile


@dataclass
class TinyRun:
    """``results``: phase -> (exit code of nbval, its output). Phases after a failure are not
    run."""

    outputs: Path
    results: dict[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.outputs / "tiny"


def run_tiny(folder: Path) -> TinyRun:
    run = TinyRun(folder / "outputs")
    for phase, params in load_profile("tiny").items():
        copy = folder / f"{phase}.ipynb"
        notebook = load_notebook_node(str(NOTEBOOKS / f"{phase}.ipynb"))
        filled = parameterize_notebook(notebook, params.model_dump(mode="json"))
        nbformat.write(filled, copy)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env",
             "--nbval-cell-timeout=600", "-q", "-p", "no:cacheprovider", str(copy)],
            env={**os.environ, "EAGLE3_OUTPUTS": str(run.outputs)},
            cwd=folder, capture_output=True, text=True, timeout=1200,
        )  # fmt: skip
        run.results[phase] = (done.returncode, done.stdout[-4000:] + done.stderr[-1000:])
        if done.returncode:
            break
    return run
