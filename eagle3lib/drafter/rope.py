"""Rotary settings of a config, in any of the spellings in use, as one dict; nothing is guessed.

    rope_theta + rope_scaling {type or rope_type, ...}     transformers 4, SpecForge, DeepSeek, Kimi
    rope_parameters {rope_theta, rope_type, ...}           transformers 5

A file may hold both (SpecForge 0.2.0 and this lab write both, for engines of either age): they must
then say the same. A missing theta is an error: the classes' default of 10,000 fits hardly any
target of today, and a drafter that turns at another speed loads, runs and is never accepted.
"""

from __future__ import annotations

from typing import Any

from eagle3lib.lab.errors import UserError

_NEXT = "take the rotary settings of the target that the drafter was trained for"


def rope_parameters(config: dict[str, Any], where: object = "config.json") -> dict[str, Any]:
    """``{"rope_type", "rope_theta", ...}``. Raises ``UserError`` for a missing theta, for keys that
    contradict each other, and for settings by layer type."""
    given = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key):
            given[key] = _one_spelling(config[key], key, where)
    merged: dict[str, Any] = {}
    named_by: dict[str, str] = {}
    sources = [*given.items()]
    if config.get("rope_theta") is not None:
        sources.append(("", {"rope_theta": float(config["rope_theta"])}))
    for source, settings in sources:
        for key, value in settings.items():
            place = f"{source}.{key}" if source else key
            if key in merged and merged[key] != value:
                raise UserError(
                    f"the rotary settings contradict each other: {named_by[key]} is {merged[key]}, "
                    f"{place} is {value}",
                    where=where,
                    next=_NEXT,
                )
            merged.setdefault(key, value)
            named_by.setdefault(key, place)
    if "rope_theta" not in merged:
        raise UserError(
            "the config has no rope_theta",
            expected="rope_theta, or rope_parameters with one",
            where=where,
            next=_NEXT,
        )
    if merged.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"the config turns {merged['partial_rotary_factor']:.0%} of each head alone",
            expected="partial_rotary_factor 1.0, all of it",
            where=where,
            next="a drafter with its own, whole rotary embedding is not served by any engine yet",
        )
    return {"rope_type": "default"} | merged


def _one_spelling(settings: Any, key: str, where: object) -> dict[str, Any]:
    """``type`` becomes ``rope_type``; numbers of theta become floats; None means absent."""
    if not isinstance(settings, dict) or any(isinstance(v, dict) for v in settings.values()):
        raise UserError(
            f"{key} is not one set of rotary settings",
            expected="one dict for all layers, not one by layer type",
            where=where,
            next="a drafter has one layer: write the settings of the kind of layer it is",
        )
    out = {k: v for k, v in settings.items() if v is not None}
    old = out.pop("type", None)
    if old is not None and out.setdefault("rope_type", old) != old:
        raise UserError(
            f"{key} names two types: rope_type {out['rope_type']!r} and type {old!r}",
            where=where,
            next=_NEXT,
        )
    if "rope_theta" in out:
        out["rope_theta"] = float(out["rope_theta"])
    return out
