"""``eagle3 plan``: a profile's plan, or that of a bare target with the defaults."""

from __future__ import annotations

from pathlib import Path

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.machine import describe_machine
from eagle3lib.lab.params import PlanParams
from eagle3lib.lab.profile import PROFILES, load_profile, parse_arguments
from eagle3lib.plan.engines import ask_engines
from eagle3lib.plan.plan import Plan, make_plan, with_engines
from eagle3lib.plan.source import open_source


def plan_of(target_or_profile: str, words: list[str], *, engines: bool) -> Plan:
    """Raises ``UserError`` for unknown names, and for phases among the words."""
    phases, values = parse_arguments(words)
    if phases:
        raise UserError(f"a plan has no phases, found {phases[0]!r}", expected="NAME=VALUE")
    name = target_or_profile
    if name.endswith((".yaml", ".yml")) or (PROFILES / f"{name}.yaml").exists():
        cfg = load_profile(name, [PlanParams.PHASE], values)[PlanParams.PHASE]
        assert isinstance(cfg, PlanParams)
    else:
        target = str(Path(name).expanduser()) if Path(name).expanduser().exists() else name
        cfg = PlanParams.checked({"target": target} | values, "the command line")
    source = open_source(cfg.target)
    plan = make_plan(cfg, source, describe_machine())
    return with_engines(plan, ask_engines(source.shape.architecture)) if engines else plan
