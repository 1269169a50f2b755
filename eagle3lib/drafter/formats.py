"""What each engine reads in a drafter's folder: the rules as data, and the layer ids they give.

A slot is the HF index of a state ("before layer i"). The same three tensors of a target of 61
layers are written in two ways, and every reader takes one number for one of the two:

    slots (HF index, before layer)     2   30   58     vLLM, at the top level
    output of layer                    1   29   57     SGLang's Llama and Qwen targets, which add 1

vLLM has two model runners: V2, the default where Triton works, never looks into ``eagle_config``
for EAGLE-3's key and falls back to the target's defaults; V1 does look there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eagle3lib.drafter.config import DrafterConfig, before_layer_ids, output_layer_ids
from eagle3lib.drafter.read_config import flat_config, is_speculators
from eagle3lib.engine.config import Engine
from eagle3lib.lab.errors import UserError

Reader = Literal["vllm-v1", "vllm-v2", "sglang"]
READERS: dict[Engine, tuple[Reader, ...]] = {"vllm": ("vllm-v1", "vllm-v2"), "sglang": ("sglang",)}
RULES_READ_IN = {"vllm": "0.32, 0.33", "sglang": "0.5.23"}
IDS = "eagle_aux_hidden_state_layer_ids"

Counting = Literal["adds 1", "adds 1 if the first id is 1", "as is if the largest id is n"]
# SGLang's set_eagle3_layers_to_capture, by the model class of the target.
_SGLANG_COUNTING: dict[Counting, tuple[str, ...]] = {
    "adds 1 if the first id is 1": ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2",
                                    "kimi_k25"),
    "as is if the largest id is n": ("gpt_oss",),
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """How one key or tensor of a drafter is read; ``source`` is where that was read."""

    key: str
    vllm: str
    sglang: str
    source: str


RULES = (
    Rule(
        "style",
        "SGLang/SpecForge style; speculators style with a Llama or Qwen3 layer",
        "SGLang/SpecForge style alone",
        "vllm: transformers_utils/configs/speculators; sglang: models/llama_eagle3.py",
    ),
    Rule(
        "layer ids",
        "top level, before-layer ids. Else V1: `eagle_config`, taken for before-layer ids; "
        "V2: the target's defaults, in silence",
        "`eagle_config` alone, output ids: Llama, Qwen and others add 1; DeepSeek and Kimi add 1 "
        "only if the first id is 1; gpt_oss takes them as they are if the largest is n. "
        "Else the target's defaults",
        "vllm: v1/worker/gpu_model_runner.py, v1/worker/gpu/spec_decode/eagle/eagle3_utils.py; "
        "sglang: set_eagle3_layers_to_capture of each target, pull request 25454",
    ),
    Rule(
        "`use_aux_hidden_state`",
        "in `eagle_config`, on unless it says no",
        "in `eagle_config`, on unless it says no",
        "vllm: llama_eagle3.py; sglang: speculative/eagle_worker.py",
    ),
    Rule(
        "`norm_before_residual`",
        "off unless it says yes; in speculators style on unless it says no",
        "never: always off",
        "vllm: llama_eagle3.py, configs/speculators/algos.py; sglang: llama_eagle3.py",
    ),
    Rule(
        "`norm_before_fc`",
        "top level or `eagle_config`, Llama-type alone",
        "Llama-type alone",
        "vllm: llama_eagle3.py, deepseek_eagle3.py; sglang: llama_eagle3.py",
    ),
    Rule(
        "`fc_norm`, `norm_output`",
        "top level, both types",
        "top level, both types; `use_aux_norm` and `aux_norm_low/mid/high` too (old names)",
        "vllm: llama_eagle3.py, deepseek_eagle3.py; sglang: llama_eagle3.py",
    ),
    Rule(
        "`d2t`",
        "offsets; missing with D < V: zeros, so ids 0..D-1, in silence",
        "offsets; missing: draft ids are taken for target ids",
        "vllm: llama_eagle3.py (compute_logits, load_weights); sglang: llama_eagle3.py",
    ),
    Rule(
        "`embed_tokens`",
        "kept if it differs from the target's; missing: the target's",
        "replaced by the target's (equal hidden sizes)",
        "vllm: v1/spec_decode/llm_base_proposer.py; sglang: set_embed",
    ),
    Rule(
        "`lm_head`",
        "kept if it differs from the target's; missing: the target's",
        "kept; missing with no draft_vocab_size: the target's; tie_word_embeddings: the embedding",
        "vllm: v1/spec_decode/llm_base_proposer.py; sglang: llama_eagle3.py",
    ),
    Rule(
        "`max_position_embeddings`",
        "sizes the rotary table; a longer conversation is an access out of bounds",
        "the same",
        "vllm: issue 48894; sglang: issues 10787, 9388",
    ),
    Rule(
        "quantisation",
        "the drafter's own config; none: not quantised",
        "none in its config: the target's is inherited unless "
        "--speculative-draft-model-quantization says unquant",
        "vllm: models/utils.py get_draft_quant_config; sglang: pull request 28196",
    ),
    Rule(
        "sliding window",
        "`layer_types` and `sliding_window` of the layer",
        "never: looks back without limit",
        "vllm: models/llama.py; sglang: llama_eagle3.py",
    ),
)


@dataclass(frozen=True)
class LayerReading:
    """``slots`` (HF indices) that a reader takes, and how it came to them; None where it can't read
    the folder at all."""

    reader: Reader
    slots: tuple[int, ...] | None
    how: str


def sglang_counting(target_config: dict[str, Any]) -> Counting:
    """How SGLang's class of this target counts explicit ids."""
    name = target_config.get("model_type", "")
    for counting, types in _SGLANG_COUNTING.items():
        if name in types:
            return counting
    return "adds 1"


def sglang_slots(ids: list[int], target_config: dict[str, Any]) -> tuple[int, ...]:
    """Slots that SGLang captures for nested ``ids``."""
    counting, layers = sglang_counting(target_config), target_config["num_hidden_layers"]
    as_is = (counting == "adds 1 if the first id is 1" and ids[0] != 1) or (
        counting == "as is if the largest id is n" and max(ids) == layers
    )
    return tuple(ids) if as_is else tuple(i + 1 for i in ids)


def sglang_ids(slots: tuple[int, ...], target_config: dict[str, Any]) -> list[int] | None:
    """Nested ids from which SGLang captures ``slots``; None where no ids do (a DeepSeek target with
    slots that start at 1)."""
    for ids in (output_layer_ids(slots), before_layer_ids(slots)):
        if sglang_slots(ids, target_config) == slots:
            return ids
    return None


def read_layer_ids(
    raw: dict[str, Any], reader: Reader, target_config: dict[str, Any]
) -> LayerReading:
    """What the rules say that a reader takes from a drafter's ``config.json`` as it stands."""
    c = flat_config(raw)
    top, nested = c.get(IDS), (c.get("eagle_config") or {}).get(IDS)
    layers = target_config["num_hidden_layers"]
    default = (2, layers // 2, layers - 3)
    if reader == "sglang":
        if is_speculators(raw):
            return LayerReading(reader, None, "does not read speculators style")
        if nested:
            how = f"eagle_config {nested}, {sglang_counting(target_config)}"
            return LayerReading(reader, sglang_slots(nested, target_config), how)
        seen = f", {top} at the top level is not read" if top else ""
        return LayerReading(reader, default, f"the target's defaults{seen}")
    if top:
        return LayerReading(reader, tuple(top), f"top level {top}, before-layer ids")
    if nested and reader == "vllm-v1":
        return LayerReading(reader, tuple(nested), f"eagle_config {nested}, as before-layer ids")
    seen = f", {nested} in eagle_config is not read" if nested else ""
    return LayerReading(reader, default, f"the target's defaults{seen}")


def serving_config(
    config: DrafterConfig, dtype: str, target_config: dict[str, Any] | None, *, for_sglang: bool
) -> dict[str, Any]:
    """``config.json`` that each engine reads where it looks: before-layer ids at the top level for
    vLLM, and in ``eagle_config`` those from which SGLang's class of the target takes the same
    states. Without ``target_config`` the ids must mean the same for every class.

    Raises ``UserError`` where SGLang can't be told these slots.
    """
    written = config.as_hf_config(dtype)
    if not for_sglang:
        written["eagle_config"] = {"use_aux_hidden_state": True}
        return written
    if target_config is None and config.slots[0] != 2:
        raise UserError(
            f"slots {list(config.slots)} are numbered differently for different targets of SGLang",
            expected="the target, to write the ids that its class reads",
            next="--target TARGET",
        )
    known = target_config or {"num_hidden_layers": max(config.slots) + 1}
    ids = sglang_ids(config.slots, known)
    if ids is None:
        raise UserError(
            f"SGLang can't be told slots {list(config.slots)} of a {known.get('model_type')} "
            "target: it adds 1 to ids that start with 1, and takes others as they are",
            expected="a first slot of 2 or more",
            next="--to vllm, or train on other slots",
        )
    written["eagle_config"][IDS] = ids
    return written


def rules_table() -> str:
    """The rules as a Markdown table, for docs/engines.md."""
    head = f"| key | vLLM {RULES_READ_IN['vllm']} | SGLang {RULES_READ_IN['sglang']} | read in |"
    lines = [head, "|---|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {r.key} | {r.vllm} | {r.sglang} | {r.source} |" for r in RULES)]
    )
