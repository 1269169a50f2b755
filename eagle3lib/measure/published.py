"""Published acceptance lengths of EAGLE-3 drafters, as their sources state them.

None was measured here, and all are of other targets and prompts than a run of this lab: a scale, no
yardstick. A tree drafts several tokens for a position, which raises the length at the same depth.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """``steps``: drafted depth K, None where the source gives no single one (a dynamic tree).
    ``temperature``: None where the source's line does not state it."""

    target: str
    prompts: str
    steps: int | None
    acceptance_length: float
    temperature: float | None
    tree: bool
    source: str


_PAPER = "EAGLE-3, arXiv 2503.01840, table 1"
_P_EAGLE = "vLLM's post on P-EAGLE (arXiv 2602.01469), its EAGLE-3 baseline"
_LK = "model cards of the LK losses, arXiv 2602.23881"
_DSPARK = "DSpark, arXiv 2607.05147, table 1, retrained EAGLE-3"
_BUNDLE = "SpecBundle dashboard, SpecForge repository"

PUBLISHED = (
    Published("Llama-3.1-8B", "MT-bench", None, 6.13, 0, True, _PAPER),
    Published("Llama-3.1-8B", "GSM8K", None, 6.23, 0, True, _PAPER),
    Published("Llama-3.3-70B", "MT-bench", None, 5.63, 0, True, _PAPER),
    Published("R1-Distill-8B", "GSM8K", None, 6.93, 0, True, _PAPER),
    Published("gpt-oss-20b", "HumanEval", 3, 2.65, None, False, _P_EAGLE),
    Published("gpt-oss-20b", "MT-bench", 3, 2.70, None, False, _P_EAGLE),
    Published("gpt-oss-20b", "HumanEval", 7, 3.03, None, False, _P_EAGLE),
    Published("gpt-oss-20b", "MT-bench", 7, 3.27, None, False, _P_EAGLE),
    Published("Llama-3.3-70B", "several", 7, 4.78, 0, False, _LK),
    Published("Qwen3-235B", "several", 7, 4.25, 0, False, _LK),
    Published("Qwen3-8B", "GSM8K", 7, 5.30, 1, False, _DSPARK),
    Published("Qwen3-8B", "MT-bench", 7, 2.66, 1, False, _DSPARK),
    Published("Llama-3.1-8B", "MT-bench", 3, 2.90, None, False, _BUNDLE),
    Published("Llama-3.1-8B", "GSM8K", 3, 2.55, None, False, _BUNDLE),
    Published("Kimi-K2-Instruct", "MT-bench", 3, 2.39, None, False, _BUNDLE),
    Published("Kimi-K2-Instruct", "GSM8K", 3, 3.27, None, False, _BUNDLE),
)
