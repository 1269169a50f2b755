"""A stub engine behind ``EAGLE3_VLLM_PYTHON`` and ``EAGLE3_SGLANG_PYTHON``."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.lab import child


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """``stub(name, **config_or_server_options)`` is a server of the stub, not yet started."""
    python = tmp_path / "python"
    script = Path(__file__).with_name("stub_engine.py")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{script}" "$@"\n')
    python.chmod(0o755)
    for variable in ("EAGLE3_VLLM_PYTHON", "EAGLE3_SGLANG_PYTHON"):
        monkeypatch.setenv(variable, str(python))
    monkeypatch.setenv("EAGLE3_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(child, "STOP_DEADLINE_S", 4.0)

    def make(name, **options):
        settings = {f: options.pop(f) for f in list(options) if f in EngineConfig.__annotations__}
        config = EngineConfig(tmp_path / name, **{"threads": 1, **settings})
        return EngineServer(config, log=tmp_path / "logs" / "engine.log", **options)

    return make


@pytest.fixture
def gone(tmp_path):
    """Whether the stub and its helper have ended; zombies that nobody reaped have."""

    def gone() -> bool:
        for pid in (tmp_path / "pids").read_text().split():
            try:
                if psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
                    return False
            except psutil.NoSuchProcess:
                continue
        return True

    return gone
