"""Twenty kinds of healthy runs: none may give a finding above "note".

Each has another target, text, drafter or setting. Their rounds are the simulator's; those of a real
engine are healthy in the run of ``params/faults.yaml``.
"""

from __future__ import annotations

from small import Kind

from eagle3lib.data.rows import GIVEN, RENDERED

_SIX = {"slots": (1, 3, 5)}  # the families' targets have six layers
EAGLE_31 = {"fc_norm": True, "norm_output": True}

KINDS = [
    Kind("Llama, ten layers"),
    Kind("Llama, six layers", family="llama", **_SIX),
    Kind("tied embeddings", family="tied", **_SIX),
    Kind("Qwen3", family="qwen3", **_SIX),
    Kind("Qwen3-MoE", family="qwen3_moe", **_SIX),
    Kind("gpt-oss", family="gpt_oss", **_SIX),
    Kind("DeepSeek-V3, MLA drafter", family="deepseek_v3", **_SIX),
    Kind("DeepSeek-V3, Llama-type drafter", family="deepseek_v3", **_SIX,
         training={"drafter_kind": "llama"}),
    Kind("Kimi-K2.5's wrapper, INT4 experts", family="kimi_k25_int4", **_SIX),
    Kind("INT4", family="int4", **_SIX),
    Kind("thinking on", thinking=("on",)),
    Kind("thinking mixed, a system prompt", thinking=("on", "off"), system="w50 w60"),
    Kind("long conversations", turns=4, answer=72, asked=24),
    Kind("tool calls", tools=True, turns=2),
    Kind("CJK text", cjk=True),
    Kind("whole vocabulary, sampled data", draft_vocab=320, temperature=0.8),
    Kind("EAGLE 3.1, other slots", slots=(1, 4, 9), training=EAGLE_31),
    Kind("K = 1, bfloat16, given answers", steps=1, dtype="bfloat16", answers_from=GIVEN),
    Kind("K = 5, rendered ids", steps=5, answers_from=RENDERED),
    Kind("warm start, bfloat16, ties tip", warm=True, dtype="bfloat16", ties=True),
]  # fmt: skip
