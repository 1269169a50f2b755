"""The tiny run, made once for all tests that look at it (about four minutes)."""

from __future__ import annotations

import pytest
from pipeline import TinyRun, run_tiny


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> TinyRun:
    return run_tiny(tmp_path_factory.mktemp("tiny"))
