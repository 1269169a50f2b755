"""The house rules that no linter knows: which room may use which, and how large things may get."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import eagle3lib

PACKAGE = Path(eagle3lib.__file__).parent
ROOMS = ["lab", "engine", "data", "target", "drafter", "training", "measure", "plan", "diagnose",
         "report", "cli"]  # fmt: skip
# These run on a GPU machine without a network, next to an engine that pins its own versions.
OFFLINE_ROOMS = {"engine", "target", "drafter", "training", "measure"}
NOT_OFFLINE = {"papermill", "plotly", "datasets"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

FILES = sorted(PACKAGE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))


def room_of(path):
    """eagle3lib/lab/files.py -> lab, eagle3lib/cli.py -> cli, eagle3lib/__init__.py -> "" """
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else "cli" if first.startswith("cli_") else first


def imports_of(path):
    """Dotted names of all that a module imports, wherever in it; relative ones made absolute."""
    package = ("eagle3lib", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from eagle3lib import data` names a room only together with the name.
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_imports_are_seen_in_every_form(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    path = tmp_path / "data" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import a.b, c as d\nfrom e import f\nfrom . import g\nfrom ..lab import h\n"
        "from eagle3lib import report\ndef late():\n    import i\n"
    )
    assert imports_of(path) == {
        "a.b", "c", "e.f", "eagle3lib.data.g", "eagle3lib.lab.h", "eagle3lib.report", "i",
    }  # fmt: skip


@each_file
def test_every_file_is_in_a_known_room(path):
    assert room_of(path) in ["", *ROOMS]


@each_file
def test_no_room_uses_a_later_one(path):
    room = room_of(path)
    allowed = set(ROOMS[: ROOMS.index(room) + 1]) if room else set()
    used = {name.split(".")[1] for name in imports_of(path) if name.startswith("eagle3lib.")}
    used = {"cli" if name.startswith("cli_") else name for name in used}
    assert used <= allowed | {"__version__"}


@each_file
def test_the_rooms_of_the_gpu_machine_use_no_notebook_libraries(path):
    if room_of(path) in OFFLINE_ROOMS:
        assert not {name.split(".")[0] for name in imports_of(path)} & NOT_OFFLINE


@each_file
def test_files_and_functions_are_of_a_readable_size(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not long


def modules_loaded_by(*names):
    """Top-level modules in a fresh interpreter after importing ``names``."""
    code = f"import sys, {', '.join(names)}; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_or_its_floor_loads_no_torch():
    """`eagle3 --help` and a plan must not wait seconds for torch."""
    lab = [f"eagle3lib.lab.{p.stem}" for p in FILES if room_of(p) == "lab" and p.stem != "__init__"]
    loaded = modules_loaded_by("eagle3lib", *lab)
    assert "eagle3lib" in loaded and "pydantic" in loaded
    assert not loaded & {"torch", "transformers", "vllm"}


def test_importing_the_offline_rooms_loads_no_notebook_libraries():
    """What the imports of their imports bring along is seen only at run time."""
    names = [
        ".".join(("eagle3lib", *p.relative_to(PACKAGE).with_suffix("").parts))
        for p in FILES
        if room_of(p) == "engine" and p.stem != "__init__"
    ]
    assert not modules_loaded_by(*names) & (NOT_OFFLINE | {"torch"})


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
