"""A run to send: one zip without weights or states, and its figures as pictures."""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import plotly.io
from plotly.offline import get_plotlyjs

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, write_atomic, write_text
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import run_folder
from eagle3lib.report.page import build_page, forget_machine, page_figures

FORMATS = ("png", "pdf", "svg")
_OF_A_PHASE = ("inputs.json", "metrics.json", "manifest.json", "gates.json", "findings.json")
_CARD = Path("05_export_drafter") / "drafter" / "README.md"
_SAME_DAY = (1980, 1, 1, 0, 0, 0)  # the first that a zip can name: equal content, equal bytes


def write_bundle(run: str, out: Path) -> Path:
    """Page, notebooks, metrics, parameters, journal and model card of a run, with the figures'
    library once, nothing from the network, and no path of this machine."""
    folder = run_folder(run)
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / run
        build_page(run, copy_to=root, plotly_js="plotly.min.js")
        names = [Path(phase) / name for phase in PHASES for name in _OF_A_PHASE]
        for name in [*names, _CARD, Path("manifest.json"), Path("profile.yaml"),
                     Path("journal.jsonl")]:  # fmt: skip
            if (folder / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, root / name)
        _forget_processes(root / "journal.jsonl")
        forget_machine(root, _absolute_paths(folder))
        write_text(root / "plotly.min.js", get_plotlyjs())
        write_atomic(out, lambda temporary: _zip(root, temporary))
    return out


def _forget_processes(journal: Path) -> None:
    """Which machine ran a phase is of use to those who can reach it."""
    events = [{k: v for k, v in e.items() if k not in ("host", "pid")} for e in read_jsonl(journal)]
    write_text(journal, "".join(json.dumps(e, ensure_ascii=False) + "\n" for e in events))


def _absolute_paths(folder: Path) -> set[str]:
    """Every absolute path that a parameter of the run names."""
    recorded = [p for phase in PHASES if (p := folder / phase / "inputs.json").exists()]
    values = [v for p in recorded for v in read_json(p)["params"].values()]
    return {v for v in values if isinstance(v, str) and Path(v).is_absolute() and Path(v).name}


def _zip(root: Path, out: Path) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as bundle:
        for path in sorted(p for p in root.rglob("*") if p.is_file()):
            info = zipfile.ZipInfo(str(path.relative_to(root.parent)), _SAME_DAY)
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            bundle.writestr(info, path.read_bytes())


def write_figures(run: str, folder: Path, format: str) -> list[Path]:
    """The page's figures as files. Raises ``UserError`` for another format, and where kaleido or
    the Chromium that it draws with is missing."""
    if format not in FORMATS:
        raise UserError(f"no picture format {format!r}", expected=", ".join(FORMATS))
    try:
        import kaleido  # noqa: F401
    except ImportError:
        raise UserError(
            "pictures of figures need the package kaleido, which is not installed",
            expected="kaleido 1.x, and Chromium or Chrome",
            next="pip install kaleido, and install chromium",
        ) from None
    figures = page_figures(run)
    if not figures:  # no browser is started, or missed, for nothing
        return []
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{format}" for name in figures]
    try:  # all at once: the browser starts once
        plotly.io.write_images(list(figures.values()), paths, width=1000, scale=2)
    except RuntimeError as error:  # plotly's own for a browser that is not there
        raise UserError(
            f"the figures could not be drawn: {str(error).strip().splitlines()[0]}",
            expected="Chromium or Chrome on this machine",
            next="install chromium, or set BROWSER_PATH to it",
        ) from None
    return paths
