"""The tiny run, made once for all tests that look at it (five to ten minutes)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pipeline import TinyRun, run_tiny

from eagle3lib.lab.params import PHASES

_RUN_S = 1800  # whichever test comes first makes the run


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> TinyRun:
    """A new one; to work on what looks at it, ``EAGLE3_TINY_RUN`` names the outputs of a whole
    one."""
    if made := os.environ.get("EAGLE3_TINY_RUN"):
        return TinyRun(Path(made), {phase: (0, "") for phase in PHASES})
    return run_tiny(tmp_path_factory.mktemp("tiny"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tiny_run" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(_RUN_S), append=False)
