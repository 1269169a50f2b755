"""``eagle3 serve`` has the drafter examined before weights load."""

import sys

import pytest

from eagle3lib import cli


class Started(Exception):
    """In place of an engine that would load."""


@pytest.fixture
def serve(tiny_target, tmp_path, monkeypatch, capsys):
    """``serve(folder, *words)``: (whether an engine was started, exit code, what was shown)."""

    def start(*_, **__):
        raise Started

    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    # The engine of this test has no interpreter; what is asked of its own code is a note then.
    monkeypatch.delenv("EAGLE3_SGLANG_PYTHON", raising=False)
    monkeypatch.setattr("eagle3lib.engine.preflight.check_preflight", lambda *_, **__: [])
    monkeypatch.setattr("eagle3lib.engine.launch.EngineServer", start)

    def run(folder, *words):
        given = [f"drafter={folder}"] if folder else []
        settings = ["engine=sglang", "max_model_len=128", *given, *words]
        monkeypatch.setattr(sys, "argv", ["eagle3", "serve", str(tiny_target.folder), *settings])
        started, code = False, 0
        try:
            cli.main()
        except Started:
            started = True
        except SystemExit as stopped:
            code = stopped.code
        out, err = capsys.readouterr()
        return started, code, out + err

    return run


def test_a_drafter_that_the_engine_would_misread_is_refused_before_weights_load(serve, make_folder):
    folder = make_folder()
    assert serve(folder.path)[0]
    started, code, shown = serve(folder.path, "max_model_len=257")
    assert not started and code == 2
    assert "257" in shown and "eagle3 doctor" in shown and "Traceback" not in shown
    assert serve(folder.path, "max_model_len=257", "--no-preflight")[0]


def test_a_folder_that_is_no_drafter_is_refused_and_no_drafter_is_none(serve, tmp_path):
    started, code, shown = serve(tmp_path / "no")
    assert not started and code == 2 and "config.json" in shown
    assert serve(None)[0]
