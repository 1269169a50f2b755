"""The plan of a target: one dict of plain values that notebook, command line and metrics share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from eagle3lib.drafter.config import (
    before_layer_ids,
    default_slots,
    output_layer_ids,
    rope_parameters,
)
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding
from eagle3lib.lab.params import PlanParams
from eagle3lib.plan.checks import check_plan, check_speculation, storage_advice
from eagle3lib.plan.engines import check_engines
from eagle3lib.plan.gpus import choose_device
from eagle3lib.plan.phases import (
    captured_tokens,
    most_sequences,
    phases_table,
    state_bytes,
    storage_table,
)
from eagle3lib.plan.quantisation import quantisation_of
from eagle3lib.plan.source import Source
from eagle3lib.plan.step import Setting, calibrated, round_costs

_TABLE_STEPS = (1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Plan:
    """Facts, tables and findings of one plan; everything in ``numbers`` is plain JSON."""

    cfg: PlanParams
    setting: Setting
    numbers: dict[str, Any]
    findings: list[Finding]


def make_plan(cfg: PlanParams, source: Source, machine: dict[str, Any]) -> Plan:
    """Everything that follows from the config, the parameters and the device.

    Raises ``UserError`` for a config that lacks a size, an unknown quantisation or GPU; what does
    not fit is a finding.
    """
    device = choose_device(cfg, machine)
    setting = Setting.of(
        source.shape,
        device,
        devices=1 if device.is_cpu else cfg.gpus,
        draft_vocab_size=cfg.draft_vocab_size,
        context_tokens=cfg.context_tokens,
        host_s=cfg.host_ms / 1e3,
    )
    if cfg.measured_round_cost:
        setting = calibrated(setting, cfg.num_speculative_tokens, cfg.measured_round_cost)
    free = cfg.disk_free_gb * 1e9 or float(machine["disk_free_bytes"])
    steps = sorted({*_TABLE_STEPS, cfg.num_speculative_tokens})
    costs = round_costs(setting, cfg.batches(), steps, cfg.acceptance_per_step)
    findings = [*check_plan(cfg, setting, free), *check_speculation(costs)]
    numbers = {
        "target": target_facts(source, setting),
        "device": device_facts(setting),
        "storage": storage_table(cfg, source.shape),
        "phases": phases_table(cfg, setting),
        "round_costs": costs,
        "step_parts": step_table(setting, cfg.batches(), cfg.num_speculative_tokens),
    }
    numbers["answer"] = _answer(cfg, setting, numbers, findings, free)
    return Plan(cfg, setting, numbers, findings)


def target_facts(source: Source, setting: Setting) -> dict[str, Any]:
    """What the config says, and what follows from it; sizes in bytes."""
    shape, weights = source.shape, setting.weights
    experts = "none"
    if shape.experts:
        dense = shape.layers - len(shape.expert_layers)
        experts = (
            f"{shape.experts} routed, {shape.experts_per_token} a token, {shape.shared_experts} "
            f"shared, {dense} dense layers"
        )
    try:
        slots = default_slots(shape.layers)
    except UserError:
        slots = ()
    slid, window = shape.sliding
    return {
        "target": source.name,
        "config from": source.origin,
        "architecture": shape.architecture,
        "text model": f"{shape.family}, inside {shape.wrapper}" if shape.wrapper else shape.family,
        "layers": shape.layers,
        "hidden_size": shape.hidden,
        "attention": shape.attention + (f"; {slid} layers see {window} tokens" if slid else ""),
        "experts": experts,
        "vocab_size": shape.vocab,
        "tied_embeddings": shape.tied,
        "context": shape.context or None,
        "rope": _rope_text(shape.config),
        "quantisation": quantisation_of(shape).name,
        "parameters": shape.total_parameters,
        "active_parameters": shape.active_parameters,
        "weight_bytes": weights.total,
        "bytes_per_weight": round(weights.total / shape.total_parameters, 3),
        "kv_bytes_per_token": shape.kv_bytes_per_token(),
        "state_bytes_per_token": round(state_bytes(shape.hidden, "bf16")),
        "slots as before-layer ids (vLLM)": before_layer_ids(slots),
        "slots as output ids (SGLang)": output_layer_ids(slots),
        "chat template": "yes" if source.chat_template() else "none found",
        "reasoning markers": ", ".join(source.reasoning_markers()) or "none found",
    }


def _rope_text(config: dict[str, Any]) -> str:
    """Type, base and factor; of each layer type where they differ. A base that the config does not
    name is said to be missing, not taken for 10,000."""
    given = config.get("rope_parameters") or {}
    kinds = {name: part for name, part in given.items() if isinstance(part, dict)}
    if kinds:
        return "; ".join(f"{k}: {_rope_text({'rope_parameters': v})}" for k, v in kinds.items())
    named = "rope_theta" in config or "rope_theta" in given
    rope = rope_parameters(config if named else config | {"rope_theta": 0.0})  # 0 is not shown
    base = f"base {rope['rope_theta']:g}" if named else "no base named"
    return f"{rope['rope_type']}, {base}" + (f", factor {rope['factor']:g}" if rope.get("factor")
                                             else "")  # fmt: skip


def device_facts(setting: Setting) -> dict[str, Any]:
    """The figures that a plan stands on; each can be given by a parameter."""
    d = setting.device
    roof = setting.at_the_limit()
    return {
        "device": f"{setting.devices} x {d.name}",
        "source": d.source,
        "memory_gb": round(d.memory_bytes / 1e9, 1),
        "bandwidth_gb_per_s": round(d.bandwidth_bytes_per_s / 1e9, 1),
        "bandwidth_share": d.bandwidth_share,
        "tflops": round(d.flops_per_s / 1e12, 2),
        "compute_share": d.compute_share,
        "link_gb_per_s": round(d.link_bytes_per_s / 1e9, 1) if setting.devices > 1 else None,
        "collective_us": round(d.collective_s * 1e6, 1) if setting.devices > 1 else None,
        "layer_us": round(d.layer_s * 1e6, 1),
        "decode_roofline_tokens_per_s": round(1 / roof.step_s(1), 1),
        "decode_expected_tokens_per_s": round(1 / setting.step_s(1), 1),
    }


def step_table(setting: Setting, batches: list[int], steps: int) -> list[dict[str, Any]]:
    """Milliseconds of each part of a plain step and of a round, by batch size."""
    lines = []
    for batch in batches:
        for what, parts in (
            ("plain step", setting.step_parts(batch)),
            (f"round, K={steps}", setting.round_parts(batch, steps)),
        ):
            total = sum(parts.values())
            lines.append(
                {
                    "batch": batch,
                    "what": what,
                    **{name: round(1e3 * s, 4) for name, s in parts.items()},
                    "total": round(1e3 * total, 4),
                    "collectives_share": round(parts["collectives"] / total, 3),
                }
            )
    return lines


def _answer(cfg: PlanParams, setting: Setting, numbers: dict[str, Any],
            findings: list[Finding], free: float) -> dict[str, Any]:  # fmt: skip
    """The first screen: does it fit, what does it cost, does speculation pay."""
    errors = [f for f in findings if f.severity == "error"]
    costs, phases = numbers["round_costs"], numbers["phases"]
    spent = [f"{p['phase']} {_duration(p['hours'])}" for p in phases if p["hours"]]
    answer: dict[str, Any] = {
        "does it fit": "yes" if not errors else "no: " + "; ".join(f.title for f in errors),
        "what it costs": f"{_duration(sum(p['hours'] for p in phases))}: {', '.join(spent)}",
        "hidden states": _stored(cfg, setting, free),
        f"conversations of {cfg.max_model_len} at once": max(0, most_sequences(cfg, setting)),
    }
    for batch in cfg.batches():
        answer[f"speculation at batch {batch}"] = _verdict(cfg, costs, batch)
    return answer


def _verdict(cfg: PlanParams, costs: list[dict[str, Any]], batch: int) -> str:
    """Whether the plan's K pays, and which K would be best at the hoped-for acceptance."""
    mine = [line for line in costs if line["batch"] == batch]
    at_k = next(line for line in mine if line["K"] == cfg.num_speculative_tokens)
    best = max(mine, key=lambda line: line["speedup"])
    word = "pays" if at_k["pays"] else "loses"
    return (
        f"{word}: K={at_k['K']} needs an acceptance length above {at_k['round_cost']:.2f}; "
        f"{at_k['acceptance_length']:.2f} gives {at_k['speedup']:.2f}x "
        f"(best K={best['K']}, {best['speedup']:.2f}x)"
    )


def _duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _stored(cfg: PlanParams, setting: Setting, free: float) -> str:
    advice = storage_advice(cfg, setting, free)
    tokens = captured_tokens(cfg)
    size = state_bytes(setting.shape.hidden, "bf16") * tokens
    fits = "stream them, no format fits" if advice == "stream" else f"store them in {advice}"
    return f"{size / 1e9:.2f} GB in bf16 for {tokens:,} tokens; {free / 1e9:.0f} GB free: {fits}"


def plan_text(plan: Plan) -> str:
    """The plan for a terminal: the answer first, then the facts and the tables."""
    parts = [_lines("answer", plan.numbers["answer"])]
    for finding in plan.findings:
        parts.append(
            f"{finding.severity}: {finding.title}\n  {finding.evidence}\n  next: {finding.remedy}"
        )
    parts += [_lines(name, plan.numbers[name]) for name in ("target", "device")]
    for name in ("phases", "storage", "step_parts", "round_costs"):
        table = pd.DataFrame(plan.numbers[name]).fillna(0.0)
        parts.append(f"{name.replace('_', ' ')}\n{table.to_string(index=False)}")
    if "engines" in plan.numbers:
        told = {line["engine"]: _engine_text(line) for line in plan.numbers["engines"]}
        parts.append(_lines("engines", told))
    return "\n\n".join(parts)


def _engine_text(line: dict[str, Any]) -> str:
    return f"{line['version']}: {line['verdict']}" if line["version"] else line["verdict"]


def _lines(title: str, facts: dict[str, Any]) -> str:
    width = max(map(len, facts))
    return "\n".join([title, *(f"  {k:{width}}  {_shown(v)}" for k, v in facts.items())])


def _shown(value: Any) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return f"{value:,}" if whole else str(value)


def with_engines(plan: Plan, engines: list[dict[str, Any]]) -> Plan:
    """The plan with what the engines said of the target, and what follows from it."""
    architecture = plan.numbers["target"]["architecture"]
    here = plan.cfg.gpu.lower() in ("auto", "cpu")
    findings = [*plan.findings, *check_engines(engines, architecture, here=here)]
    return replace(plan, numbers=plan.numbers | {"engines": engines}, findings=findings)
