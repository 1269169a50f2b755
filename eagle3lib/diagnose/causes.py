"""All causes of a run, ranked: the questions in order, none stopped at."""

from __future__ import annotations

from eagle3lib.diagnose.cause import Cause, ranked
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.rules_checkpoint import checkpoint
from eagle3lib.diagnose.rules_data import data
from eagle3lib.diagnose.rules_engine import engine
from eagle3lib.diagnose.rules_groups import groups
from eagle3lib.diagnose.rules_measured import measured
from eagle3lib.diagnose.rules_reference import reference
from eagle3lib.diagnose.rules_training import training
from eagle3lib.diagnose.rules_unrecorded import unrecorded


def causes_of(e: Evidence) -> list[Cause]:
    """Every rule of questions 1 to 6. Speed, the seventh, has its own verdict."""
    rules = (measured, unrecorded, engine, reference, checkpoint, training, data, groups)
    return ranked([*e.material.problems, *(c for rule in rules for c in rule(e))])
