"""What can be wrong between a drafter and its target, and between a drafter and the engines.

Engines as of vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.lab.finding import Finding

_WHERE = "config.json of the drafter"


def check_drafter_config(config: DrafterConfig, target_config: dict[str, Any]) -> list[Finding]:
    """A drafter's config against its target's: what would load and then never be accepted."""
    return (
        _check_slots(config, target_config)
        + _check_sizes(config, target_config)
        + _check_rope(config, target_config)
    )


def _check_slots(config: DrafterConfig, target_config: dict[str, Any]) -> list[Finding]:
    layers, slots = target_config["num_hidden_layers"], list(config.slots)
    if slots and slots == sorted(set(slots)) and all(0 < s <= layers for s in slots):
        return []
    return [
        Finding(
            "slots-out-of-range",
            "error",
            f"the drafter's slots are {slots}",
            f"distinct, rising ids between 1 and {layers}",
            "export it again for this target",
            _WHERE,
        )
    ]


def _check_sizes(config: DrafterConfig, target_config: dict[str, Any]) -> list[Finding]:
    findings = []
    for name, mine in (
        ("vocab_size", config.vocab_size),
        ("hidden_size", config.target_hidden_size),
    ):
        if mine != target_config[name]:
            findings.append(
                Finding(
                    "other-target",
                    "error",
                    f"the drafter was made for a target of {name} {mine}",
                    f"{name} {target_config[name]}",
                    "use a drafter of this very target",
                    _WHERE,
                )
            )
    if not 0 < config.draft_vocab_size <= config.vocab_size:
        findings.append(
            Finding(
                "draft-vocabulary",
                "error",
                f"draft_vocab_size is {config.draft_vocab_size}",
                f"1 to {config.vocab_size}, the target's vocabulary",
                "use config and weights of one export",
                _WHERE,
            )
        )
    return findings


def _check_rope(config: DrafterConfig, target_config: dict[str, Any]) -> list[Finding]:
    findings = []
    longest = target_config["max_position_embeddings"]
    if config.max_position_embeddings < longest:
        findings.append(
            Finding(
                "short-rotary-table",
                "warning",
                f"the drafter's rotary table ends at {config.max_position_embeddings} positions",
                f"the target's: {longest}",
                "keep max_model_len below it",
                _WHERE,
            )
        )
    rope = config.rope_parameters
    if config.mla and rope["rope_type"] not in ("default", "yarn"):
        findings.append(
            Finding(
                "mla-rope",
                "error",
                f"an MLA-type drafter with rotary type {rope['rope_type']!r}",
                "default or yarn: vLLM takes any other for DeepSeek's YaRN",
                "copy the rotary settings of the target",
                _WHERE,
            )
        )
    if config.mla and "attention_factor" in rope:
        findings.append(
            Finding(
                "mla-rope",
                "error",
                f"an MLA-type drafter with attention_factor {rope['attention_factor']}",
                "mscale and mscale_all_dim: vLLM does not read attention_factor for MLA, but for "
                "1.0, which turns the mscale factor off",
                "copy the rotary settings of the target",
                _WHERE,
            )
        )
    if rope["rope_type"] == "yarn" and ("mscale" in rope) != ("mscale_all_dim" in rope):
        findings.append(
            Finding(
                "lone-mscale",
                "error",
                "YaRN with one of mscale and mscale_all_dim",
                "both or none: transformers ignores a lone one, vLLM does not",
                "copy the rotary settings of the target",
                _WHERE,
            )
        )
    return findings


def check_servable(config: DrafterConfig) -> list[Finding]:
    """What each engine does with this drafter that the trainer did not: errors where none serves
    it as trained, warnings where one of them does not."""
    findings = []

    def found(code: str, severity: Any, title: str, evidence: str, remedy: str) -> None:
        findings.append(Finding(code, severity, title, evidence, remedy, _WHERE))

    if config.norm_before_residual:
        found(
            "sglang-norm-before-residual",
            "warning",
            "norm_before_residual is on: SGLang ignores it and adds to the un-normed state",
            "vLLM alone serves this drafter as trained",
            "serve it with vLLM, or train it without norm_before_residual",
        )
    if config.norm_before_fc and config.mla:
        found(
            "mla-norm-before-fc",
            "error",
            "norm_before_fc is on in an MLA-type drafter: no engine has that norm there",
            "fc_norm, which both engines apply",
            "train it with fc_norm instead",
        )
    if config.norm_before_fc and config.fc_norm:
        found(
            "two-input-norms",
            "warning",
            "norm_before_fc and fc_norm are both on",
            "one of them: together they are in no paper; vLLM applies both, one after the other",
            "train it with fc_norm alone",
        )
    if config.own_embeddings:
        found(
            "sglang-embeddings",
            "warning",
            "the drafter has embeddings of its own: SGLang replaces them by the target's",
            "vLLM alone serves this drafter as trained",
            "serve it with vLLM, or train it with the target's embeddings",
        )
    if len(config.slots) * config.target_hidden_size == config.hidden_size:
        found(
            "sglang-skips-fc",
            "warning",
            f"the slots together are as wide as the drafter ({config.hidden_size}): SGLang tells "
            "by the width whether fc was applied, and skips it",
            "slots whose widths sum to another width than hidden_size",
            "serve it with vLLM, or use more slots",
        )
    return findings
