"""Plans that can't work, each with the largest setting that does; and what is worth knowing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle3lib.drafter.config import default_slots
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.params import PlanParams
from eagle3lib.plan.phases import (
    FORMATS,
    answer_share,
    benchmark_bytes,
    captured_tokens,
    phases_table,
    state_bytes,
    train_bytes,
    usable_bytes,
)
from eagle3lib.plan.shape import KNOWN_FAMILIES
from eagle3lib.plan.step import Setting

_WHERE = "00_plan"
_DISK_SHARE = 0.9  # of the free disk: the rest of the machine writes too


def check_plan(cfg: PlanParams, setting: Setting, disk_free_bytes: float) -> list[Finding]:
    """Errors for disk, memory, context and slots; a warning for a family counted by analogy."""
    return [
        *_check_disk(cfg, setting, disk_free_bytes),
        *_check_serving(cfg, setting),
        *_check_training(cfg, setting),
        *_check_shape(cfg, setting),
    ]


def storage_advice(cfg: PlanParams, setting: Setting, disk_free_bytes: float) -> str:
    """The richest format whose states fit the free disk, or ``stream``."""
    tokens, hidden = captured_tokens(cfg), setting.shape.hidden
    for name in FORMATS:
        if tokens * state_bytes(hidden, name, answer_share(cfg)) <= _DISK_SHARE * disk_free_bytes:
            return name
    return "stream"


def _check_disk(cfg: PlanParams, setting: Setting, free: float) -> list[Finding]:
    disk = sum(line["disk_bytes"] for line in phases_table(cfg, setting))
    if disk <= _DISK_SHARE * free:
        return []
    states = captured_tokens(cfg) * state_bytes(
        setting.shape.hidden, cfg.storage, answer_share(cfg)
    )
    most = int((_DISK_SHARE * free - (disk - states - 8 * captured_tokens(cfg)))
               / ((states + 8 * captured_tokens(cfg)) / cfg.answer_tokens))  # fmt: skip
    advice = storage_advice(cfg, setting, free)
    instead = f"; or storage={advice}" if advice != cfg.storage else ""
    fits = f"at most answer_tokens={most} fits" if most > 0 else "no number of tokens fits"
    return [
        Finding(
            "disk",
            "error",
            f"the plan needs {disk / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free",
            f"{states / 1e9:.1f} GB of them are hidden states in {cfg.storage}; "
            f"{1 - _DISK_SHARE:.0%} stays free",
            f"{fits}{instead}; or free some disk",
            _WHERE,
        )
    ]


def _check_serving(cfg: PlanParams, setting: Setting) -> list[Finding]:
    wanted, have = cfg.batches()[-1], usable_bytes(setting)
    need = benchmark_bytes(cfg, setting, wanted)
    if need <= have:
        return []
    where = "this machine" if setting.device.is_cpu else f"each {setting.device.name}"
    return [
        Finding(
            "memory",
            "error",
            f"serving needs {need / 1e9:.1f} GB of {where}, {have / 1e9:.1f} GB can be used",
            f"{wanted} conversations of {cfg.max_model_len} tokens beside weights and drafter",
            _serving_remedy(cfg, setting, have),
            _WHERE,
        )
    ]


def _serving_remedy(cfg: PlanParams, setting: Setting, have: float) -> str:
    """The largest batch at this length, else the greatest length of one, else more devices."""
    batch = next(
        (b for b in range(cfg.batches()[-1], 0, -1) if benchmark_bytes(cfg, setting, b) <= have),
        0,
    )
    if batch:
        return f"at most batch_sizes={batch} fits at this max_model_len"
    fixed = benchmark_bytes(cfg, setting, 0)
    one = (benchmark_bytes(cfg, setting, 1) - fixed) / cfg.max_model_len
    length = int((have - fixed) / one)
    if length >= 16:
        return f"at most max_model_len={length} with batch_sizes=1 fits"
    if setting.device.is_cpu:
        return "a larger machine, a smaller target, or one with fewer bytes a weight"
    return f"at least gpus={_fewest(cfg, setting)} with batch_sizes=1 fits"


def _fewest(cfg: PlanParams, setting: Setting) -> int:
    for devices in range(setting.devices + 1, 1025):
        wider = replace(setting, devices=devices)
        if benchmark_bytes(cfg, wider, 1) <= usable_bytes(wider):
            return devices
    raise UserError("no number of these GPUs holds the target", where=_WHERE)


def _check_training(cfg: PlanParams, setting: Setting) -> list[Finding]:
    need, have = train_bytes(cfg, setting), usable_bytes(setting)
    if need <= have:
        return []
    fixed = train_bytes(cfg.model_copy(update={"max_model_len": 0}), setting)
    length = int((have - fixed) / ((need - fixed) / cfg.max_model_len))
    fits = f"at most max_model_len={length} fits" if length >= 16 else "a GPU with more memory"
    return [
        Finding(
            "training-memory",
            "error",
            f"training needs {need / 1e9:.1f} GB of one device, {have / 1e9:.1f} GB can be used",
            f"one conversation of {cfg.max_model_len} tokens through {cfg.steps} steps",
            f"{fits}; or a smaller draft_vocab_size, fewer steps",
            _WHERE,
        )
    ]


def _check_shape(cfg: PlanParams, setting: Setting) -> list[Finding]:
    shape, findings = setting.shape, []
    if shape.context and cfg.max_model_len > shape.context:
        findings.append(
            Finding(
                "context",
                "error",
                f"max_model_len {cfg.max_model_len} is beyond the target's context",
                f"{shape.context} tokens",
                f"max_model_len={shape.context}",
                _WHERE,
            )
        )
    try:
        default_slots(shape.layers)
    except UserError as error:
        findings.append(
            Finding("slots", "error", error.found, "at least 7 layers", "a deeper target", _WHERE)
        )
    if shape.family not in KNOWN_FAMILIES:
        findings.append(
            Finding(
                "unknown-family",
                "warning",
                f"parameters of model type {shape.family!r} are counted like Llama's",
                f"counted exactly are: {', '.join(sorted(KNOWN_FAMILIES))}",
                "compare the total with the model card before you trust hours and memory",
                _WHERE,
            )
        )
    return findings


def check_speculation(costs: list[dict[str, Any]]) -> list[Finding]:
    """A note for every batch size at which no K pays at the acceptance that was hoped for."""
    findings = []
    for batch in sorted({line["batch"] for line in costs}):
        lines = [line for line in costs if line["batch"] == batch]
        best = max(lines, key=lambda line: line["speedup"])
        if not best["pays"]:
            findings.append(
                Finding(
                    "speculation-loses",
                    "warning",
                    f"at batch {batch} no K pays: the best, K={best['K']}, is "
                    f"{best['speedup']:.2f}x",
                    f"acceptance length {best['acceptance_length']:.2f}, a round costs "
                    f"{best['round_cost']:.2f} plain steps",
                    "fewer sequences at once, or turn speculation off above a smaller batch",
                    _WHERE,
                )
            )
    return findings
