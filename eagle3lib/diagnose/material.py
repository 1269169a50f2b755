"""A run as the diagnosis reads it: every artefact once, what can't be read as a cause of its own.

Any part may be None: a run that stopped early, or a drafter trained elsewhere, is diagnosed
by what is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.live import StatesOf, live_states
from eagle3lib.diagnose.replay import first_repeat
from eagle3lib.drafter.checkpoint import check_drafter_folder, read_drafter
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.drafter.weights import read_weights
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.lab.finding import Finding
from eagle3lib.measure.arms import OWN, RequestRow, drafter_folder, exported_drafter, read_requests
from eagle3lib.target.folder import Target
from eagle3lib.target.model import DTYPES, TargetHead
from eagle3lib.target.states import StateStore

T = TypeVar("T")
MOST_ANSWERS = 32  # replayed; a demo run has 24


@dataclass
class Material:
    """Artefacts of one run. ``problems`` are those that could not be read."""

    target: Target
    head: TargetHead
    states_of: StatesOf
    dtype: str = "float32"
    answers: list[AnswerRow] = field(default_factory=list)
    generated: dict[str, Any] = field(default_factory=dict)  # parameters of phase 01
    store: StateStore | None = None
    vocab: VocabMap | None = None
    trained: dict[str, Tensor] = field(default_factory=dict)  # the best checkpoint
    training: dict[str, Any] = field(default_factory=dict)
    training_params: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    export: Path | None = None
    raw_config: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Tensor] = field(default_factory=dict)
    export_findings: list[Finding] = field(default_factory=list)
    drafter: Drafter | None = None
    requests: list[RequestRow] = field(default_factory=list)
    benchmark: dict[str, Any] = field(default_factory=dict)
    servers: dict[str, Any] = field(default_factory=dict)
    problems: list[Cause] = field(default_factory=list)

    @property
    def own_rows(self) -> list[RequestRow]:
        """The first answer to every prompt of our drafter's arm."""
        named = [first_repeat(self.requests, OWN, name) for name in ("workload", "general")]
        return [row for rows in named for row in rows][:MOST_ANSWERS]

    @property
    def steps(self) -> int | None:
        return self.benchmark.get("num_speculative_tokens")

    def attempt(self, question: int, read: Callable[[], T], otherwise: T) -> T:
        """``read()``; what a user's mistake or a broken file says becomes a cause."""
        try:
            return read()
        except UserError as error:
            self.problems.append(_unreadable(error, question))
        except (SafetensorError, OSError) as error:
            self.problems.append(_unreadable(UserError(str(error)), question))
        return otherwise


def _unreadable(error: UserError, question: int) -> Cause:
    lines = str(error).split("\n")
    return Cause(
        "unreadable", "error", lines[0], "; ".join(line.strip() for line in lines[1:3]),
        "make the file again, or copy it whole", lines[-1].strip() if len(lines) > 1 else "",
        question=question, experiment="the file was opened and read",
    )  # fmt: skip


def read_material(
    folder: Path, target: Target, states_of: StatesOf | None = None, head: TargetHead | None = None
) -> Material:
    """Read a run's folder. Nothing here runs the target. Of a benchmark of a named drafter the
    run's data and training are left out: it was trained on something else."""
    benchmark_file = folder / "06_benchmark_serving" / "metrics.json"
    benchmark = read_json(benchmark_file) if benchmark_file.exists() else {}
    dtype = benchmark.get("dtype", "float32")
    m = Material(
        target, head or TargetHead(target, dtype), states_of or live_states(target, dtype), dtype,
        benchmark=benchmark,
    )  # fmt: skip
    own = drafter_folder(folder, OWN)
    if own == exported_drafter(folder):
        _read_data(m, folder)
        _read_training(m, folder)
    _read_export(m, own)
    place = folder / "06_benchmark_serving"
    m.requests = m.attempt(1, lambda: read_requests(place), [])
    m.servers = _json(place / "servers.json")
    return m


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _params(phase: Path) -> dict[str, Any]:
    return dict(_json(phase / "inputs.json").get("params", {}))


def _read_data(m: Material, folder: Path) -> None:
    place = folder / "01_generate_data"
    m.generated = _params(place)
    m.answers = m.attempt(5, lambda: read_answers(place), [])
    states = folder / "02_capture_hidden_states" / "states"
    if states.exists():
        m.store = m.attempt(4, lambda: StateStore(states), None)
    vocab = folder / "03_build_vocab_map" / "vocab_map.safetensors"
    if vocab.exists():
        m.vocab = m.attempt(3, lambda: VocabMap.load(vocab), None)


def _read_training(m: Material, folder: Path) -> None:
    place = folder / "04_train_drafter"
    m.training, m.training_params = _json(place / "metrics.json"), _params(place)
    m.curve = read_jsonl(place / "metrics.jsonl")
    best = place / "checkpoints" / "best" / "drafter.safetensors"
    if best.exists():
        m.trained = m.attempt(4, lambda: load_file(best), {})


def _read_export(m: Material, folder: Path) -> None:
    if not folder.exists():
        return
    m.export = folder
    m.raw_config = m.attempt(3, lambda: read_json(folder / "config.json"), {})
    m.exported = m.attempt(3, lambda: read_weights(folder)[0], {})
    if not m.raw_config or not m.exported:
        return
    config, embedding = m.target.config, m.head.embedding
    m.export_findings = m.attempt(3, lambda: check_drafter_folder(folder, config, embedding), [])
    if any(f.severity == "error" for f in m.export_findings) or "d2t" not in m.exported:
        m.drafter = _tolerant(m)
        return
    m.drafter = m.attempt(3, lambda: read_drafter(folder, config, embedding, DTYPES[m.dtype]), None)


def _tolerant(m: Material) -> Drafter | None:
    """The drafter as an engine would load it that checks nothing, None where none could."""
    assert m.export is not None
    try:
        return read_drafter(m.export, m.target.config, m.head.embedding, DTYPES[m.dtype])
    except UserError:
        return None


def foreign_material(
    target: Target, drafter: Path, requests: list[RequestRow], steps: int, dtype: str
) -> Material:
    """A drafter that was trained elsewhere: its folder, and requests that some server answered
    (with its record of rounds where there is one)."""
    m = Material(
        target, TargetHead(target, dtype), live_states(target, dtype), dtype,
        benchmark={"num_speculative_tokens": steps, "dtype": dtype}, requests=requests,
    )  # fmt: skip
    _read_export(m, drafter)
    return m
