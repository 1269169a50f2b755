"""A benchmark's sweep over load beside what the machine allows and what the plan's model says.

::

    limits      b * tau / (bytes of a round / bandwidth), and the same of FLOPs, at the data sheet's
                full figures (roofline model, Williams et al. 2009); a plain step has tau = 1
    modelled    ``plan/step.py`` at the measured in-flight and context (``measure/loads.py``): as
                the plan has it, and with its layer and host times solved at the lowest load
    terms       what a round costs beyond a plain step, and what is lost outside the rounds:
                speed-up = tau / (1 + their sum), so they say where it is lost
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.machine import cores, describe_machine
from eagle3lib.lab.params import PlanParams
from eagle3lib.measure.loads import Load, Pace
from eagle3lib.plan.gpus import Device, choose_device
from eagle3lib.plan.shape import Shape
from eagle3lib.plan.step import DrafterShape, Setting
from eagle3lib.training.arithmetic import gemm_peak

Line = dict[str, Any]
OUTSIDE, UNKNOWN = "outside the rounds", "not modelled"
# What a term of the speed-up is, in words.
TERMS = {
    "compute": "the arithmetic of verifying K + 1 tokens a request",
    "experts": "the further experts that the verified tokens read",
    "collectives": "devices that wait for each other",
    "drafter": "the drafter's own forwards",
    UNKNOWN: "what the model of a round does not hold (sampling, scheduling, host)",
    OUTSIDE: "prefill, and the ends of blocks",
}


def benchmarked_device(cfg: PlanParams, folder: Path, dtype: str) -> Device:
    """The device that the benchmark ran on: ``cfg.gpu``, or with ``auto`` what its run's manifest
    names. A CPU's bandwidth and matrix peak in ``dtype`` are measured now (2 s) unless they are
    given.

    Raises ``UserError`` where they would be measured on another CPU than the benchmark's, and for a
    GPU that served float32, of which the table has no figure.
    """
    manifest, here = folder.parent / "manifest.json", describe_machine()
    machine = read_json(manifest)["machine"] if manifest.exists() else here
    device = choose_device(cfg, machine)
    if not device.is_cpu:
        if dtype != "bfloat16" and not cfg.tflops:
            raise UserError(
                f"the benchmark served {dtype}", where=folder, next="set parameter tflops",
                expected=f"bfloat16, of which a {device.name}'s FLOP/s are known",
            )  # fmt: skip
        return device
    if machine["cpu"] != here["cpu"] and not (cfg.bandwidth_gb_per_s and cfg.tflops):
        raise UserError(
            f"the benchmark ran on {machine['cpu']!r}, this machine is {here['cpu']!r}",
            expected="bandwidth_gb_per_s and tflops of that machine, or the same machine",
            where=manifest, next="set both parameters",
        )  # fmt: skip
    if cfg.tflops:
        return device
    return replace(device, flops_per_s=gemm_peak(cores(), dtype))


def benchmarked_setting(
    shape: Shape, device: Device, devices: int, drafter: Path, dtype: str
) -> Setting:
    """The plan's cost model of this target as served, the machine and the drafter; its context is
    set per load."""
    config = read_drafter_config(drafter, shape.layers)
    text = {key: value for key, value in shape.config.items() if key != "text_config"}
    served = Shape(text | {"dtype": dtype})
    setting = Setting.of(
        served, device, devices=devices, draft_vocab_size=config.draft_vocab_size, context_tokens=0
    )
    drafter_shape = DrafterShape(served, config.draft_vocab_size, config.intermediate_size)
    element_bytes = 4 if dtype == "float32" else 2
    return replace(setting, drafter=drafter_shape, element_bytes=element_bytes)


def calibrated_at(setting: Setting, load: Load, steps: int) -> Setting:
    """Layer and host times of the model from the plain step and the round at one load: a plain step
    has ``layers`` layers and the host once, each of a round's ``steps`` drafts one of either.
    Never negative: a model that is too slow without them stays so."""
    device, layers = replace(setting.device, layer_s=0.0), setting.shape.layers
    bare = replace(setting, device=device, host_s=0.0, context_tokens=load.context_tokens)
    missing = load.plain.step_s - bare.step_s(load.plain.in_flight)
    round_s = sum(bare.round_parts(load.drafted.in_flight, steps).values())
    of_a_draft = (load.drafted.step_s - round_s - missing) / steps
    layer_s = max(0.0, (missing - of_a_draft) / max(layers - 1, 1))
    host_s = max(0.0, of_a_draft - layer_s)
    return replace(bare, device=replace(device, layer_s=layer_s), host_s=host_s)


def roofline_lines(loads: Sequence[Load], planned: Setting, steps: int) -> list[Line]:
    """One line an engine and load: measured, limits and shares of them, bytes and FLOPs a token,
    the model beside it (``planned`` as it is, and calibrated at the engine's lowest load)."""
    out = []
    for load in loads:
        setting = replace(planned, context_tokens=load.context_tokens)
        first = next(x for x in loads if x.engine == load.engine)
        fitted = calibrated_at(planned, first, steps)
        fitted = replace(fitted, context_tokens=load.context_tokens)
        models = {"planned": _modelled(setting, load, steps),
                  "calibrated": _modelled(fitted, load, steps)}  # fmt: skip
        arms = {
            name: _arm_line(setting, pace, tau, k)
            for name, pace, tau, k in (
                ("plain", load.plain, 1.0, 0),
                ("drafted", load.drafted, load.acceptance_length, steps),
            )
        }
        out.append(
            {
                "engine": load.engine,
                "concurrency": load.concurrency,
                "in_flight": round(load.plain.in_flight, 2),
                "context_tokens": load.context_tokens,
                "acceptance_length": round(load.acceptance_length, 4),
                "rounds_from": load.rounds_from,
                "speedup": round(load.speedup, 4),
                "cost": round(load.cost, 4),
                **arms,
                **models,
                "terms": _terms(fitted, load, steps),
                "layer_us": round(1e6 * fitted.device.layer_s, 2),
                "host_us": round(1e6 * fitted.host_s, 1),
            }
        )
    return out


def _arm_line(setting: Setting, pace: Pace, tau: float, steps: int) -> Line:
    """``steps`` 0: the engine alone."""
    read, flops = moved(setting, pace.in_flight, steps)
    tokens = pace.in_flight * tau
    limits = limits_at(setting, pace.in_flight, tau, steps)
    return {
        "tokens_per_s": round(pace.tokens_per_s, 1),
        "in_flight": round(pace.in_flight, 2),
        "step_ms": round(1e3 * pace.step_s, 4),
        "bytes_per_token": {name: round(size / tokens) for name, size in read.items()},
        "flops_per_token": round(flops / tokens),
        "read_gb_per_s": round(sum(read.values()) / tokens * pace.tokens_per_s / 1e9, 2),
        "tflops": round(flops / tokens * pace.tokens_per_s / 1e12, 4),
        "bandwidth_limit": round(limits["bandwidth"], 1),
        "compute_limit": round(limits["compute"], 1),
        "share_of_limit": round(pace.tokens_per_s / min(limits.values()), 4),
    }


def moved(setting: Setting, batch: float, steps: int) -> tuple[dict[str, float], float]:
    """(bytes by part, FLOPs) of each device in a round of ``steps`` drafts, 0 for a plain step."""
    if not steps:
        return setting.step_bytes(batch), setting.step_flops(batch)
    return setting.round_bytes(batch, steps), setting.round_flops(batch, steps)


def limits_at(setting: Setting, batch: float, tau: float, steps: int) -> dict[str, float]:
    """Tokens per second if nothing but reading, or nothing but computing, took time."""
    read, flops = moved(setting, batch, steps)
    device = setting.device
    return {
        "bandwidth": batch * tau / (sum(read.values()) / device.bandwidth_bytes_per_s),
        "compute": batch * tau / (flops / device.flops_per_s),
    }


def all_limits(
    planned: Setting, loads: Sequence[Load], steps: int
) -> dict[str, dict[str, list[Line]]]:
    """Both limits by engine and arm, over loads up to twice the largest measured one, at
    the context and acceptance of the engine's last load."""
    out = {}
    for load in {load.engine: load for load in loads}.values():
        setting = replace(planned, context_tokens=load.context_tokens)
        grid = [float(b) for b in np.geomspace(1.0, 2.0 * load.concurrency, 40)]
        arms = (("plain", 1.0, 0), ("drafted", load.acceptance_length, steps))
        out[load.engine] = {
            name: [{"batch": b} | limits_at(setting, b, tau, k) for b in grid]
            for name, tau, k in arms
        }
    return out


def _modelled(setting: Setting, load: Load, steps: int) -> Line:
    step_s = setting.step_s(load.plain.in_flight)
    round_s = sum(setting.round_parts(load.drafted.in_flight, steps).values())
    cost = round_s / step_s
    return {
        "step_ms": round(1e3 * step_s, 4),
        "round_ms": round(1e3 * round_s, 4),
        "cost": round(cost, 4),
        "speedup": round(load.acceptance_length / cost, 4),
        "cost_error": round(cost / load.cost - 1, 4),
    }


def _terms(fitted: Setting, load: Load, steps: int) -> dict[str, float]:
    """What a round costs beyond a plain step, in plain steps: the model's parts, what was measured
    beyond them, and what the speed-up loses outside the rounds. They sum to tau / speed-up - 1."""
    plain = fitted.step_parts(load.plain.in_flight)
    made = fitted.round_parts(load.drafted.in_flight, steps)
    step_s = sum(plain.values())
    terms = {name: (s - plain.get(name, 0.0)) / step_s for name, s in made.items()}
    terms[UNKNOWN] = load.cost - sum(made.values()) / step_s
    terms[OUTSIDE] = load.acceptance_length / load.speedup - load.cost
    return {name: round(value, 4) for name, value in terms.items()}


def lines_table(lines: Sequence[Line]) -> list[Line]:
    """The lines as people read them: measured, then the model."""
    return [
        {
            "engine": line["engine"],
            "requests": line["concurrency"],
            "in flight": line["in_flight"],
            "tok/s alone": line["plain"]["tokens_per_s"],
            "with drafter": line["drafted"]["tokens_per_s"],
            "speed-up": line["speedup"],
            "acceptance length": line["acceptance_length"],
            "cost": line["cost"],
            "cost, plan": line["planned"]["cost"],
            "cost, calibrated": line["calibrated"]["cost"],
            "step, ms": line["plain"]["step_ms"],
            "step, plan": line["planned"]["step_ms"],
            "round, ms": line["drafted"]["step_ms"],
            "round, plan": line["planned"]["round_ms"],
            **{
                f"{what}, {name}": line[arm][key]
                for arm, name in (("plain", "alone"), ("drafted", "drafter"))
                for what, key in (("GB/s", "read_gb_per_s"), ("TFLOP/s", "tflops"))
            },
            "of the limit, alone": f"{line['plain']['share_of_limit']:.1%}",
            "of the limit, drafter": f"{line['drafted']['share_of_limit']:.1%}",
            "layer_us": line["layer_us"],
            "host_us": line["host_us"],
            "rounds from": line["rounds_from"],
        }
        for line in lines
    ]


def end_of_gain(lines: Sequence[Line]) -> list[Line]:
    """For each engine: the load from which the drafter pays no more (interpolated; None where it
    pays at all measured ones, 0 where at none), and the term that took most of the gain: the one
    that grew most since the lowest load; where the drafter never paid, the largest."""
    out = []
    for engine in dict.fromkeys(line["engine"] for line in lines):
        mine = [line for line in lines if line["engine"] == engine]
        at = next((i for i, line in enumerate(mine) if line["speedup"] <= 1), None)
        decisive = mine[-1 if at is None else at]
        start = mine[0]["terms"] if decisive is not mine[0] else {}
        growth = {name: v - start.get(name, 0.0) for name, v in decisive["terms"].items()}
        cause = max(growth, key=lambda name: growth[name])
        ends = None if at is None else _crossing(mine[at - 1], mine[at]) if at else 0.0
        told = _told(mine, decisive, ends, cause, growth[cause])
        out.append({"engine": engine, "ends_at": ends, "cause": cause,
                    "growth": round(growth[cause], 4), "told": told})  # fmt: skip
    return out


def _crossing(before: Line, after: Line) -> float:
    """The load where the speed-up is 1, on a straight line over the load's logarithm."""
    x = np.log([before["concurrency"], after["concurrency"]])
    share = (before["speedup"] - 1) / (before["speedup"] - after["speedup"])
    return round(float(np.exp(x[0] + share * (x[1] - x[0]))), 1)


def _told(mine: list[Line], decisive: Line, ends: float | None, cause: str, grown: float) -> str:
    first, last = mine[0], mine[-1]
    if ends is None:
        verdict = f"pays at all loads measured, up to {last['concurrency']} in flight"
    else:
        verdict = f"pays up to about {ends:.0f} in flight" if ends else "never pays"
    swept = ", ".join(f"{line['speedup']:.2f} at {line['concurrency']}" for line in mine)
    if decisive is first:
        why = "the largest part of a round beyond a plain step is"
    else:
        span = f"{first['concurrency']} to {decisive['concurrency']}"
        why = f"what a round loses most to from {span} is"
    words = TERMS.get(cause, cause)
    return f"{verdict} (speed-up {swept}); {why} {words}: {grown:+.2f} plain steps"
