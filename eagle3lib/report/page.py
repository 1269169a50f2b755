"""The page of a run: one self-contained file that opens with the answer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import plotly.io

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.files import read_json, read_jsonl, write_text
from eagle3lib.lab.finding import raise_errors
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.manifest import whole_phases
from eagle3lib.lab.notebooks import NOTEBOOKS, read_notebook
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import existing_run, outdated_by, outputs_root, run_folder
from eagle3lib.lab.words import duration_text, interval_text, now_text, size_text
from eagle3lib.measure.arms import OWN, PLAIN, drafter_folder, read_requests, read_sweeps
from eagle3lib.measure.profile import FOLDER as PROFILE
from eagle3lib.measure.profile import drafter_fingerprint, read_profile
from eagle3lib.measure.summary import check_benchmark
from eagle3lib.report.campaign import read_campaign
from eagle3lib.report.figures import acceptance_per_step, arms_bars, heldout_curves, load_words
from eagle3lib.report.finding_cards import cards_html
from eagle3lib.report.html import TO_THE_PAGE, page_template, render_notebook, render_run
from eagle3lib.report.page_top import set_answers
from eagle3lib.report.planned import planned_beside_measured
from eagle3lib.report.profile_figures import profile_bars
from eagle3lib.report.spoken import describe_figure


def build_page(run: str, *, copy_to: Path | None = None, plotly_js: str = "cdn") -> Path:
    """Render the notebooks of a run and write ``index.html`` over what is done so far.

    Explorers are linked where ``eagle3 explore`` has rendered them.

    ``copy_to``: write page and notebooks into another folder instead, small, paths of this machine
    shortened, with the figures' library from ``plotly_js``: its CDN, or a file of that folder.

    Raises ``UserError`` when there is no such run, and when its benchmark is impossible (a speed-up
    above the acceptance length): such a report is not written.
    """
    folder = existing_run(run)
    metrics = phase_metrics(folder)
    benchmark = metrics.get("06_benchmark_serving")
    if benchmark:
        asked = folder / "06_benchmark_serving"
        rows = [*read_requests(asked), *read_sweeps(asked)]
        raise_errors(check_benchmark(rows, benchmark))
    place = copy_to or folder
    library: bool | str = plotly_js if copy_to else True
    beside = f"../{library}" if copy_to and plotly_js != "cdn" else library
    render_run(folder, place / "reports", plotly_js=beside)
    explorers = explorers_of(folder)
    for name in (line["name"] for line in explorers if copy_to and line["page"]):
        source = folder / "explore" / f"{name}.ipynb"
        render_notebook(
            source, place / "explore" / f"{name}.html", plotly_js=beside, links=TO_THE_PAGE
        )
    content = _content(folder, metrics, library) | {"explorers": explorers, "sent": bool(copy_to)}
    page = page_template("page.html.j2", _FILTERS).render(**content)
    write_text(place / "index.html", page)
    if copy_to:
        forget_machine(copy_to)
    return place / "index.html"


def refresh_page(run: str) -> None:
    """Write the page over what is there now, where it can be: what calls this has its own result,
    and its own error, to tell."""
    with contextlib.suppress(UserError):
        build_page(run)


def refresh_campaign(run: str) -> None:
    """Bring phases, gates, decisions and the next command of the page up to date, and leave the
    rest: some milliseconds, so that a benchmark beside it is not disturbed."""
    page = run_folder(run) / "index.html"
    if not page.exists():
        return refresh_page(run)
    standing = _standing(page.parent) | {"sent": False}
    parts = iter(
        page_template(f"{name}.html.j2", _FILTERS).render(**standing) for name in _CAMPAIGN_PARTS
    )
    begin, end = "<!-- campaign -->", "<!-- end of campaign -->"
    written = re.sub(
        f"{begin}.*?{end}",
        lambda _: begin + next(parts) + end,
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    write_text(page, written)


def forget_machine(folder: Path, own_paths: Iterable[str] = ()) -> None:
    """What strangers get shows no path of the machine that made it; of ``own_paths``, the absolute
    ones of the parameters, the last part is kept."""
    known = [(outputs_root(), "outputs"), (ROOT, "."), (Path.home(), "~")]
    named = [(path, Path(path).name) for path in sorted(own_paths, key=len, reverse=True)]
    for page in folder.rglob("*"):
        if page.suffix not in (".html", ".json", ".jsonl", ".yaml", ".md"):
            continue
        text = page.read_text(encoding="utf-8")
        for path, shown in [*named, *known]:
            text = text.replace(str(path), shown)
        write_text(page, text)


def phase_metrics(folder: Path) -> dict[str, Any]:
    """metrics.json of every phase that is whole."""
    return {
        name: read_json(folder / name / "metrics.json")
        for name in PHASES
        if (folder / name / "manifest.json").exists()
    }


def explorers_of(folder: Path) -> list[dict[str, Any]]:
    """Every explorer: ``name``, ``title``, ``page`` relative to the run (empty where there is none,
    or its last run failed), and ``older``: the phases that ended after it was rendered."""
    lines, whole_at = (
        [],
        {
            phase: datetime.fromisoformat(done["finished"]).timestamp()
            for phase, done in whole_phases(folder).items()
        },
    )
    for name in EXPLORERS:
        title = read_notebook(NOTEBOOKS / "explore" / f"{name}.ipynb").cells[0].source
        page = folder / "explore" / f"{name}.html"
        executed = page.with_suffix(".ipynb")
        made = page.stat().st_mtime if page.exists() and executed.exists() else 0.0
        whole = made > 0 and made >= executed.stat().st_mtime
        lines.append(
            {
                "name": name,
                "title": title.split("\n", 1)[0].removeprefix("# Explore: "),
                "page": f"explore/{name}.html" if whole else "",
                "older": [phase for phase, when in whole_at.items() if whole and when > made],
            }
        )
    return lines


def answer_numbers(metrics: dict[str, Any], set_name: str = "workload") -> dict[str, Any] | None:
    """The four numbers: plain tok/s, tok/s with our drafter, acceptance length, speed-up. The last
    two are None where the engine told no rounds, and where no prompt was asked of both arms."""
    benchmark = metrics.get("06_benchmark_serving")
    lines = {(line["arm"], line["set"]): line for line in benchmark["arms"]} if benchmark else {}
    plain, own = lines.get((PLAIN, set_name)), lines.get((OWN, set_name))
    if not plain or not own:
        return None
    speedup = own["speedup"]
    return {
        "baseline_tokens_per_s": plain["tokens_per_s"],
        "drafter_tokens_per_s": own["tokens_per_s"],
        "acceptance_length": own["acceptance"]["acceptance_length"],
        "speedup": speedup["value"] if speedup else None,
        "interval": interval_text(speedup) if speedup else "unknown",
        "num_speculative_tokens": benchmark["num_speculative_tokens"],
    }


def _content(folder: Path, metrics: dict[str, Any], plotly_js: bool | str) -> dict[str, Any]:
    standing = _standing(folder)
    manifest = standing["manifest"]
    diagnosis = metrics.get("07_diagnose_acceptance")
    return standing | {
        "answers": set_answers(metrics.get("06_benchmark_serving"), diagnosis),
        "benchmark": metrics.get("06_benchmark_serving"),
        "diagnosis": diagnosis,
        "cards": cards_html(diagnosis["findings"]) if diagnosis else "",
        "training": metrics.get("04_train_drafter"),
        "data": metrics.get("01_generate_data"),
        "outdated": outdated_by(folder, "07_diagnose_acceptance")
        or outdated_by(folder, "06_benchmark_serving"),
        "figures": _figures(folder.name, plotly_js),
        "planned": planned_beside_measured(folder, metrics),
        "parameters": [
            (phase, name, value)
            for phase, done in manifest["phases"].items()
            for name, value in done["parameters"].items()
        ],
    }


def _standing(folder: Path) -> dict[str, Any]:
    """What the page's parts about the campaign are made of."""
    return {
        "manifest": read_json(folder / "manifest.json"),
        "campaign": read_campaign(folder.name),
        "as_of": now_text(),
    }


def page_figures(run: str) -> dict[str, go.Figure]:
    """The figures of a run's page by name. Raises ``UserError`` where there is no such run."""
    folder = existing_run(run)
    metrics, figures = phase_metrics(folder), {}
    diagnosis = metrics.get("07_diagnose_acceptance")
    if diagnosis:
        figures["acceptance_per_step"] = acceptance_per_step(
            diagnosis["workload"], diagnosis.get("bigram_per_step")
        )
    if metrics.get("06_benchmark_serving"):
        figures["arms"] = arms_bars(metrics["06_benchmark_serving"])
    if profile := _profile_of_now(folder):
        figures["profile"] = profile_bars(profile)
    rows = read_jsonl(folder / "04_train_drafter" / "metrics.jsonl")
    if rows and "04_train_drafter" in metrics:
        figures["heldout"] = heldout_curves(rows)
    figures = {name: figure for name, figure in figures.items() if figure.data}
    for figure in figures.values():  # above it, the legend of a narrow screen covers the title
        figure.update_layout(
            height=440, legend={"x": 0, "xanchor": "left", "y": -0.25, "yanchor": "top"}
        )
    return figures


def _profile_of_now(folder: Path) -> dict[str, Any] | None:
    """The run's profile; None without one, and for one of another drafter than the run's is now."""
    found, own = read_profile(folder / PROFILE), drafter_folder(folder, OWN)
    if not found or (found["drafter"] and not own.is_dir()):
        return None
    now = drafter_fingerprint(own) if found["drafter"] else None
    return found if found["drafter_fingerprint"] == now else None


def _figures(run: str, plotly_js: bool | str) -> list[dict[str, str]]:
    return [
        {
            "label": describe_figure(figure),
            "html": plotly.io.to_html(
                figure,
                include_plotlyjs=plotly_js if i == 0 else False,
                full_html=False,
                div_id=f"figure-{name}",
                config={"displaylogo": False, "responsive": True},
            ),
        }
        for i, (name, figure) in enumerate(page_figures(run).items())
    ]


# In the page's order.
_CAMPAIGN_PARTS = ("campaign_top", "campaign_tables")
_FILTERS = {
    "interval": interval_text,
    "load": load_words,
    "size": lambda count: "" if count is None else size_text(count),
    "duration": lambda seconds: "" if seconds is None else duration_text(seconds),
}
