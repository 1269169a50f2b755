"""What the welcome notebook shows: the notebooks, by what they say of themselves, and the runs."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.notebooks import NOTEBOOKS, read_notebook
from eagle3lib.lab.run import outputs_root
from eagle3lib.lab.words import known_text
from eagle3lib.report.campaign import read_campaign
from eagle3lib.report.page import answer_numbers, phase_metrics

WELCOME = NOTEBOOKS / "welcome.ipynb"


class Table:
    """Rows of HTML under a heading each; links are relative to the notebooks' folder, where
    JupyterLab and VS Code open them."""

    def __init__(self, headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]):
        self.headings, self.rows = headings, list(rows)

    def _repr_html_(self) -> str:
        head = "".join(f'<th style="text-align: left">{name}</th>' for name in self.headings)
        cell = '<td style="text-align: left; vertical-align: top">'
        body = "".join(
            "<tr>" + "".join(f"{cell}{text}</td>" for text in row) + "</tr>" for row in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def notebooks_table() -> Table:
    """Every notebook with the first line and the "Takes" of its own title cell."""
    rows = []
    for path in sorted(NOTEBOOKS.rglob("*.ipynb"), key=lambda p: (len(p.parts), p)):
        if path == WELCOME or ".ipynb_checkpoints" in path.parts:
            continue
        first = read_notebook(path).cells[0].source
        title = first.split("\n", 1)[0].lstrip("# ")
        takes = re.search(r"\*\*Takes\*\*(.+?)(?:[.;]\s|[.;]$|$)", " ".join(first.split()))
        said = takes[1].strip() if takes else ""
        rows.append((_link(path, path.stem), html.escape(title), html.escape(said)))
    return Table(("notebook", "what it does", "takes"), rows)


def runs_table() -> Table:
    """Every run under ``outputs/`` with its target, how far it is, its answer and its report."""
    rows = []
    for manifest in sorted(outputs_root().glob("*/manifest.json")):
        folder = manifest.parent
        try:
            target = str(read_json(manifest)["target"]["name"])
            numbers = answer_numbers(phase_metrics(folder))
            state = _state(folder)
        except (UserError, KeyError) as error:  # shown, so that one broken run hides no other
            text = html.escape(f"not readable: {str(error).splitlines()[0]}")
            rows.append((html.escape(folder.name), "", text, "", ""))
            continue
        answer = numbers and (
            f"{known_text(numbers['speedup'], unit='x')} at acceptance length"
            f" {known_text(numbers['acceptance_length'])}"
        )
        page = folder / "index.html"
        report = _link(page, "page of the run") if page.exists() else f"eagle3 report {folder.name}"
        rows.append((html.escape(folder.name), html.escape(target), state, answer or "", report))
    if not rows:
        rows = [("none yet", "", "", "", "eagle3 run demo")]
    return Table(("run", "target", "state", "answer", "report"), rows)


def _state(folder: Path) -> str:
    """How many phases are whole, and the first that is not, or is out of date."""
    phases = [p for p in read_campaign(folder.name).phases if p.state != "skipped"]
    changed = next((p.name for p in phases if p.state == "out of date"), None)
    if changed:
        return f"{changed} is out of date"
    done = [p for p in phases if p.state == "done"]
    if len(done) == len(phases):
        return "done"
    following = next(p for p in phases if p.state != "done")
    state = "is next" if following.state == "waiting" else following.state
    return f"{len(done)} of {len(phases)} done, {following.name} {state}"


def _link(path: Path, text: str) -> str:
    target = quote(Path(os.path.relpath(path, NOTEBOOKS)).as_posix())
    return f'<a href="{target}">{html.escape(text)}</a>'
