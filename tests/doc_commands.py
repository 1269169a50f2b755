"""The commands of README.md and docs/, each of one kind.

In a block (indented lines) a command is

- marked ``[GPU]``, ``[long]`` or ``[extra]`` in its comment, where readers see it: only parsed;
- run by a test that is named here (``ELSEWHERE``): also parsed;
- or run on the tiny run, with its names in place of the page's (``on_the_tiny_run``).

A command within a sentence is a mention: parsed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from eagle3lib.lab.machine import ROOT
from eagle3lib.target.smollm2 import NAME

# The lab log tells what was typed once: it is history. docs/reference is written from the code.
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.stem != "lab_log"),
    *sorted((ROOT / "docs" / "howto").glob("*.md")),
]
PROGRAMS = (
    "eagle3",
    "make",
    "python",
    "torchrun",
    "pip",
    "hf",
    "git",
    "uv",
    "conda",
    "curl",
    "ssh",
)
MARKS = re.compile(r"\[(GPU|long|extra)\]")
# First words of a command -> the test that runs it, on a stand-in for the engine or on small files.
ELSEWHERE = {
    "eagle3 serve": "tests/engine/test_servers.py::test_serve_ps_and_stop_from_the_command_line",
    "eagle3 stop": "tests/engine/test_servers.py::test_serve_ps_and_stop_from_the_command_line",
    "eagle3 profile": "tests/measure/test_profile.py::"
    "test_the_command_prints_the_table_and_writes_the_folder",
    "eagle3 watch": "tests/measure/test_live.py::test_watch_exits_with_an_alarm_on_drift",
    "eagle3 explore": "tests/notebooks/test_explorers.py::test_an_explorer_makes_its_page",
}
_RUNS_HERE = ("eagle3 serve --settings",)


@dataclass(frozen=True)
class Command:
    """One command of a block; ``line`` is whole, with its comment."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def kind(self) -> str:
        """ "marked", the id of the test that runs it, or "run"."""
        if MARKS.search(self.line.partition("#")[2]):
            return "marked"
        text = " ".join(self.words)
        if text.startswith(_RUNS_HERE):
            return "run"
        named = [test for first, test in ELSEWHERE.items() if text.startswith(first)]
        return named[0] if named else "run"


def block_commands(page: Path) -> list[Command]:
    """Commands of a page's blocks, lines that end in a backslash joined."""
    text = re.sub(r"\\\n\s*", "", page.read_text(encoding="utf-8"))
    lines = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    lines = [line.removeprefix(".venv/bin/") for line in lines]
    return [Command(page.name, line) for line in lines if line.split(" ")[0] in PROGRAMS]


def on_the_tiny_run(words: list[str], outputs: Path, scratch: Path) -> list[str]:
    """The words with what the tiny run has in place of the page's names; the installed engines are
    not asked, which takes them half a minute each time."""
    run = outputs / "tiny"
    drafter = str(run / "05_export_drafter" / "drafter")
    answers = str(run / "01_generate_data" / "answers.jsonl")
    more = {"plan": ["--no-engines"], "doctor": ["--no-ask"], "gate": ["--prompts", "5"]}
    swap = {
        "TARGET": NAME, "/models/mine": NAME, "Qwen/Qwen3-8B": NAME,
        "FOLDER": drafter, "OLD": drafter, "FILE": answers, "my_conversations.jsonl": answers,
        "NEW": drafter if words[1] == "gate" else str(scratch / "converted"),
        "RUN.zip": str(scratch / "run.zip"), "epochs=20": "epochs=10",
    }  # fmt: skip
    if words[1] != "plan":  # a plan needs no run: it is the page's own
        swap |= dict.fromkeys(("demo", "mine", "RUN", "kimi-k2.5-int4"), "tiny")
    path = re.compile(r"^outputs/(RUN|demo|mine)/")
    replaced = [path.sub(f"{run}/", swap.get(word, word)) for word in words]
    return replaced + more.get(words[1], [])
