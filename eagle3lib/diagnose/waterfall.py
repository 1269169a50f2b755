"""Where the tokens of a round are lost, from what is possible to what is served, and then to speed.

Every level is a simulated or measured acceptance length (tokens a round, the target's own counted):

    K + 1                      every draft is right
    vocabulary                 a drafter that is always right inside its draft vocabulary
    training                   this drafter on answers that it was trained on, no step worse than
                               the first
    kind of text               on the served answers instead, at positions in the nearer half
    context length             at all positions
    step decay                 with the later steps as they are: the simulator, in float32
    numeric drift              in the served dtype
    engine                     as served

"No step worse than the first" is 1 + sum of a^k, a the first step's acceptance. A level can lie
above the one before it: the loss is then negative, and is shown so.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.served import Answered, Setting, accepted_at, drafts_of, replays
from eagle3lib.diagnose.told import pooled_length
from eagle3lib.drafter.config import DrafterConfig

_TRAINED_ROWS = 24
Level = dict[str, Any]


def acceptance_waterfall(e: Evidence) -> list[Level]:
    """Levels from K + 1 to served: name, tokens a round, and what is lost to the level before.
    Empty where there is no drafter or no record."""
    m = e.material
    if m.drafter is None or not m.steps or not e.answered:
        return []
    base = Setting(m.drafter, m.drafter.config.slots, m.steps)
    near, everywhere = _first_steps(base, e.answered)
    trained = trained_sample(e)
    levels = [("every draft right", m.steps + 1.0), ("vocabulary", _oracle(base, e.answered))]
    if trained:
        levels.append(("training", _no_decay(_first_steps(base, trained)[1], m.steps)))
    levels += [
        ("kind of text", _no_decay(near, m.steps)),
        ("context length", _no_decay(everywhere, m.steps)),
        ("step decay", _simulated(_in_float32(base), e.answered)),
    ]
    if m.dtype != "float32":
        levels.append(("numeric drift", _simulated(base, e.answered)))
    if served := pooled_length(m.own_rows):
        levels.append(("engine", served))
    return _with_losses(levels)


def _with_losses(levels: list[tuple[str, float]]) -> list[Level]:
    out, before = [], levels[0][1]
    for name, value in levels:
        out.append({"level": name, "length": round(value, 4), "lost": round(before - value, 4)})
        before = value
    return out


def trained_sample(e: Evidence) -> list[Answered]:
    """Stored conversations that were trained on, spread over lengths."""
    store = e.material.store
    drafter = e.material.drafter
    if store is None or drafter is None or store.slots != drafter.config.slots:
        return []
    entries = [x for x in store.entries if x.split == "train" and x.tokens - x.prompt_tokens > 2]
    out = []
    for x in entries[:: max(1, len(entries) // _TRAINED_ROWS)][:_TRAINED_ROWS]:
        row = e.material.attempt(4, lambda x=x: store.row(x), None)  # type: ignore[misc]
        if row is not None and x.prompt_tokens > 0:
            states = row.slots.unflatten(-1, (len(store.slots), -1))
            out.append(
                Answered(x.id, x.set, row.token_ids, x.prompt_tokens, states, store.slots, None,
                         None)
            )  # fmt: skip
    return out


def _first_steps(setting: Setting, answers: list[Answered]) -> tuple[float, float]:
    """First step's acceptance at base positions of the nearer half, and at all."""
    first = replace(setting, steps=1)
    drafts = drafts_of(first, answers)
    pairs = [
        (a.prompt_tokens + i, n)
        for d, a in zip(drafts, answers, strict=True)
        for i, n in enumerate(accepted_at(d, a.answer))
    ]
    if not pairs:
        return 0.0, 0.0
    middle = sorted(p for p, _ in pairs)[len(pairs) // 2]
    near = [n for p, n in pairs if p <= middle]
    return sum(near) / len(near), sum(n for _, n in pairs) / len(pairs)


def _no_decay(first: float, steps: int) -> float:
    return 1 + sum(first**k for k in range(1, steps + 1))


def _oracle(setting: Setting, answers: list[Answered]) -> float:
    """Rounds of a drafter that is right wherever its vocabulary lets it be."""
    known = set(setting.drafter.t2d.nonzero().flatten().tolist())
    accepted = []
    for a in answers:
        said = [t if t in known else -1 for t in a.answer]
        width = setting.steps
        rows = [(said[i + 1 : i + 1 + width] + [-1] * width)[:width] for i in range(len(said) - 1)]
        drafts = torch.tensor(rows).view(-1, width)
        accepted += replays([drafts], [a], width)[0].accepted
    return 1 + sum(accepted) / max(len(accepted), 1)


def _in_float32(setting: Setting) -> Setting:
    if setting.drafter.fc.weight.dtype == torch.float32:
        return setting
    return replace(setting, drafter=copy.deepcopy(setting.drafter).float())


def _simulated(setting: Setting, answers: list[Answered]) -> float:
    walked = replays(drafts_of(setting, answers), answers, setting.steps)
    accepted = [n for r in walked for n in r.accepted]
    return 1 + sum(accepted) / max(len(accepted), 1)


def speed_facts(e: Evidence, line: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The waterfall of speed and the K that pay, empty without a drafter or a measured arm."""
    drafter, counts = e.material.drafter, line.get("acceptance")
    if drafter is None or not counts or not steps:
        return {"speed_waterfall": [], "paying_steps": []}
    size = sum(f.stat().st_size for f in e.material.target.folder.glob("*.safetensors"))
    return {
        "speed_waterfall": speed_waterfall(line, drafter.config, steps, size),
        "paying_steps": paying_steps(line, drafter.config, steps, size),
    }


def speed_waterfall(
    line: dict[str, Any], config: DrafterConfig, steps: int, target_bytes: int
) -> list[Level]:
    """From tokens a round to speed-up: what the drafter's weights cost to read, and the rest
    (verification of K + 1 tokens, sampling, host), in speed. ``line`` is the arm's in the
    benchmark's metrics; empty where it measured no speed-up."""
    speedup, length = (
        (line.get("speedup") or {}).get("value"),
        line["acceptance"]["acceptance_length"],
    )
    if not speedup or not length:
        return []
    drafted = drafter_cost(config, steps, target_bytes)
    return _with_losses(
        [
            ("tokens a round", length),
            ("the drafter's reads", length / (1 + drafted)),
            ("verification, sampling, host", speedup),
        ]
    )


def drafter_cost(config: DrafterConfig, steps: int, target_bytes: int) -> float:
    """Weights that K drafted tokens read, in plain steps of a target that reads all of its own."""
    head = config.draft_vocab_size * config.hidden_size
    return steps * 2 * (config.layer_parameters + head) / target_bytes


def paying_steps(
    line: dict[str, Any], config: DrafterConfig, steps: int, target_bytes: int
) -> list[dict[str, Any]]:
    """Estimated speed-up at every K up to the served one: accepted as recorded, a round cheaper by
    the reads of each step left out. Verification is taken to cost the same: an estimate that ranks
    settings, no promise."""
    counts, cost = line["acceptance"], line.get("round_cost")
    if not cost or not counts["rounds"]:
        return []
    one = drafter_cost(config, 1, target_bytes)
    out = []
    for k in range(1, steps + 1):
        length = 1 + sum(counts["per_step"][:k])
        cheaper = cost - (steps - k) * one
        out.append({"num_speculative_tokens": k, "acceptance_length": round(length, 3),
                    "estimated_speedup": round(length / max(cheaper, 1e-9), 3)})  # fmt: skip
    return out
