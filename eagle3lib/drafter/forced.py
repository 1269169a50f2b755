"""Tokens that a draft vocabulary holds whatever the counts say: stop tokens, and the markers of
turns, reasoning and tools that the tokenizer adds to its vocabulary.

They are few, each stands at a place where a chain would otherwise end (a drafter that can't propose
the stop token loses the last round of every answer), and few answers may show them at all. Reserved
places and placeholders of pictures or sounds are never generated, and are left to the counts.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from eagle3lib.drafter.vocab import VocabMap
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding
from eagle3lib.target.folder import Target

KINDS = ("stop", "reasoning", "tool", "special")
_NEVER_MADE = re.compile(
    r"reserved|unused|extra_id|placeholder|dummy|image|img|audio|video|vision|media|<pad>|\[pad",
    re.IGNORECASE,
)
_REASONING = re.compile(r"think|reason|scratchpad|analysis", re.IGNORECASE)
_TOOL = re.compile(r"tool|function|python|call|observation", re.IGNORECASE)


def added_tokens(target: Target) -> dict[int, tuple[str, bool]]:
    """Id -> (content, special) of the tokens that the target's tokenizer files add."""
    found: dict[int, tuple[str, bool]] = {}
    path = target.folder / "tokenizer.json"
    if path.exists():
        for token in read_json(path).get("added_tokens") or []:
            found[int(token["id"])] = (token["content"], bool(token.get("special")))
    path = target.folder / "tokenizer_config.json"
    if path.exists():
        for token_id, token in (read_json(path).get("added_tokens_decoder") or {}).items():
            found.setdefault(int(token_id), (token["content"], bool(token.get("special"))))
    return found


def forced_ids(target: Target) -> dict[int, str]:
    """Id -> kind (one of ``KINDS``), by rising id. Added tokens beyond the model's vocabulary have
    no row in any head, and are no part of it; a stop id beyond it is kept, and refused by the
    map."""
    kinds: dict[int, str] = {}
    for token_id, (content, special) in added_tokens(target).items():
        if token_id >= target.vocab_size or _NEVER_MADE.search(content):
            continue
        if _REASONING.search(content):
            kinds[token_id] = "reasoning"
        elif _TOOL.search(content):
            kinds[token_id] = "tool"
        elif special:
            kinds[token_id] = "special"
    kinds |= dict.fromkeys(target.stop_ids(), "stop")
    return dict(sorted(kinds.items()))


def forced_table(target: Target, forced: dict[int, str]) -> pd.DataFrame:
    """The forced tokens by kind, with what they say."""
    names, lines = added_tokens(target), []
    for kind in KINDS:
        ids = [i for i in forced if forced[i] == kind]
        shown = [names.get(i, (f"id {i}", True))[0] for i in ids]
        more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
        lines.append({"kind": kind, "tokens": len(ids), "which": "  ".join(shown[:12]) + more})
    return pd.DataFrame(lines)


def check_forced(vocab: VocabMap, target: Target, forced: dict[int, str]) -> list[Finding]:
    """Forced tokens that a map lacks, as a checkpoint's own map may: a warning a kind."""
    findings, names = [], added_tokens(target)
    for kind in KINDS:
        lacking = [i for i in forced if forced[i] == kind and not vocab.t2d[i]]
        if lacking:
            shown = ", ".join(names.get(i, (f"id {i}", True))[0] for i in lacking[:5])
            findings.append(
                Finding(
                    f"vocab-lacks-{kind}",
                    "warning",
                    f"the draft vocabulary lacks {len(lacking)} {kind} token(s): {shown}",
                    "a chain ends wherever the target says one of them",
                    "if answers hold them, train with a map of your own instead of the "
                    "checkpoint's",
                    "03_build_vocab_map",
                )
            )
    return findings


def forced_counts(forced: dict[int, str]) -> dict[str, Any]:
    """Tokens by kind, for ``metrics.json``."""
    return {kind: sum(k == kind for k in forced.values()) for kind in KINDS}
