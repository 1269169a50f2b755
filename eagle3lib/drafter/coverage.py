"""How large a draft vocabulary: coverage of held-out answers against what its head costs.

A token outside the draft vocabulary ends its chain, and every drafted token reads the whole head.
With K steps and an acceptance a of tokens that are inside, a vocabulary of size D that covers c(D)
of the answers gives about

    acceptance length   t(D) = 1 + sum over k = 1..K of (a c(D))^k
    cost of a round     r(D) = 1 + K (layer bytes + head bytes(D)) / target bytes
    speed-up            t(D) / r(D)

in the regime where a step costs what it reads (small batches; of a target with experts all weights
are counted, as a batch reads them). Verification and overheads are left out: the estimate ranks
sizes, it promises no speed. The rule of ``draft_vocab_size: 0``: the smallest size whose estimate
is within 0.2 % of the best one.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd

from eagle3lib.data.describe import script_of
from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.vocab import VocabMap, build_vocab_map, count_tokens, coverage_counts
from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import Target

SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# A trained EAGLE-3 drafter accepts 0.6 to 0.9 of what it drafts step by step; the choice hardly
# moves within that range.
ASSUMED_ACCEPTANCE = 0.75
_GOOD_ENOUGH = 0.998
_BF16_BYTES = 2
_CJK = ("CJK", "HIRAGANA", "KATAKANA", "HANGUL")
TEXT_KINDS = ("code", "Latin", "CJK", "other script", "numbers and signs",
              "emoji, parts of characters", "markers")  # fmt: skip
Decode = Callable[[list[int]], str]


def answer_counts(rows: Iterable[AnswerRow]) -> Counter[int]:
    """Counts over the answers that are trained on."""
    return count_tokens(row.answer_token_ids for row in rows if row.trained)


def coverage_table(vocab: VocabMap, rows: list[AnswerRow]) -> pd.DataFrame:
    """Share of answer tokens that the draft vocabulary holds, where it was counted and held out."""
    groups = [("workload", "train"), ("workload", "heldout"), ("general", "heldout")]
    out = []
    for name, split in groups:
        answers = [r.answer_token_ids for r in rows if (r.set, r.split) == (name, split)]
        inside, total = coverage_counts(vocab, answers)
        if total:
            out.append(
                {
                    "set": name,
                    "split": split,
                    "tokens": total,
                    "inside": inside,
                    "coverage": inside / total,
                }
            )
    return pd.DataFrame(out, columns=["set", "split", "tokens", "inside", "coverage"])


def head_cost(draft_vocab_size: int, hidden_size: int) -> dict[str, int]:
    """Of one drafted token: bytes of the head in bf16, and its floating-point operations (a
    multiplication and an addition a weight)."""
    weights = draft_vocab_size * hidden_size
    return {"head_bytes": weights * _BF16_BYTES, "head_flops": 2 * weights}


def estimated_speedup(
    coverage: float, head_bytes: int, layer_bytes: int, target_bytes: int, steps: int
) -> float:
    """The module's formula; ``steps`` is K."""
    inside = ASSUMED_ACCEPTANCE * coverage
    length = 1 + sum(inside**k for k in range(1, steps + 1))
    return length / (1 + steps * (layer_bytes + head_bytes) / target_bytes)


def coverage_curve(
    rows: list[AnswerRow], target: Target, forced: Iterable[int], steps: int
) -> pd.DataFrame:
    """Held-out coverage, head cost and estimated speed-up by size of the draft vocabulary; a line
    a size and set. Sizes are powers of two that hold the forced ids, and the whole vocabulary."""
    counts, forced, curve = answer_counts(rows), list(forced), []
    weights = sum(f.stat().st_size for f in target.folder.glob("*.safetensors"))
    sizes = [s for s in SIZES if len(forced) <= s < target.vocab_size]
    for size in [*sizes, target.vocab_size]:
        shape = DrafterConfig.for_target(target.config, size)
        cost = head_cost(size, shape.hidden_size)
        vocab = build_vocab_map(counts, target.vocab_size, size, forced)
        table = coverage_table(vocab, rows)
        for line in table[table.split == "heldout"].to_dict("records"):
            speedup = estimated_speedup(
                line["coverage"],
                cost["head_bytes"],
                shape.layer_parameters * _BF16_BYTES,
                weights,
                steps,
            )
            named = {"draft_vocab_size": size, "set": line["set"], "coverage": line["coverage"]}
            curve.append(named | cost | {"estimated_speedup": speedup})
    return pd.DataFrame(curve)


def choose_size(curve: pd.DataFrame) -> int:
    """The smallest size within 0.2 % of the best estimate on held-out answers of the workload.

    Raises ``UserError`` when there are none to judge by.
    """
    judged = curve[curve["set"] == "workload"] if len(curve) else curve
    if not len(judged):
        raise UserError(
            "no held-out answer of the workload to choose draft_vocab_size by",
            expected="heldout_workload of phase 01 above 0, or draft_vocab_size set by hand",
        )
    best = judged.estimated_speedup.max()
    return int(judged[judged.estimated_speedup >= _GOOD_ENOUGH * best].draft_vocab_size.min())


def text_kind(piece: str) -> str:
    """What one token is made of, by its first letter; one of ``TEXT_KINDS`` without code and
    markers."""
    letter = next((c for c in piece if c.isalpha()), "")
    if letter:
        script = script_of(letter)
        return "Latin" if script == "LATIN" else "CJK" if script in _CJK else "other script"
    if any(0x3000 <= ord(c) < 0x3040 or 0xFF00 <= ord(c) < 0xFFF0 for c in piece):
        return "CJK"  # its punctuation
    # So: pictures, and U+FFFD, which stands for bytes that are a character with their neighbours.
    strange = any(unicodedata.category(c) == "So" for c in piece)
    return "emoji, parts of characters" if strange else "numbers and signs"


def token_kinds(
    ids: list[int], decode: Decode, markers: Iterable[int] = ()
) -> Iterator[tuple[int, str]]:
    """(token id, kind) along an answer; code is what stands inside ``` fences."""
    known, marked, fences, tail = {i: decode([i]) for i in set(ids)}, set(markers), 0, ""
    for token in ids:
        piece = known[token]
        kind = "code" if fences % 2 else text_kind(piece)
        yield token, "markers" if token in marked else kind
        parts = (tail + piece).split("```")
        fences, tail = fences + len(parts) - 1, parts[-1][-2:]


def coverage_by_kind(
    vocab: VocabMap, rows: Iterable[AnswerRow], decode: Decode, markers: Iterable[int] = ()
) -> pd.DataFrame:
    """Held-out answer tokens inside the draft vocabulary by kind of text, both sets together."""
    total, inside, marked = Counter[str](), Counter[str](), set(markers)
    for row in rows:
        if row.split == "heldout":
            for token, kind in token_kinds(row.answer_token_ids, decode, marked):
                total[kind] += 1
                inside[kind] += bool(vocab.t2d[token])
    lines = [
        {"kind": k, "tokens": total[k], "inside": inside[k], "coverage": inside[k] / total[k]}
        for k in TEXT_KINDS
        if total[k]
    ]
    return pd.DataFrame(lines, columns=["kind", "tokens", "inside", "coverage"])


def left_out(
    vocab: VocabMap, rows: Iterable[AnswerRow], decode: Decode, most: int = 12
) -> pd.DataFrame:
    """The commonest held-out answer tokens that the drafter can't propose."""
    counts = count_tokens(row.answer_token_ids for row in rows if row.split == "heldout")
    missed = [(i, n) for i, n in counts.most_common() if not vocab.t2d[i]][:most]
    lines = [{"token": i, "text": repr(decode([i])), "times": n} for i, n in missed]
    return pd.DataFrame(lines, columns=["token", "text", "times"])


def decoder(target: Target) -> Decode:
    """Ids to text by the target's own tokenizer, nothing skipped or cleaned up."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target.folder)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(
            f"the target's tokenizer can't be loaded: {error}",
            expected="a tokenizer that transformers reads without remote code",
            where=target.folder,
        ) from None
    return lambda ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False)
