"""The page of a run: one self-contained file that opens with the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plotly.io

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, write_text
from eagle3lib.lab.finding import raise_errors
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import outdated_by, outputs_root, run_folder
from eagle3lib.measure.arms import OWN, PLAIN, read_requests
from eagle3lib.measure.summary import check_benchmark, interval_text
from eagle3lib.report.figures import acceptance_per_step, arms_bars, heldout_curves
from eagle3lib.report.html import page_template, render_run


def build_page(run: str, *, copy_to: Path | None = None) -> Path:
    """Render the notebooks of a run and write ``index.html`` over what is done so far.

    ``copy_to``: write page and notebooks into another folder instead, small, with the figures'
    library from its CDN, paths of this machine shortened: an example to keep in a repository.

    Raises ``UserError`` when there is no such run, and when its benchmark is impossible (a speed-up
    above the acceptance length): such a report is not written.
    """
    folder = run_folder(run)
    if not (folder / "manifest.json").exists():
        raise UserError(f"there is no run {run!r}", where=folder, next="eagle3 run demo")
    metrics = phase_metrics(folder)
    benchmark = metrics.get("06_benchmark_serving")
    if benchmark:
        raise_errors(check_benchmark(read_requests(folder / "06_benchmark_serving"), benchmark))
    place, plotly_js = (copy_to, "cdn") if copy_to else (folder, True)
    render_run(folder, place / "reports", plotly_js=plotly_js)
    content = _content(folder, metrics, plotly_js)
    page = page_template("page.html.j2", _FILTERS).render(**content)
    write_text(place / "index.html", page)
    if copy_to:
        _forget_machine(copy_to)
    return place / "index.html"


def _forget_machine(folder: Path) -> None:
    """An example for strangers shows no path of the machine that made it."""
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for path, shown in ((outputs_root(), "outputs"), (ROOT, "."), (Path.home(), "~")):
            text = text.replace(str(path), shown)
        write_text(page, text)


def phase_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json of every phase that is whole."""
    return {
        name: read_json(folder / name / "metrics.json")
        for name in PHASES
        if (folder / name / "manifest.json").exists()
    }


def answer_numbers(metrics: dict[str, Any], set_name: str = "workload") -> dict[str, Any] | None:
    """The four numbers: plain tok/s, tok/s with our drafter, acceptance length, speed-up."""
    benchmark = metrics.get("06_benchmark_serving")
    lines = {(line["arm"], line["set"]): line for line in benchmark["arms"]} if benchmark else {}
    plain, own = lines.get((PLAIN, set_name)), lines.get((OWN, set_name))
    if not plain or not own:
        return None
    return {
        "baseline_tokens_per_s": plain["tokens_per_s"],
        "drafter_tokens_per_s": own["tokens_per_s"],
        "acceptance_length": own["acceptance"]["acceptance_length"],
        "speedup": own["speedup"]["value"],
        "interval": interval_text(own["speedup"]),
        "num_speculative_tokens": benchmark["num_speculative_tokens"],
    }


def _content(folder: Path, metrics: dict[str, Any], plotly_js: bool | str) -> dict[str, Any]:
    manifest = read_json(folder / "manifest.json")
    diagnosis = metrics.get("07_diagnose_acceptance")
    return {
        "manifest": manifest,
        "numbers": answer_numbers(metrics),
        "benchmark": metrics.get("06_benchmark_serving"),
        "diagnosis": diagnosis,
        "training": metrics.get("04_train_drafter"),
        "data": metrics.get("01_generate_data"),
        "outdated": outdated_by(folder, "07_diagnose_acceptance")
        or outdated_by(folder, "06_benchmark_serving"),
        "figures": _figures(folder, metrics, plotly_js),
        "phases": _phases(folder, manifest),
        "parameters": [
            (phase, name, value)
            for phase, done in manifest["phases"].items()
            for name, value in done["parameters"].items()
        ],
    }


def _figures(folder: Path, metrics: dict[str, Any], plotly_js: bool | str) -> list[str]:
    figures = []
    diagnosis = metrics.get("07_diagnose_acceptance")
    if diagnosis:
        figures.append(acceptance_per_step(diagnosis["workload"], diagnosis.get("bigram_per_step")))
    if metrics.get("06_benchmark_serving"):
        figures.append(arms_bars(metrics["06_benchmark_serving"]))
    rows = read_jsonl(folder / "04_train_drafter" / "metrics.jsonl")
    if rows and "04_train_drafter" in metrics:
        figures.append(heldout_curves(rows))
    return [
        plotly.io.to_html(
            f,
            include_plotlyjs=plotly_js if i == 0 else False,
            full_html=False,
            config={"displaylogo": False, "responsive": True},
        )
        for i, f in enumerate(figures)
    ]


def _phases(folder: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for name in PHASES:
        done = manifest["phases"].get(name)
        started = (folder / name / "inputs.json").exists()
        report = folder / "reports" / f"{name}.html"
        lines.append(
            {
                "name": name,
                "state": _state(folder, name, started),
                "duration_s": done["duration_s"] if done else None,
                "bytes": done["bytes"] if done else None,
                "finished": done["finished"] if done else "",
                "report": f"reports/{name}.html" if report.exists() else None,
            }
        )
    return lines


def _state(folder: Path, name: str, started: bool) -> str:
    if not (folder / name / "manifest.json").exists():
        return "not finished" if started else "waiting"
    changed = outdated_by(folder, name)
    return f"out of date: {', '.join(changed)} changed" if changed else "done"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_FILTERS = {
    "interval": interval_text,
    "size": lambda count: "" if count is None else _size(count),
    "duration": lambda seconds: "" if seconds is None else _duration(seconds),
}
