"""What README.md and docs/ tell to type, typed: on a copy of the tiny run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from doc_commands import PAGES, block_commands, on_the_tiny_run
from typer.testing import CliRunner

from eagle3lib.cli import app

pytestmark = [pytest.mark.long, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]
# Each once, however many pages tell it. Runs come first, while nothing is changed by the others;
# what frees files goes last.
COMMANDS = [c.words for page in PAGES for c in block_commands(page) if c.kind == "run"]
HERE = Path("OUTPUTS"), Path("SCRATCH")
WORDS = {" ".join(on_the_tiny_run(words, *HERE)): words for words in COMMANDS}
ORDER = sorted(WORDS, key=lambda text: (not text.startswith("eagle3 run"), "--yes" in text))


@pytest.fixture(scope="module")
def outputs(tiny_run, tmp_path_factory):
    """Hard links: the lab replaces files, it never writes into one that is there."""
    copy = tmp_path_factory.mktemp("typed") / "outputs"
    shutil.copytree(tiny_run.outputs, copy, copy_function=os.link)
    return copy


@pytest.mark.parametrize("text", ORDER)
def test_it_can_be_typed(text, outputs, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(outputs))
    words = on_the_tiny_run(WORDS[text], outputs, tmp_path)
    done = CliRunner().invoke(app, words[1:])
    assert not isinstance(done.exception, Exception), (words, done.output, done.exception)
    # The gate's 1 is an answer: equal drafters don't replace each other.
    assert done.exit_code in ((0, 1) if words[1] == "gate" else (0,)), (words, done.output)
