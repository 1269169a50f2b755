"""A run as the diagnosis reads it: every artefact once, what can't be read as a cause of its own.

Any part may be None: a run that stopped early, a drafter trained elsewhere or not readable, an
engine that tells no rounds, prompts alone: each is diagnosed by what is there, and what is not is
told by ``rules_unrecorded``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.diagnose.cause import Cause
from eagle3lib.diagnose.live import LiveTarget, StatesOf
from eagle3lib.diagnose.replay import first_repeat
from eagle3lib.diagnose.told import Told, pooled
from eagle3lib.drafter.checkpoint import check_drafter_folder, read_drafter
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.drafter.weights import read_weights
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl
from eagle3lib.lab.finding import Finding
from eagle3lib.measure.arms import OWN, RequestRow, drafter_folder, exported_drafter, read_requests
from eagle3lib.target.folder import Target
from eagle3lib.target.images import shows_images
from eagle3lib.target.model import DTYPES, TargetHead
from eagle3lib.target.states import StateStore

T = TypeVar("T")
MOST_ANSWERS = 32  # asked every question; a demo run has 24
SETS = ("workload", "general")
_CAPTURE = "02_capture_hidden_states"
# What a file that somebody else wrote, or that was cut, makes its reader say.
_BROKEN = (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass
class Material:
    """Artefacts of one run. ``problems`` are those that could not be read; ``answered_by``:
    "engine", or "target" where no engine was asked and the requests are the target's own
    answers."""

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
    answered_by: str = "engine"
    problems: list[Cause] = field(default_factory=list)
    folder: Path | None = None  # of the run; None for a drafter from elsewhere
    served_params: dict[str, Any] = field(default_factory=dict)  # parameters of phase 06
    asked: str = ""  # where there is no run: the prompts' file,
    server: str = ""  # and the address that answered them

    def first_answers(self, set_name: str) -> list[RequestRow]:
        """The first answer to every prompt of a set in our drafter's arm; without those whose
        prompt shows images (``with_images``), which the text model can't be asked about."""
        rows = first_repeat(self.requests, OWN, set_name)
        return [r for r in rows if not self._shows(r)]

    def _shows(self, r: RequestRow) -> bool:
        return shows_images(self.target, r.prompt_token_ids + r.answer_token_ids)

    @property
    def with_images(self) -> list[RequestRow]:
        return [
            r for name in SETS for r in first_repeat(self.requests, OWN, name) if self._shows(r)
        ]

    @property
    def not_replayed(self) -> str:
        """Why no answer is replayed though there are some; "" where some are."""
        return "all its prompts show images" if self.with_images and not self.own_rows else ""

    @property
    def is_recorded(self) -> bool:
        """Whether the engine told the rounds of any answer one by one."""
        return any(r.accepted is not None for r in self.own_rows)

    @property
    def told(self) -> Told | None:
        """What is known of the rounds in sum; None where the engine told nothing."""
        every = sum(r.arm == OWN for r in self.requests)
        return pooled(self.own_rows, self.benchmark, every)

    @property
    def own_rows(self) -> list[RequestRow]:
        """Those of both sets that are asked every question."""
        return [row for name in SETS for row in self.first_answers(name)][:MOST_ANSWERS]

    @property
    def steps(self) -> int | None:
        """K of the benchmark; where it names none, that of the record, or of the training."""
        return (
            self.benchmark.get("num_speculative_tokens")
            or recorded_steps(self.requests)
            or self.training.get("num_speculative_tokens")
        )

    @property
    def slots(self) -> tuple[int, ...]:
        """Layers whose states are asked for: the drafter's; without one the capture's, or the
        default ones of a target that has them."""
        if self.drafter is not None:
            return self.drafter.config.slots
        if self.store is not None:
            return self.store.slots
        layers = self.target.num_layers
        return default_slots(layers) if layers >= 7 else (layers,)

    @property
    def line(self) -> dict[str, Any]:
        """What the benchmark measured of our drafter on the workload; {} for nothing."""
        lines = self.benchmark.get("arms") or []
        return next((a for a in lines if (a["arm"], a["set"]) == (OWN, "workload")), {})

    def attempt(self, question: int, read: Callable[[], T], otherwise: T) -> T:
        """``read()``; what a user's mistake or a broken file says becomes a cause."""
        return attempt(self.problems, question, read, otherwise)


def recorded_steps(rows: list[RequestRow]) -> int | None:
    """The commonest number of drafts a round in the engine's record; None where it tells none."""
    drafted = [n for r in rows for n in r.drafted or []]
    if drafted:
        return max(sorted(set(drafted)), key=drafted.count) or None
    widths = [len(r.counts["accepted_at"]) for r in rows if r.counts and r.counts["accepted_at"]]
    return max(widths, default=0) or None


def attempt(problems: list[Cause], question: int, read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except UserError as error:
        problems.append(_unreadable(error, question))
    except _BROKEN as error:
        problems.append(_unreadable(UserError(f"{type(error).__name__}: {error}"), question))
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
    run's data and training are left out: it was trained on something else. A run without a
    benchmark is diagnosed on the held-out answers of phase 01."""
    problems: list[Cause] = []
    place = folder / "06_benchmark_serving"
    benchmark = attempt(problems, 1, lambda: _json(place / "metrics.json"), {})
    captured = attempt(problems, 4, lambda: _json(folder / _CAPTURE / "inputs.json"), {})
    dtype = benchmark.get("dtype") or captured.get("params", {}).get("dtype") or "float32"
    m = Material(
        target, head or TargetHead(target, dtype), states_of or LiveTarget(target, dtype), dtype,
        benchmark=benchmark, problems=problems, folder=folder,
    )  # fmt: skip
    m.served_params = _params(m, place)
    exported = exported_drafter(folder)
    own = m.attempt(3, lambda: drafter_folder(folder, OWN), exported)
    if own == exported:
        _read_data(m, folder)
        _read_training(m, folder)
    _read_export(m, own)
    m.requests = m.attempt(1, lambda: read_requests(place), [])
    m.servers = m.attempt(1, lambda: _json(place / "servers.json"), {})
    m.problems += [*_broken_records(m), *_foreign_phases(m, folder)]
    if not m.requests:
        held = [r for r in m.answers if (r.split, r.repeat) == ("heldout", 0)]
        m.requests, m.answered_by = [_as_request(r) for r in held], "target"
    return m


def _broken_records(m: Material) -> list[Cause]:
    """Records that are not whole are taken for none, so that the others are diagnosed."""
    torn = [r for r in m.requests if len(r.accepted or []) != len(r.drafted or [])]
    if not torn:
        return []
    known = {r.key for r in torn}
    m.requests = [
        replace(r, accepted=None, drafted=None) if r.key in known else r for r in m.requests
    ]
    r = torn[0]
    return [
        Cause(
            "record-torn", "error", f"the record of rounds of {len(torn)} requests is not whole",
            f"request {r.prompt}: {len(r.accepted or [])} rounds by their accepted drafts, "
            f"{len(r.drafted or [])} by the drafted ones",
            "benchmark again: an engine tells both for every round",
            "06_benchmark_serving", question=1, experiment="both lists of each request",
            command="eagle3 run PROFILE 06 07",
        )
    ]  # fmt: skip


def _foreign_phases(m: Material, folder: Path) -> list[Cause]:
    """Phases that were run with another target: copied in, or made before the target changed."""
    now, found = m.target.fingerprint, {}
    for place in sorted(folder.glob("0*_*")):
        read = partial(_json, place / "inputs.json")
        made_for = m.attempt(1, read, {}).get("target", now)
        if made_for != now:
            found[place.name] = made_for
    if not found:
        return []
    first = next(iter(found))
    return [
        Cause(
            "foreign-phase", "error", f"{', '.join(found)} belong to another target",
            f"fingerprint {found[first]}, this one is {now}",
            "run them again with the target that is served",
            first, question=1, proof="shown", experiment="fingerprints of the phases' inputs",
            command=f"eagle3 run PROFILE {' '.join(name[:2] for name in found)}",
        )
    ]  # fmt: skip


def _as_request(r: AnswerRow) -> RequestRow:
    return RequestRow(OWN, r.set, r.id, 0, r.prompt_token_ids, r.answer_token_ids, r.finish_reason,
                      0.0, None, None)  # fmt: skip


def _drafter_missing(folder: Path) -> Cause:
    return Cause(
        "drafter-missing", "error", "the drafter that was benchmarked is not there any more",
        f"no folder {folder}", "put it back, or export it again: what the engine did with it can't "
        "be told without it",
        "05_export_drafter", question=3, experiment="the folder that the benchmark names",
        command="eagle3 run PROFILE 05",
    )  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    """As ``_object``, {} for no file."""
    return _object(path) if path.exists() else {}


def _object(path: Path) -> dict[str, Any]:
    """Raises ``UserError`` for no file, and for one that holds no JSON object."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(
            f"a {type(found).__name__} instead of an object", expected="a JSON object", where=path
        )
    return found


def _params(m: Material, phase: Path) -> dict[str, Any]:
    return dict(m.attempt(4, lambda: _json(phase / "inputs.json").get("params", {}), {}))


def _read_data(m: Material, folder: Path) -> None:
    place = folder / "01_generate_data"
    m.generated = _params(m, place)
    m.answers = m.attempt(5, lambda: read_answers(place), [])
    states = folder / _CAPTURE / "states"
    if states.exists():
        m.store = m.attempt(4, lambda: StateStore(states), None)
    vocab = folder / "03_build_vocab_map" / "vocab_map.safetensors"
    if vocab.exists():
        m.vocab = m.attempt(3, lambda: VocabMap.load(vocab), None)


def _read_training(m: Material, folder: Path) -> None:
    place = folder / "04_train_drafter"
    m.training = m.attempt(4, lambda: _json(place / "metrics.json"), {})
    m.training_params = _params(m, place)
    m.curve = m.attempt(4, lambda: read_jsonl(place / "metrics.jsonl"), [])
    best = place / "checkpoints" / "best" / "drafter.safetensors"
    if best.exists():
        m.trained = m.attempt(4, lambda: load_file(best), {})


def _read_export(m: Material, folder: Path) -> None:
    if not folder.exists():
        if m.benchmark:
            m.problems.append(_drafter_missing(folder))
        return
    m.export = folder
    m.raw_config = m.attempt(3, lambda: _object(folder / "config.json"), {})
    m.exported = m.attempt(3, lambda: read_weights(folder)[0], {})
    if not m.raw_config or not m.exported:
        return
    config, embedding = m.target.config, m.head.embedding
    m.export_findings = m.attempt(3, lambda: check_drafter_folder(folder, config, embedding), [])
    if any(f.severity == "error" for f in m.export_findings) or "d2t" not in m.exported:
        problems: list[Cause] = []  # the findings say what is wrong
        m.drafter = attempt(problems, 3, lambda: _drafter(m), None)
        return
    m.drafter = m.attempt(3, lambda: _drafter(m), None)


def _drafter(m: Material) -> Drafter:
    """The drafter as an engine would load it that checks nothing. Raises ``UserError`` where it
    reads layers that the target has not."""
    assert m.export is not None
    drafter = read_drafter(m.export, m.target.config, m.head.embedding, DTYPES[m.dtype])
    beyond = [s for s in drafter.config.slots if not 0 < s <= m.target.num_layers]
    if beyond:
        raise UserError(
            f"the drafter reads slots {beyond}",
            expected=f"slots from 1 to {m.target.num_layers}, the target's layers",
            where=m.export / "config.json",
        )
    return drafter


def foreign_material(
    live: LiveTarget,
    drafter: Path | None,
    requests: list[RequestRow],
    steps: int,
    *,
    answered_by: str = "engine",
    counters: dict[str, float] | None = None,
) -> Material:
    """A drafter that was trained elsewhere, or none: its folder, and requests that some server, or
    the target itself, answered with K = ``steps``. ``counters``: by what the server's own grew."""
    target, dtype = live.target, live.dtype
    told = {"num_speculative_tokens": steps, "dtype": dtype, "counters": {OWN: counters or {}}}
    m = Material(
        target, TargetHead(target, dtype), live, dtype, requests=requests, benchmark=told,
        answered_by=answered_by,
    )  # fmt: skip
    m.problems += _broken_records(m)
    if drafter is not None:
        _read_export(m, drafter)
    return m
