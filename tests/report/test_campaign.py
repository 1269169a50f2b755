"""Where a run stands, what is next, and what of it can be sent."""

import os
import platform
import re
import subprocess
import sys
import zipfile

import nbformat
import plotly.graph_objects as go
import pytest
from typer.testing import CliRunner

from eagle3lib.cli import app
from eagle3lib.lab import run
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json
from eagle3lib.lab.journal import read_journal, record
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES
from eagle3lib.lab.run import begin, run_folder
from eagle3lib.report import bundle
from eagle3lib.report.bundle import FORMATS, write_bundle, write_figures
from eagle3lib.report.campaign import read_campaign
from eagle3lib.report.html import render_notebook
from eagle3lib.report.page import (
    build_page,
    explorers_of,
    refresh_campaign,
)
from eagle3lib.report.spoken import describe_figure

TARGET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(run, "ROOT", tmp_path)


def make(name, finish=True):
    phase = begin(PHASES[name](run="r"), TARGET)
    if finish:
        phase.finish({"made": 1})
    phase.lock.release(force=True)
    return phase


def states():
    return {p.name[:2]: p.state for p in read_campaign("r").phases}


def test_every_state_of_a_phase_is_told_apart():
    make("00_plan")
    make("01_generate_data", finish=False)
    assert (states()["00"], states()["01"], states()["02"]) == ("done", "interrupted", "waiting")
    record(run_folder("r"), "failed", phase="01_generate_data", error="no prompts")
    (line,) = [p for p in read_campaign("r").phases if p.state == "failed"]
    assert "no prompts" in line.detail
    make("01_generate_data")
    assert states()["01"] == "done" and read_campaign("r").phases[1].why == "was interrupted"


def test_a_phase_that_another_process_holds_is_running(tmp_path):
    make("00_plan", finish=False)
    lock = run_folder("r") / ".00_plan.lock"
    hold = f"import filelock\nlock = filelock.FileLock({str(lock)!r})\nlock.acquire()\n"
    hold += "print(1, flush=True)\ninput()"
    other = subprocess.Popen([sys.executable, "-c", hold], stdin=-1, stdout=-1)
    try:
        other.stdout.readline()
        assert states()["00"] == "running"
        told = read_campaign("r")
        assert f"process {os.getpid()} on {platform.node()}" in told.phases[0].holder
        assert told.phases[0].bytes > 0, "what is there so far"
        profile = run_folder("r") / "profile.yaml"
        assert [c for _, c in told.next_steps] == ["eagle3 status r", f"eagle3 run {profile}"]
        assert f"process {os.getpid()} on" in CliRunner().invoke(app, ["status", "r"]).stdout
        assert f"process {os.getpid()} on" in build_page("r").read_text()
        sent = build_page("r", copy_to=tmp_path / "sent").read_text()
        assert "running" in sent and f"process {os.getpid()}" not in sent
    finally:
        other.kill()
        other.communicate()
    assert states()["00"] == "interrupted"


def test_the_next_command_needs_nothing_but_the_run():
    make("00_plan")
    ((why, command),) = read_campaign("r").next_steps
    assert "01_generate_data" in why
    assert command == f"eagle3 run {run_folder('r') / 'profile.yaml'}"


def test_what_a_run_goes_without_is_skipped_and_stays_so(tmp_path):
    """As the how-to of third-party drafters runs it: 01, 06, 07 with somebody's folder."""
    make("01_generate_data")
    assert (states()["00"], states()["02"]) == ("skipped", "waiting")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    cfg = PHASES["06_benchmark_serving"](run="r", drafter=str(theirs))
    begin(cfg, TARGET).lock.release(force=True)
    told = {p.name[:2]: p for p in read_campaign("r").phases}
    assert [n for n, p in told.items() if p.state == "skipped"] == ["00", "02", "03", "04", "05"]
    assert told["04"].detail.endswith("06_benchmark_serving measures theirs")
    ((_, command),) = read_campaign("r").next_steps
    assert command == f"eagle3 run {run_folder('r') / 'profile.yaml'} 06 07"
    assert "skipped" in CliRunner().invoke(app, ["status", "r"]).stdout


def test_phases_and_decisions_are_brought_up_to_date_and_the_rest_of_the_page_is_left():
    make("00_plan")
    page = build_page("r")
    marked = page.read_text().replace("<h1>", "<h1>the same ")
    page.write_text(marked)
    make("01_generate_data", finish=False)
    record(run_folder("r"), "note", text="a \\1 decision")
    refresh_campaign("r")
    text = page.read_text()
    assert "<h1>the same " in text and "interrupted" in text and "a \\1 decision" in text
    assert text.count("<!-- campaign -->") == marked.count("<!-- campaign -->") == 2
    assert text.count('id="phases"') == 1
    page.unlink()
    refresh_campaign("r")
    assert "interrupted" in page.read_text()


def test_gates_are_judged_skipped_or_waiting():
    make("00_plan")
    place = run_folder("r") / "06_benchmark_serving"
    place.mkdir()
    lost = {"engine": "vllm", "arm": "engine alone", "passed": False, "evidence": "hung",
            "proves": "no target"}  # fmt: skip
    write_json(place / "gates.json", [lost])
    cli = CliRunner()
    done = cli.invoke(app, ["note", "r", "--skip", "reference", "--because", "none", "--by", "ada"])
    assert done.exit_code == 0
    told = {g.gate: (g.state, g.detail) for g in read_campaign("r").gates}
    assert told["engine alone"] == ("failed", "hung; it proves: no target")
    assert told["reference drafter"] == ("skipped", "by ada: none")
    assert told["own drafter"] == ("waiting", "")
    assert "none" in (run_folder("r") / "index.html").read_text()


@pytest.mark.parametrize(
    "words",
    [["--skip", "baseline", "--because", "x"], ["baseline skipped because of the deadline"],
     ["we skip the reference"], [""], ["--skip", "nothing", "--because", "x"]],
)  # fmt: skip
def test_a_gate_is_not_skipped_in_passing_and_the_baseline_never(words):
    make("00_plan")
    before = read_journal(run_folder("r"))
    assert isinstance(CliRunner().invoke(app, ["note", "r", *words]).exception, UserError)
    assert read_journal(run_folder("r")) == before


def test_a_bundle_has_no_weights_and_no_paths_and_is_the_same_twice(tmp_path):
    phase = begin(PHASES["00_plan"](run="r", target="/models/mine/Llama"), TARGET)
    phase.finish({})
    (phase.folder / "model.safetensors").write_bytes(b"weights")
    write_json(phase.folder / "metrics.json", {"where": f"{ROOT}/params", "n": 1})
    build_page("r")
    one, two = (write_bundle("r", tmp_path / f"{n}.zip") for n in (1, 2))
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as zipped:
        names = zipped.namelist()
        journal = zipped.read("r/journal.jsonl").decode()
        texts = [zipped.read(n).decode() for n in names if not n.endswith(".js")]
    assert {"r/index.html", "r/journal.jsonl", "r/profile.yaml", "r/00_plan/metrics.json"} <= set(
        names
    )
    assert not [n for n in names if n.endswith(".safetensors")]
    assert '"what": "started"' in journal and '"pid"' not in journal and '"host"' not in journal
    places = (str(ROOT), str(run_folder("r")), "/models/mine")
    assert not [t for t in texts if any(place in t for place in places)]


def test_rendered_explorers_are_linked_here_and_in_the_bundle(tmp_path):
    make("00_plan")
    build_page("r")
    page = (run_folder("r") / "index.html").read_text()
    assert "eagle3 explore compare_runs --run r" in page and "explore/" not in hrefs(page)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(f"at {ROOT}")])
    executed = run_folder("r") / "explore" / "compare_runs.ipynb"
    executed.parent.mkdir()
    nbformat.write(notebook, executed)
    render_notebook(executed, executed.with_suffix(".html"))
    build_page("r")
    assert "explore/compare_runs.html" in hrefs((run_folder("r") / "index.html").read_text())
    with zipfile.ZipFile(write_bundle("r", tmp_path / "r.zip")) as zipped:
        assert "explore/compare_runs.html" in hrefs(zipped.read("r/index.html").decode())
        sent = zipped.read("r/explore/compare_runs.html").decode()
    assert str(ROOT) not in sent and "at ." in sent


def test_an_explorer_that_is_older_or_failed_says_so():
    make("00_plan")
    executed = run_folder("r") / "explore" / "hidden_states.ipynb"
    executed.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(), executed)
    page = render_notebook(executed, executed.with_suffix(".html"))
    told = {line["name"]: line for line in explorers_of(run_folder("r"))}["hidden_states"]
    assert (told["page"], told["older"]) == ("explore/hidden_states.html", [])
    os.utime(executed, (1e9, 1e9))
    os.utime(page, (1e9, 1e9))
    told = {line["name"]: line for line in explorers_of(run_folder("r"))}["hidden_states"]
    assert told["older"] == ["00_plan"]
    os.utime(executed, (2e9, 2e9))  # run again, and a cell failed: no page of it
    told = {line["name"]: line for line in explorers_of(run_folder("r"))}["hidden_states"]
    assert (told["page"], told["older"]) == ("", [])


def hrefs(page):
    return set(re.findall(r'href="([^"#]+)"', page))


def test_pictures_need_a_known_format():
    with pytest.raises(UserError, match="no picture format 'bmp'"):
        write_figures("r", run_folder("r"), "bmp")


@pytest.mark.parametrize("format", FORMATS)
def test_pictures_are_drawn_or_say_what_is_missing(format, tmp_path, monkeypatch):
    """kaleido is optional: without it, or without a browser, one message says what to install."""
    make("00_plan")
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="served"))
    monkeypatch.setattr(bundle, "page_figures", lambda run: {"one": figure, "two": figure})
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UserError, match="package kaleido, which is not installed"):
        write_figures("r", tmp_path, format)
    monkeypatch.undo()
    pytest.importorskip("kaleido")
    monkeypatch.setattr(bundle, "page_figures", lambda run: {"one": figure, "two": figure})
    made = write_figures("r", tmp_path / "figures", format)
    starts = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<svg"}[format]
    assert [p.name for p in made] == [f"one.{format}", f"two.{format}"]
    assert all(p.read_bytes().startswith(starts) for p in made)


def test_a_browser_that_is_not_there_is_named(tmp_path, monkeypatch):
    make("00_plan")
    monkeypatch.setitem(sys.modules, "kaleido", object())
    monkeypatch.setattr(bundle, "page_figures", lambda run: {"one": go.Figure()})

    def no_browser(*_, **__):
        raise RuntimeError("\nKaleido requires Google Chrome to be installed.\n")

    monkeypatch.setattr("plotly.io.write_images", no_browser)
    with pytest.raises(UserError, match="requires Google Chrome") as raised:
        write_figures("r", tmp_path, "png")
    assert "BROWSER_PATH" in str(raised.value)


def test_a_run_without_figures_starts_no_browser(tmp_path, monkeypatch):
    make("00_plan")
    monkeypatch.setitem(sys.modules, "kaleido", object())
    monkeypatch.setattr("plotly.io.write_images", lambda *_, **__: pytest.fail("a browser"))
    assert write_figures("r", tmp_path, "png") == []


def test_a_figure_is_told_in_words():
    figure = go.Figure(go.Scatter(x=[1, 2, 3], y=[0.5, 9, 0.25], name="served"))
    figure.update_layout(title="Acceptance", yaxis_title="share")
    assert describe_figure(figure) == "Acceptance, share. served: 0.5 at 1 to 0.25 at 3"
