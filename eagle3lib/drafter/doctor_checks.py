"""What the doctor looks for beyond the folder's own checks: each a finding with its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib.drafter.config import DrafterConfig, output_layer_ids
from eagle3lib.drafter.formats import IDS, LayerReading
from eagle3lib.drafter.layers import Rotary
from eagle3lib.drafter.read_config import flat_config
from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.drafter.vocab import VocabMap, coverage_counts
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding, Severity
from eagle3lib.target.folder import Target

_ASK = "ask how it was trained; a wrong reading loads, runs and is never accepted"
# Below it, rows have nothing to do with the target's: independent rows of width H have a mean
# cosine of about 1 / sqrt(H), and embeddings that were trained on keep 0.9 and more.
_UNRELATED_COSINE = 0.2
_LOW_COVERAGE = 0.9


def check_readings(
    raw: dict[str, Any], readings: Sequence[LayerReading], layers: int, where: str
) -> list[Finding]:
    """Whether every reader takes the states that the ids in the file mean."""
    c = flat_config(raw)
    top, nested = c.get(IDS), (c.get("eagle_config") or {}).get(IDS)
    meanings = _meanings(top, nested, layers)
    findings = []
    for reading in readings:
        if reading.slots is None:
            findings.append(
                Finding("style-not-read", "error", f"{reading.reader} {reading.how}",
                        "SGLang/SpecForge style", "eagle3 convert SRC DST --to both", where)
            )  # fmt: skip
        elif not _in_range(reading.slots, layers):
            findings.append(
                Finding("layer-ids-range", "error",
                        f"{reading.reader} takes states {list(reading.slots)} ({reading.how})",
                        f"distinct, rising, 1 to {layers}", "eagle3 convert SRC DST --to both",
                        where)
            )  # fmt: skip
        elif meanings and reading.slots not in meanings:
            findings.append(_misread(reading, meanings, "error", where))
        elif len(meanings) > 1 and reading.slots != meanings[0]:
            findings.append(_misread(reading, meanings, "warning", where))
    return findings


def _meanings(top: Any, nested: Any, layers: int) -> list[tuple[int, ...]]:
    """The slots that the written ids can mean, the likelier first; none where none are written."""
    if top:
        return [tuple(top)]
    if not nested:
        return []
    default = (2, layers // 2, layers - 3)
    as_is, outputs = tuple(nested), tuple(i + 1 for i in nested)
    if as_is == default:
        return [as_is]
    return [outputs] if list(nested) == output_layer_ids(default) else [outputs, as_is]


def _misread(
    reading: LayerReading, meanings: list[tuple[int, ...]], severity: Severity, where: str
) -> Finding:
    wanted = " or ".join(str(list(m)) for m in meanings)
    title = f"{reading.reader} takes states {list(reading.slots or ())}, the ids mean {wanted}"
    remedy = "eagle3 convert SRC DST --to both --target T" if severity == "error" else _ASK
    code = "layer-ids-misread" if severity == "error" else "layer-ids-ambiguous"
    return Finding(code, severity, title, reading.how, remedy, where)


def _in_range(slots: tuple[int, ...], layers: int) -> bool:
    return list(slots) == sorted(set(slots)) and all(0 < s <= layers for s in slots)


def check_slot_count(
    config: DrafterConfig, tensors: dict[str, Tensor], where: str
) -> list[Finding]:
    """``fc`` takes as many slots as ids are named."""
    fc, width = tensors.get("fc.weight"), config.target_hidden_size
    if fc is None or fc.ndim != 2 or fc.shape[1] in (len(config.slots) * width,):
        return []
    title = f"fc.weight takes {fc.shape[1] / width:g} states, the config names {len(config.slots)}"
    return [
        Finding("slot-count", "error", title, f"slots {list(config.slots)} of width {width}",
                "write the ids that it was trained with into the config", where)
    ]  # fmt: skip


@dataclass(frozen=True)
class RopeComparison:
    """Rotary frequencies of the drafter against what the target's settings give for its heads."""

    base: float
    target_base: float
    rope_type: str
    target_type: str
    largest_ratio: float  # of inverse frequencies, 1 if they are the same
    scaling: float  # of cosines and sines (YaRN), drafter's over the target's


def compare_rope(config: DrafterConfig, target_config: dict[str, Any]) -> RopeComparison:
    """Raises ``UserError`` where the target's own settings can't be read as one set."""
    wanted = rope_parameters(target_config, "the target's config.json")
    longest = target_config["max_position_embeddings"]
    mine = Rotary(config)
    theirs = Rotary(replace(config, rope_parameters=wanted, max_position_embeddings=longest))
    ratio = mine.inv_freq.double() / theirs.inv_freq.double()
    return RopeComparison(
        base=config.rope_parameters["rope_theta"],
        target_base=wanted["rope_theta"],
        rope_type=config.rope_parameters["rope_type"],
        target_type=wanted["rope_type"],
        largest_ratio=float(torch.maximum(ratio, 1 / ratio).max()),
        scaling=mine.attention_scaling / theirs.attention_scaling,
    )


def check_rope(config: DrafterConfig, target_config: dict[str, Any], where: str) -> list[Finding]:
    """Another schedule than the target's is legal if it was trained so: named, with figures."""
    try:
        c = compare_rope(config, target_config)
    except UserError as error:
        return [Finding("rope-unknown", "note", "the rotary embedding can't be compared",
                        f"{error.found}", "compare it by hand", where)]  # fmt: skip
    if c.largest_ratio < 1 + 1e-4 and abs(c.scaling - 1) < 1e-4:
        return []
    return [
        Finding(
            "rope-differs",
            "warning",
            f"rotary base {c.base:g} ({c.rope_type}), the target's {c.target_base:g} "
            f"({c.target_type})",
            f"inverse frequencies differ by up to {c.largest_ratio:.3g} times, their scaling by "
            f"{c.scaling:.3g}",
            "right if it was trained so; if not, copy the target's settings",
            where,
        )
    ]


def check_length(config: DrafterConfig, max_model_len: int | None, where: str) -> list[Finding]:
    """Beyond the rotary table an engine reads out of bounds: a crash, or worse, none."""
    if not max_model_len or max_model_len <= config.max_position_embeddings:
        return []
    return [
        Finding(
            "beyond-rotary-table",
            "error",
            f"the server's limit is {max_model_len} tokens, the drafter's rotary table ends at "
            f"{config.max_position_embeddings}",
            "max_model_len at most max_position_embeddings of the drafter",
            f"serve with a limit of {config.max_position_embeddings}",
            where,
        )
    ]


@dataclass(frozen=True)
class EmbeddingComparison:
    rows: int
    identical_rows: int
    mean_cosine: float


def compare_embeddings(own: Tensor, target: Tensor) -> EmbeddingComparison | None:
    """Two [V, H] row by row, in the checkpoint's dtype; None where the shapes differ."""
    if own.shape != target.shape:
        return None
    same = int((own == target.to(own.dtype)).all(-1).sum())
    cosine = torch.nn.functional.cosine_similarity(own.float(), target.float(), dim=-1)
    return EmbeddingComparison(len(own), same, float(cosine.mean()))


def check_embeddings(found: EmbeddingComparison | None, own: bool, where: str) -> list[Finding]:
    """``own`` says that the user declared them as trained."""
    if found is None or own or found.mean_cosine >= _UNRELATED_COSINE:
        return []
    return [
        Finding(
            "embeddings-unrelated",
            "error",
            f"embed_tokens has nothing to do with the target's: {found.identical_rows} of "
            f"{found.rows} rows identical, mean cosine {found.mean_cosine:.2f}",
            "a copy of the target's, none, or embeddings that were trained. vLLM keeps these, "
            "SGLang replaces them: random ones look poor in vLLM and fine in SGLang",
            "take embed_tokens out of the folder; or say --own-embeddings if they were trained",
            where,
        )
    ]


def check_old_names(raw: dict[str, Any], names: set[str], where: str) -> list[Finding]:
    """Names that SGLang alone still reads: vLLM would run without that norm, or stop."""
    old = sorted({n.split(".")[0] for n in names if n.startswith("aux_norm_")})
    old += ["use_aux_norm"] if flat_config(raw).get("use_aux_norm") else []
    if not old:
        return []
    return [
        Finding("vllm-old-names", "error", f"old names: {', '.join(old)}",
                "vLLM reads fc_norm alone", "eagle3 convert SRC DST --to both", where)
    ]  # fmt: skip


def check_quantisation(
    raw: dict[str, Any], target_config: dict[str, Any], where: str
) -> list[Finding]:
    """A plain drafter under a quantised target: SGLang loads it as if it were quantised too."""
    theirs, own = (
        target_config.get("quantization_config"),
        flat_config(raw).get("quantization_config"),
    )
    if own or not theirs:
        return []
    name = theirs.get("quant_method", "unnamed") if isinstance(theirs, dict) else str(theirs)
    return [
        Finding(
            "sglang-inherits-quantisation",
            "warning",
            f"the target is quantised ({name}), the drafter is not: SGLang gives it the target's",
            "vLLM reads the drafter's own config, so none",
            "--speculative-draft-model-quantization unquant",
            where,
        )
    ]


def check_dtypes(tensors: dict[str, Tensor], where: str) -> list[Finding]:
    kinds = Counter(str(t.dtype) for t in tensors.values() if t.is_floating_point())
    if len(kinds) < 2:
        return []
    told = ", ".join(f"{n} {k.removeprefix('torch.')}" for k, n in kinds.most_common())
    return [
        Finding("mixed-dtypes", "warning", f"weights of several dtypes: {told}",
                "engines cast all to one", "export it again in one dtype", where)
    ]  # fmt: skip


def check_logit_scale(raw: dict[str, Any], where: str) -> list[Finding]:
    scale = flat_config(raw).get("logit_scale", 1.0)
    if scale == 1.0:
        return []
    return [
        Finding("sglang-logit-scale", "warning", f"logit_scale {scale}: SGLang reads none",
                "greedy drafts stay the same, sampled ones do not", "serve it with vLLM", where)
    ]  # fmt: skip


def count_text(vocab: VocabMap, target: Target, path: Path) -> tuple[int, int]:
    """(tokens of a text file inside the draft vocabulary, tokens), by the target's tokenizer."""
    if not path.is_file():
        raise UserError("no text to measure coverage on", where=path)
    text = path.read_text(encoding="utf-8", errors="replace")
    if (target.folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(target.folder / "tokenizer.json"))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        from transformers import AutoTokenizer

        ids = AutoTokenizer.from_pretrained(target.folder).encode(text, add_special_tokens=False)
    return coverage_counts(vocab, [ids])


def check_map_choice(vocab: VocabMap, counted: tuple[int, int] | None, where: str) -> list[Finding]:
    """A lawful map can still be a poor choice of tokens."""
    findings = []
    size, whole = len(vocab.d2t), len(vocab.t2d)
    if size < whole and not bool(vocab.d2t.any()):
        findings.append(
            Finding("vocab-map-first-ids", "warning",
                    f"the draft vocabulary is simply the first {size} of {whole} ids",
                    "what is left when a map was lost: a choice by counts is never like that",
                    "take the map that it was trained with", where)
        )  # fmt: skip
    if counted and counted[1] and counted[0] / counted[1] < _LOW_COVERAGE:
        share = counted[0] / counted[1]
        findings.append(
            Finding("vocab-coverage", "warning",
                    f"the draft vocabulary holds {share:.1%} of the given text",
                    f"{counted[0]} of {counted[1]} tokens; others end every chain",
                    "a map from counts of your own answers: eagle3 run PROFILE 03", where)
        )  # fmt: skip
    return findings
