"""From what was measured: does a drafter pay, from which acceptance length on, and with which K.

A drafter pays where its acceptance length exceeds the cost of a round in plain steps; that cost is
the break-even. Both change with K and with the load, so the best K is told for each concurrency.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3lib.engine import sglang, vllm
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.settings import ServeParams
from eagle3lib.lab.params import BenchmarkParams
from eagle3lib.measure.arms import OWN
from eagle3lib.measure.ask import engine_config

_PORT = 8000


def best_settings(lines: Sequence[dict[str, Any]], arm: str = OWN) -> list[dict[str, Any]]:
    """For each engine and concurrency: the K of the largest paired speed-up on the workload.

    ``lines`` as in metrics.json, "points". A speed-up whose interval does not lie above 1 is not
    taken for one: ``num_speculative_tokens`` is then 0, no drafter.
    """
    measured = [
        line
        for line in lines
        if line["arm"] == arm
        and line["set"] == "workload"
        and not line["context_tokens"]
        and line["speedup"]  # none without a baseline
    ]
    measured = [line for line in measured if line["temperature"] == measured[0]["temperature"]]
    out = []
    for engine, load in dict.fromkeys((m["engine"], m["concurrency"]) for m in measured):
        mine = [m for m in measured if (m["engine"], m["concurrency"]) == (engine, load)]
        best = max(mine, key=lambda m: m["speedup"]["value"])
        low = best["speedup"]["low"]
        out.append(
            {
                "engine": engine,
                "concurrency": load,
                "num_speculative_tokens": best["num_speculative_tokens"] if (low or 0) > 1 else 0,
                "speedup": best["speedup"]["value"],
                "sure": low is not None and (low > 1 or best["speedup"]["high"] < 1),
                "break_even": {str(m["num_speculative_tokens"]): m["round_cost"] for m in mine},
                "acceptance_length": {
                    str(m["num_speculative_tokens"]): m["acceptance"]["acceptance_length"]
                    for m in mine
                },
            }
        )
    return out


def with_commands(
    best: list[dict[str, Any]], cfg: BenchmarkParams, target: Path, drafter: Path
) -> list[dict[str, Any]]:
    """The same with the commands that start the best server, ready to paste: ours, which watches
    it and brings the environment that a CPU needs, and the engine's own."""
    out = []
    for line in best:
        steps = line["num_speculative_tokens"]
        config = engine_config(cfg, target, line["engine"], steps or 1, drafter if steps else None)
        config = replace(config, max_num_seqs=max(config.max_num_seqs, line["concurrency"]))
        served = replace(config, prefix_cache=True)  # only a benchmark must not have it
        commands = {"command": serve_command(served), "engine_command": launch_command(served)}
        out.append(line | commands)
    return out


def serve_command(config: EngineConfig) -> str:
    """``eagle3 serve`` with every setting that is not its default."""
    words = []
    for name, field in ServeParams.model_fields.items():
        if name == "num_speculative_tokens" and config.drafter is None:
            continue
        value = getattr(config, name, None)
        if value is not None and value != field.default:
            words.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
    flags = ["--", *config.extra_flags] if config.extra_flags else []
    return shlex.join(["eagle3", "serve", str(config.target), *words, f"port={_PORT}", *flags])


def launch_command(config: EngineConfig) -> str:
    """The engine's own command line."""
    if config.engine == "sglang":
        words = ["python", "-m", *sglang.MODULE, *sglang.flags(config)]
    else:
        words = ["vllm", "serve", *vllm.flags(config)]
    return shlex.join([*words, "--port", str(_PORT)])
