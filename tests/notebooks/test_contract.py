"""What every notebook keeps to, so that papermill, nbval, JupyterLab and git can all work with
it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re

import nbformat
import pytest

from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.notebooks import NOTEBOOKS, parameter_cell, write_parameter_cells
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.profile import load_profile
from eagle3lib.report.welcome import WELCOME

PHASE_FILES = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
EXPLORER_FILES = sorted((NOTEBOOKS / "explore").glob("*.ipynb"))
FILES = [*PHASE_FILES, *EXPLORER_FILES]
FORBIDDEN = re.compile(
    r"^\s*(def |class |%|!|sys\.exit|os\.chdir)|pip install|pio\.renderers", re.MULTILINE
)


def code_cells(path):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def values_of(path):
    """What the notebook's parameters cell should hold."""
    return EXPLORERS[path.stem]() if path in EXPLORER_FILES else load_profile("demo")[path.stem]


def test_there_is_one_notebook_a_phase_and_explorer():
    assert [f.stem for f in PHASE_FILES] == list(PHASES)
    assert [f.stem for f in EXPLORER_FILES] == sorted(EXPLORERS)


@pytest.mark.parametrize("path", [*FILES, WELCOME], ids=lambda p: p.stem)
def test_stripped_and_on_the_common_kernel(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata.kernelspec.name == "python3"
    for cell in code_cells(path):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_one_parameters_cell_equal_to_the_model(path):
    cells = [c for c in code_cells(path) if "parameters" in c.metadata.get("tags", [])]
    assert len(cells) == 1
    assert cells[0].source == parameter_cell(values_of(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_papermill_finds_every_parameter(path):
    """Papermill reads parameters with a line regex that loses unions, '=' and '#' in the help."""
    from papermill.inspection import inspect_notebook

    found = inspect_notebook(str(path))
    fields = type(values_of(path)).model_fields
    assert set(found) == set(fields)
    for name, info in found.items():
        assert info["help"] == fields[name].description


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_cells_are_few_short_and_call_the_library(path):
    cells = code_cells(path)
    assert len(cells) <= 12
    for cell in cells:
        if "parameters" in cell.metadata.get("tags", []):
            continue
        assert not FORBIDDEN.search(cell.source), cell.source
        body = [
            line for line in cell.source.split("\n") if not line.startswith(("from ", "import "))
        ]
        assert len(body) <= 12, cell.source
    assert any("assert " in c.source for c in cells), "a notebook checks what it made"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_cell_may_be_run_again(path):
    """No cell gives a parameter's name another value: run twice, the setup cell would read it."""
    names = set(type(values_of(path)).model_fields)
    for cell in code_cells(path):
        if "parameters" not in cell.metadata.get("tags", []):
            stored = (n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, ast.Name))
            assert not {n.id for n in stored if isinstance(n.ctx, ast.Store)} & names, cell.source


@pytest.mark.parametrize("path", PHASE_FILES, ids=lambda p: p.stem)
def test_it_shows_its_parameters_and_ends_with_what_to_look_at_next(path):
    cells = nbformat.read(path, as_version=4).cells
    (opens,) = [c for c in cells if "from_notebook(globals())" in c.source]
    assert opens.source.endswith("\ncfg"), "a cell's last expression is shown"
    assert cells[-1].source.startswith("**What to look at next:**")


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((NOTEBOOKS / "bench").glob("*.ipynb"))], ids=lambda p: p.stem
)
def test_what_it_imports_of_the_library_is_there(path):
    """Benches take hours and are run by hand: one asked for a function that had moved."""
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("eagle3lib"):
                module = importlib.import_module(node.module)
                found = [
                    hasattr(module, name.name) or _is_module(node, name) for name in node.names
                ]
                assert all(found), ast.unparse(node)


def _is_module(node, name):
    return importlib.util.find_spec(f"{node.module}.{name.name}") is not None


def test_parameter_cells_are_written_from_the_models():
    assert write_parameter_cells(check_only=True) == []
