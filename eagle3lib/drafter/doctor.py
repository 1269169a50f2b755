"""The doctor: what each engine will read in somebody's drafter, and what is wrong with it.

No GPU and no engine is needed; where an engine is installed, its own code is asked (doctor_probe),
and its answer stands above the rules of :mod:`eagle3lib.drafter.formats`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3lib.drafter import doctor_checks as checks
from eagle3lib.drafter.checkpoint import check_drafter_folder, vocab_map
from eagle3lib.drafter.config import OPTIONS, DrafterConfig, output_layer_ids
from eagle3lib.drafter.doctor_probe import Answer, ask_engine
from eagle3lib.drafter.formats import READERS, RULES_READ_IN, LayerReading, Reader, read_layer_ids
from eagle3lib.drafter.read_config import flat_config, read_drafter_config
from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.drafter.weights import read_weights, stored_names
from eagle3lib.engine.config import Engine
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding, by_severity
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead

EngineChoice = Literal["vllm", "sglang", "all"]
Ask = Callable[[Engine, Path, Path], Answer]
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Diagnosis:
    """``facts`` is one dict a reader (``vllm-v1``, ``vllm-v2``, ``sglang``) of what it will read,
    in words."""

    drafter: str
    target: str
    facts: dict[str, dict[str, str]]
    findings: list[Finding]

    @property
    def failed(self) -> bool:
        return any(f.severity == "error" for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        found = [f.as_dict() for f in self.findings]
        return {"drafter": self.drafter, "target": self.target, "readers": self.facts,
                "findings": found, "failed": self.failed}  # fmt: skip

    def rows(self) -> list[dict[str, str]]:
        """One row an aspect, one column a reader."""
        aspects = next(iter(self.facts.values()), {})
        return [{"": a} | {r: f[a] for r, f in self.facts.items()} for a in aspects]


@dataclass(frozen=True)
class _Folder:
    """What could be read; the parts that could not are None, and a finding says why."""

    raw: dict[str, Any]
    config: DrafterConfig | None
    tensors: dict[str, Tensor]
    where: str
    vocab: VocabMap | None
    embeddings: str  # in words
    compared: checks.EmbeddingComparison | None


def examine(
    folder: Path,
    target: Target,
    engine: EngineChoice = "all",
    *,
    max_model_len: int | None = None,
    text: Path | None = None,
    own_embeddings: bool = False,
    ask: Ask | None = ask_engine,
) -> Diagnosis:
    """Examine a drafter's folder for a target. ``ask`` None takes the rules alone; ``text`` is a
    file to count coverage on. Raises ``UserError`` for a folder without a readable config.json."""
    engines: list[Engine] = list(READERS) if engine == "all" else [engine]
    raw = read_json(folder / "config.json")
    where = str(folder / "config.json")
    findings: list[Finding] = []
    read = _read(folder, raw, target, findings)
    answers = {e: ask(e, folder, target.folder) if ask else Answer(e) for e in engines}
    readings = {}
    for name in engines:
        for reader in READERS[name]:
            readings[reader] = _reading(raw, reader, answers[name], target, findings)
    findings += checks.check_readings(raw, list(readings.values()), target.num_layers, where)
    findings += [f for a in answers.values() for f in check_answer(a, where)]
    findings += _check_contents(read, target, max_model_len, text, own_embeddings)
    facts = {
        reader: _facts(reading, answers[reader.split("-")[0]], read, target)
        for reader, reading in readings.items()
    }
    kept = _for_engines(findings, engines)
    return Diagnosis(str(folder), target.name, facts, by_severity(dict.fromkeys(kept)))


def _read(folder: Path, raw: dict[str, Any], target: Target, findings: list[Finding]) -> _Folder:
    """Read as far as it goes; what stops it becomes a finding, not an end."""
    config, tensors, where, vocab = None, {}, str(folder), None
    own = compared = None
    try:
        config = read_drafter_config(folder, target.num_layers)
    except UserError as error:
        findings.append(_as_finding(error))
    try:
        tensors, where = read_weights(folder)
        own = tensors.get(_EMBEDDING)
        embedding = torch.empty(0) if own is None else TargetHead(target).embedding
        compared = None if own is None else checks.compare_embeddings(own, embedding)
        if config:
            findings += check_drafter_folder(folder, target.config, embedding)
            vocab = _vocab(tensors, config, where)
    except UserError as error:
        findings.append(_as_finding(error))
    return _Folder(raw, config, tensors, where, vocab, _words_of(own, compared), compared)


def _vocab(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> VocabMap | None:
    try:
        return VocabMap(**vocab_map(tensors, config, where))
    except UserError:  # check_drafter_folder has said so
        return None


def _words_of(own: Tensor | None, compared: checks.EmbeddingComparison | None) -> str:
    if own is None:
        return "absent"
    if compared is None:
        return f"own, {tuple(own.shape)}"
    if compared.identical_rows == compared.rows:
        return "identical to the target's"
    return f"own ({compared.identical_rows} of {compared.rows} rows are the target's)"


def _as_finding(error: UserError) -> Finding:
    return Finding("unreadable", "error", error.found, error.expected, error.next, error.where)


def _reading(
    raw: dict[str, Any], reader: Reader, answer: Answer, target: Target, findings: list[Finding]
) -> LayerReading:
    """By the rules; where the engine's own code answered, by that, and a warning if they differ."""
    ruled = read_layer_ids(raw, reader, target.config)
    if reader not in answer.slots or answer.said is None:
        return ruled
    said, version = answer.slots[reader], answer.said["version"]
    layers = target.num_layers
    slots = tuple(said) if said else (2, layers // 2, layers - 3)
    how = f"{ruled.how}; asked {version}" if said else f"the target's defaults; asked {version}"
    if slots != ruled.slots:
        findings.append(
            Finding("rules-out-of-date", "warning",
                    f"{reader} {version} takes states {list(slots)}, our rules say "
                    f"{list(ruled.slots or ())}", ruled.how, "the engine's answer is used",
                    "eagle3lib/drafter/formats.py")
        )  # fmt: skip
        how = f"asked {version}"
    return LayerReading(reader, slots, how)


def check_answer(answer: Answer, where: str) -> list[Finding]:
    """What the engine's own code said about the folder and the target."""
    said, name = answer.said, answer.engine
    if said is None:
        if not answer.why_not:
            return []
        severity: Literal["warning", "note"] = "warning" if answer.installed else "note"
        title = f"{name} was not asked, the rules of {RULES_READ_IN[name]} were used"
        return [Finding("engine-not-asked", severity, title, answer.why_not, "", where)]
    version = f"{name} {said['version']}"
    if said.get("refused"):
        return [Finding("engine-refuses", "error", f"{version} refuses the drafter",
                        said["refused"], "eagle3 convert SRC DST --to both", where)]  # fmt: skip
    found = []
    if not said.get("class"):
        found.append(Finding("engine-architecture", "error",
                             f"{version} has no model for {said['architecture']!r}",
                             "LlamaForCausalLMEagle3 or Eagle3DeepseekV2ForCausalLM",
                             "eagle3 convert SRC DST --to both", where))  # fmt: skip
    if said.get("target_eagle3") is False:
        found.append(Finding("engine-target", "error",
                             f"{version} does not serve this target with EAGLE-3",
                             "its model class has no EAGLE-3 interface",
                             "another engine, or a newer one", where))  # fmt: skip
    return found


def _check_contents(
    read: _Folder, target: Target, max_model_len: int | None, text: Path | None, own: bool
) -> list[Finding]:
    where, config_file = read.where, "config.json of the drafter"
    findings = checks.check_quantisation(read.raw, target.config, config_file)
    findings += checks.check_logit_scale(read.raw, config_file)
    findings += checks.check_dtypes(read.tensors, where)
    findings += checks.check_embeddings(read.compared, own, where)
    names = stored_names(Path(where).parent) if read.tensors else set()
    findings += checks.check_old_names(read.raw, names, where)
    if read.config:
        findings += checks.check_slot_count(read.config, read.tensors, where)
        findings += checks.check_rope(read.config, target.config, config_file)
        findings += checks.check_length(read.config, max_model_len, config_file)
    if read.vocab:
        counted = checks.count_text(read.vocab, target, text) if text else None
        findings += checks.check_map_choice(read.vocab, counted, where)
    return findings


def _for_engines(findings: list[Finding], engines: list[str]) -> list[Finding]:
    """Findings about one engine count for it alone, as errors where no other is asked for."""
    kept = []
    for f in findings:
        about = next((e for e in READERS if f.code.startswith(f"{e}-")), None)
        if about is None:
            kept.append(f)
        elif about in engines:
            flag = f.code == "sglang-inherits-quantisation"  # a flag mends it
            alone = engines == [about] and not flag
            kept.append(replace(f, severity="error") if alone else f)
    return kept


def _facts(reading: LayerReading, answer: Answer, read: _Folder, target: Target) -> dict[str, str]:
    """What one reader will do with the folder, in words."""
    said, sglang = answer.said or {}, reading.reader == "sglang"
    source = f"asked {said['version']}" if said else f"rules of {RULES_READ_IN[answer.engine]}"
    c, flat = read.config, flat_config(read.raw)
    architecture = said.get("class") or (read.raw.get("architectures") or ["none named"])[0]
    taken = "the target's" if sglang or not read.embeddings.startswith("own") else "its own"
    return {
        "source": source,
        "architecture": architecture,
        "states (HF index)": _states(reading),
        "norms": ", ".join(_norms(c, sglang)) if c else "unknown",
        "draft vocabulary": _vocabulary(read),
        "embeddings": f"{taken} (in the folder: {read.embeddings})",
        "rope": _rope(c, target),
        "positions": f"{c.max_position_embeddings:,}" if c else "unknown",
        "dtype": said.get("dtype")
        or flat.get("torch_dtype")
        or read.raw.get("dtype")
        or "server's",
        "quantisation": _quantisation(flat, target, sglang),
    }


def _states(reading: LayerReading) -> str:
    if reading.slots is None:
        return reading.how
    outputs = ", ".join(map(str, output_layer_ids(reading.slots)))
    return f"{list(reading.slots)}, outputs of layers {outputs} ({reading.how})"


def _norms(c: DrafterConfig, sglang: bool) -> list[str]:
    ignored = ("norm_before_residual",) if sglang else ()
    return [o for o in c.options if o not in ignored] or [f"none of {', '.join(OPTIONS)}"]


def _vocabulary(read: _Folder) -> str:
    if read.config is None:
        return "unknown"
    size, whole = read.config.draft_vocab_size, read.config.vocab_size
    lawful = "a lawful map" if read.vocab else "NO lawful map" if read.tensors else "map unknown"
    lawful = "whole" if size == whole else lawful
    return f"{size:,} of {whole:,}, {lawful}"


def _rope(c: DrafterConfig | None, target: Target) -> str:
    if c is None:
        return "unknown"
    settings = f"base {c.rope_parameters['rope_theta']:g}, {c.rope_parameters['rope_type']}"
    try:
        ratio = checks.compare_rope(c, target.config).largest_ratio
    except UserError:
        return settings
    return f"{settings}, {'as' if ratio < 1 + 1e-4 else 'not as'} the target's"


def _quantisation(flat: dict[str, Any], target: Target, sglang: bool) -> str:
    if flat.get("quantization_config"):
        return "the drafter's own"
    theirs = target.config.get("quantization_config")
    if sglang and theirs:
        return "the target's, inherited, unless told not to"
    return "none"
