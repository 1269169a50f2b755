"""Read the ``config.json`` of anybody's drafter: SGLang/SpecForge style or speculators style.

    SGLang/SpecForge   flat; options at the top level (``use_aux_norm`` is an old name of
                       ``fc_norm``); layer ids nested in ``eagle_config``, at the top level, or none
    speculators        ``speculators_model_type``; the layer nested in ``transformer_layer_config``;
                       ``norm_before_residual`` is on unless the file says no;
                       ``target_hidden_size`` may be null; ids at the top level, before-layer ones

vLLM 0.33 and SGLang 0.5.23 were read for what each key does. What the files of both tools look like
is known from one export of each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lib.drafter.config import MLA, DrafterConfig, default_slots, heads_of
from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding, raise_errors

_MLA_TYPES = ("kimi_k2", "deepseek_v2", "deepseek_v3")
_IDS = "eagle_aux_hidden_state_layer_ids"


def read_drafter_config(folder: Path, num_target_layers: int) -> DrafterConfig:
    """The config of a drafter's folder. Raises ``UserError`` for a missing key, and with every
    finding of ``check_config_file`` that is an error."""
    path = folder / "config.json"
    raw = read_json(path)
    raise_errors(check_config_file(raw, num_target_layers, str(path)))
    c = flat_config(raw)
    try:
        mla = MLA.of(c) if c["model_type"] in _MLA_TYPES else None
        return DrafterConfig(
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            **heads_of(c, None, mla),
            rms_norm_eps=c["rms_norm_eps"],
            rope_parameters=rope_parameters(c, path),
            max_position_embeddings=c["max_position_embeddings"],
            vocab_size=c["vocab_size"],
            draft_vocab_size=c.get("draft_vocab_size") or c["vocab_size"],
            target_hidden_size=c.get("target_hidden_size") or c["hidden_size"],
            slots=read_slots(c, num_target_layers),
            bos_token_id=c.get("bos_token_id"),
            eos_token_id=c.get("eos_token_id"),
            **_options(c),
        )
    except KeyError as error:
        raise UserError(
            f"the drafter's config lacks {error.args[0]!r}",
            expected="a Llama-type or MLA-type EAGLE-3 config",
            where=path,
            next="export the drafter again with the tool that made it",
        ) from None


def is_speculators(raw: dict[str, Any]) -> bool:
    return "speculators_model_type" in raw


def flat_config(raw: dict[str, Any]) -> dict[str, Any]:
    """One level of keys, whatever the style."""
    if not is_speculators(raw):
        return raw
    layer = raw.get("transformer_layer_config")
    own = {k: v for k, v in raw.items() if k not in ("transformer_layer_config", "architectures")}
    return {"norm_before_residual": True} | (layer if isinstance(layer, dict) else {}) | own


def _options(c: dict[str, Any]) -> dict[str, bool]:
    nested = c.get("eagle_config") or {}
    return {
        "fc_norm": bool(c.get("fc_norm") or c.get("use_aux_norm")),
        "norm_output": bool(c.get("norm_output")),
        "norm_before_fc": bool(nested.get("norm_before_fc", c.get("norm_before_fc"))),
        "norm_before_residual": bool(c.get("norm_before_residual")),
    }


def read_slots(config: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """Slots from the layer ids, by the place they stand in.

    Top-level ids are before-layer ids. Nested ids alone are output ids (SpecForge's meaning and
    SGLang's reading), but for the default before-layer ids, which tools write there as they are
    (vLLM and SGLang's DeepSeek targets read them so). No ids are the default slots.
    """
    top, nested = config.get(_IDS), (config.get("eagle_config") or {}).get(_IDS)
    if top:
        return tuple(top)
    if not nested:
        return default_slots(num_target_layers)
    if _are_default_slots(nested, num_target_layers):
        return tuple(nested)
    return tuple(i + 1 for i in nested)


def _are_default_slots(ids: list[int], num_target_layers: int) -> bool:
    return list(ids) == [2, num_target_layers // 2, num_target_layers - 3]


def check_config_file(raw: dict[str, Any], num_target_layers: int, where: str) -> list[Finding]:
    """What can be wrong in the file itself, before any target is looked at."""
    c = flat_config(raw)
    return (
        _check_style(raw, c, where)
        + _check_layer(c, where)
        + _check_heads(c, where)
        + _check_layer_ids(c, num_target_layers, where)
    )


def _check_style(raw: dict[str, Any], c: dict[str, Any], where: str) -> list[Finding]:
    if is_speculators(raw):
        kind = raw["speculators_model_type"]
        if kind != "eagle3" or not isinstance(raw.get("transformer_layer_config"), dict):
            return [
                Finding(
                    "drafter-style",
                    "error",
                    f"a speculators config of type {kind!r}"
                    + ("" if kind != "eagle3" else " without transformer_layer_config"),
                    "speculators_model_type eagle3 with a transformer_layer_config",
                    "only EAGLE-3 drafters are read",
                    where,
                )
            ]
    known = ("llama", *_MLA_TYPES)
    if c.get("model_type") not in known:
        return [
            Finding(
                "drafter-type",
                "error",
                f"the drafter's model_type is {c.get('model_type')!r}",
                f"one of {', '.join(known)}",
                "a layer of another kind has tensors that this version does not read",
                where,
            )
        ]
    if c["model_type"] in _MLA_TYPES and c.get("kv_lora_rank") is None:
        return [
            Finding(
                "drafter-type",
                "error",
                f"model_type {c['model_type']} without kv_lora_rank",
                "the sizes of its latent attention",
                "write the layer's sizes into the config, or model_type llama",
                where,
            )
        ]
    return []


def _check_layer(c: dict[str, Any], where: str) -> list[Finding]:
    findings = []
    plain = {"num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False,
             "mlp_bias": False, "bias": False}  # fmt: skip
    for key, wanted in plain.items():
        if c.get(key, wanted) not in (wanted, None):
            findings.append(
                Finding(
                    "drafter-layer",
                    "error",
                    f"{key} is {c[key]!r}",
                    f"{wanted!r}: one layer of silu without biases",
                    "this version reads no other layer",
                    where,
                )
            )
    draft, whole = c.get("draft_vocab_size"), c.get("vocab_size")
    if c.get("tie_word_embeddings") and draft and draft != whole:
        findings.append(
            Finding(
                "tied-reduced-head",
                "error",
                f"tie_word_embeddings with draft_vocab_size {draft} of {whole}: an engine takes "
                "the embedding for the head, whose rows are other tokens",
                "tie_word_embeddings false",
                "set it to false; the checkpoint has its own lm_head",
                where,
            )
        )
    window = c.get("sliding_window")
    if window and (
        c.get("use_sliding_window") or "sliding_attention" in (c.get("layer_types") or [])
    ):
        findings.append(
            Finding(
                "sliding-window",
                "warning",
                f"the drafter's layer looks back {window} tokens; this reference looks back "
                "without limit",
                f"equal up to {window} tokens of conversation",
                "train and serve it again without a window, or keep conversations below it",
                where,
            )
        )
    return findings


def _check_heads(c: dict[str, Any], where: str) -> list[Finding]:
    heads, kv_heads = c.get("num_attention_heads"), c.get("num_key_value_heads")
    if c.get("model_type") in _MLA_TYPES or not heads or not kv_heads or heads % kv_heads == 0:
        return []
    return [
        Finding(
            "heads",
            "error",
            f"{heads} query heads do not divide over {kv_heads} key heads",
            "num_attention_heads a multiple of num_key_value_heads",
            "take the head counts of the tool that trained it",
            where,
        )
    ]


def _check_layer_ids(c: dict[str, Any], num_target_layers: int, where: str) -> list[Finding]:
    top, nested = c.get(_IDS), (c.get("eagle_config") or {}).get(_IDS)
    if top and nested and list(nested) not in (list(top), [i - 1 for i in top]):
        return [
            Finding(
                "layer-ids-conflict",
                "error",
                f"layer ids {list(top)} at the top level, {list(nested)} in eagle_config",
                "the same layers: equal, or each one less (the output of the layer before)",
                "keep the ids that it was trained with in both places",
                where,
            )
        ]
    if top or not nested:
        return []
    read = list(read_slots(c, num_target_layers))
    return [
        Finding(
            "layer-ids-nested",
            "warning",
            f"layer ids {list(nested)} stand in eagle_config alone; read here as HF states {read}",
            "vLLM reads them as before-layer ids or not at all, SGLang as output ids (DeepSeek "
            "targets: as output ids only if the first is 1)",
            "ask how it was trained; a wrong reading loads, runs and is never accepted",
            where,
        )
    ]
