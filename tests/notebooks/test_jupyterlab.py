"""`make lab` for real: notebooks in JupyterLab in a browser, Restart Kernel and Run All Cells."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import CHROMIUM, open_browser

from eagle3lib.lab.explore import EXPLORERS
from eagle3lib.lab.machine import ROOT

pytestmark = [
    pytest.mark.long,
    pytest.mark.engine,  # the explorers look at the tiny run
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine"),
]
_START_S, _RUN_S = 90.0, 400.0
_TOKEN = "of-a-test"
# What a person presses; the dialog that asks "Restart?" is answered below.
_RESTART_AND_RUN = "void jupyterapp.commands.execute('notebook:restart-run-all')"
# None before Lab is up. Not `currentWidget`, which follows the focus: a headless page has none.
_PANEL = "(window.jupyterapp && [...jupyterapp.shell.widgets('main')].find(w => w.sessionContext))"
# Of the model, not of the page: Lab draws only the cells in sight.
_CELLS = f"""(p => p && p.content && p.content.model && p.sessionContext.session && {{
  path: p.context.path, kernel: p.sessionContext.kernelDisplayStatus,
  cells: p.content.widgets.map(c => c.model.sharedModel.toJSON())
    .filter(c => c.cell_type === 'code'),
}})({_PANEL})"""


@pytest.fixture(scope="module")
def lab(tiny_run, tmp_path_factory):
    """The server of `make lab`, whose runs are the tiny one, named as the notebooks' defaults do.
    Nothing is saved: the notebooks in the repository stay as they are."""
    place = tmp_path_factory.mktemp("lab")
    shutil.copytree(tiny_run.folder, place / "outputs" / "demo", symlinks=True)
    settings = place / "settings" / "@jupyterlab" / "docmanager-extension"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text('{"autosave": false}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = {
        "ServerApp": {"ip": "127.0.0.1", "port": port, "port_retries": 0, "open_browser": False,
                      "allow_root": True},
        "IdentityProvider": {"token": _TOKEN},
        "LabApp": {"expose_app_in_browser": True},
    }  # fmt: skip
    (place / "jupyter_server_config.json").write_text(json.dumps(config))
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(place), "JUPYTERLAB_SETTINGS_DIR": str(place / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(place / "workspaces"),
        "EAGLE3_OUTPUTS": str(place / "outputs"), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    make = ["make", "-o", "setup", "lab", f"VENV={Path(sys.prefix)}"]
    with (place / "lab.log").open("wb") as log:
        server = subprocess.Popen(
            make, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_until_it_listens(server, port, place / "lab.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def _wait_until_it_listens(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        assert server.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.3)


@pytest.fixture(scope="module")
def tab():
    with open_browser() as opened:
        yield opened


def open_and_run(tab, address, path):
    """What a person does: open, Run > Restart Kernel and Run All Cells, Restart. Returns the code
    cells when all have run, or one failed."""
    tab.open(address, 1280)
    opened = tab.wait_for(
        _CELLS, lambda p: p and p["path"] == path and p["kernel"] == "idle", _START_S
    )
    assert not any(cell["outputs"] for cell in opened["cells"])
    tab.find(f"jupyterapp.shell.activateById({_PANEL}.id)")
    tab.find(_RESTART_AND_RUN)
    confirm = "document.querySelector('.jp-Dialog .jp-mod-accept')"
    tab.wait_for(f"!!{confirm}", bool)
    tab.find(f"{confirm}.click()")
    done = tab.wait_for(
        _CELLS, lambda p: p["kernel"] == "idle" and (_failed(p) or _all_ran(p)), _RUN_S
    )
    return done["cells"]


def _all_ran(panel):
    return all(cell["execution_count"] for cell in panel["cells"])


def _failed(panel):
    return [o for c in panel["cells"] for o in c["outputs"] if o["output_type"] == "error"]


def test_it_opens_at_the_welcome_notebook_which_runs(lab, tab):
    cells = open_and_run(tab, f"{lab}/?token={_TOKEN}", "notebooks/welcome.ipynb")
    assert not _failed({"cells": cells})
    shown = json.dumps([c["outputs"] for c in cells])
    assert "acceptance_curves.ipynb" in shown and "speed" in shown


@pytest.mark.parametrize("name", sorted(EXPLORERS))
def test_an_explorer_runs_top_to_bottom_with_its_defaults(lab, tab, name):
    path = f"notebooks/explore/{name}.ipynb"
    cells = open_and_run(tab, f"{lab}/lab/tree/{path}?token={_TOKEN}", path)
    assert not _failed({"cells": cells})
    assert any("application/vnd.plotly.v1+json" in o.get("data", {}) for c in cells
               for o in c["outputs"])  # fmt: skip
    tab.wait_for("document.querySelectorAll('.js-plotly-plot .main-svg').length", bool)
