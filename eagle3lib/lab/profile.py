"""Profiles: one YAML file names every value of a run that differs from the defaults.

    common: {run: mine, target: /models/qwen3-8b}   # for every phase that has the parameter
    04_train_drafter: {epochs: 3}

Everything is checked before anything starts (papermill alone only warns of an unknown name).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import ROOT
from eagle3lib.lab.params import PHASES, PlanParams
from eagle3lib.lab.phase_params import FOLLOWING, PhaseParams

PROFILES = ROOT / "params"


def find_profile(name: str) -> Path:
    """``demo`` -> params/demo.yaml; a path to a .yaml file is taken as it is."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise UserError(
            f"no profile {name!r}",
            expected=f"one of: {known}; or a path to a .yaml file",
            where=path,
        )
    return path


def parse_arguments(arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Split ``eagle3 run PROFILE ...`` words into phases and ``[PHASE.]name=value`` overrides.

    A phase may be given by its number: ``04`` is ``04_train_drafter``. Values are YAML scalars.
    """
    phases = {phase_name(word) for word in arguments if "=" not in word}
    overrides = read_values([word for word in arguments if "=" in word])
    return sorted(phases, key=list(PHASES).index), overrides


def read_values(words: list[str]) -> dict[str, Any]:
    """``name=value`` words by name; values are YAML scalars. Raises ``UserError`` for others."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"{word!r} is not name=value", where="the command line")
        try:
            values[name] = yaml.safe_load(text) if text else ""
        except yaml.YAMLError as error:
            raise UserError(
                f"{word!r} is not name=value: {error}", where="the command line"
            ) from None
    return values


def phase_name(word: str) -> str:
    matches = [name for name in PHASES if word == name or (word and name.split("_")[0] == word)]
    if len(matches) != 1:
        raise UserError(f"unknown phase {word!r}", expected=f"one of: {', '.join(PHASES)}")
    return matches[0]


def load_profile(
    name: str, phases: list[str] | None = None, overrides: dict[str, Any] | None = None
) -> dict[str, PhaseParams]:
    """Parameters of every phase, by phase name.

    ``overrides`` without a phase apply to the phases named (all, if none is named) that have the
    parameter. Raises ``UserError`` for unknown sections, phases, parameters and wrong types.
    """
    path = find_profile(name)
    sections = _read_sections(path)
    common = sections.pop("common", {})
    _refuse_unknown(common, list(PHASES), f"{path}, section common")
    result = {}
    for phase, model in PHASES.items():
        layers = {
            f"{path.name}, common": {k: v for k, v in common.items() if k in model.model_fields},
            f"{path.name}, {phase}": sections.get(phase, {}),
            "command line": _overrides_for(phase, phases or list(PHASES), overrides or {}),
        }
        values = {name: value for layer in layers.values() for name, value in layer.items()}
        sources = {name: source for source, layer in layers.items() for name in layer}
        result[phase] = model.checked(values, str(path)).told(sources)
    _let_the_plan_follow(result, str(path))
    if len({(p.run, p.target) for p in result.values()}) > 1:
        raise UserError(
            "phases name different runs or targets", where=path, next="set them in common"
        )
    return result


def _let_the_plan_follow(phases: dict[str, PhaseParams], source: str) -> None:
    plan = phases[PlanParams.PHASE]
    values = {name: plan.as_given(name) for name in plan.sources}
    taken = PlanParams.followed(phases).items()
    follows = {name: found for name, found in taken if name not in plan.sources}
    values |= {name: value for name, (value, _) in follows.items()}
    sources = {name: f"{FOLLOWING}{phase}" for name, (_, phase) in follows.items()}
    phases[plan.PHASE] = PlanParams.checked(values, source).told(plan.sources | sources)


def _read_sections(path: Path) -> dict[str, dict[str, Any]]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"not readable as YAML: {error}", where=path) from None
    if not isinstance(raw, dict):
        raise UserError("a profile is a mapping", expected="common: and sections", where=path)
    for section, values in raw.items():
        if section != "common" and section not in PHASES:
            raise UserError(
                f"unknown section {section!r}", expected=f"common, {', '.join(PHASES)}", where=path
            )
        if values is not None and not isinstance(values, dict):
            raise UserError(
                f"section {section!r} is no mapping", expected="name: value", where=path
            )
    return {section: dict(values or {}) for section, values in raw.items()}


def _overrides_for(phase: str, chosen: list[str], overrides: dict[str, Any]) -> dict[str, Any]:
    """``run`` and ``target`` belong to the whole pipeline; the rest to the phases chosen."""
    plain = {k: v for k, v in overrides.items() if "." not in k}
    dotted = {k.partition(".")[::2]: v for k, v in overrides.items() if "." in k}
    _refuse_unknown(plain, chosen, "the command line")
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if name in PHASES[phase].model_fields and (phase in chosen or name in ("run", "target")):
            values[name] = value
    for (where, name), value in dotted.items():
        if phase_name(where) == phase:
            values[name] = value
    return values


def _refuse_unknown(values: dict[str, Any], phases: list[str], source: str) -> None:
    known = {field for phase in phases for field in PHASES[phase].model_fields}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise UserError(
            f"unknown parameter {unknown[0]!r}",
            expected=f"a parameter of {', '.join(phases)}",
            where=source,
            next="eagle3 params",
        )
