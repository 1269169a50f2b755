"""Acceptance by what the text is: which part of the traffic the drafter serves badly.

A split puts every answer token into one group: whole answers (thinking, system message, tools,
script, length of the prompt), or tokens of one (kind of text, place in the answer). A round belongs
to the group of the first token that it had to guess: from a base at answer token s, that of s + 1.
Acceptance lengths are pooled over rounds; intervals are a bootstrap over answers, since rounds of
one answer are alike. Splits are of the workload, but for the one by set of prompts.

A group is compared with the rest of its split by the same bootstrap. Text differs (code is easier
than prose), so a difference alone is no fault: where the group is also rarer among the trained
answers than among the served ones, more such training data is what would help.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from eagle3lib.data.describe import script_of
from eagle3lib.data.rows import AnswerRow
from eagle3lib.diagnose.material import SETS, Material
from eagle3lib.diagnose.served import round_starts
from eagle3lib.drafter.coverage import Decode, decoder, token_kinds
from eagle3lib.lab.errors import UserError
from eagle3lib.measure.accounting import MIN_PROMPTS
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.compare import bootstrap

_PROMPT_BANDS = (64, 256, 1024, 4096, 16384, 65536)
_ANSWER_BANDS = (16, 64, 256, 1024, 4096)
_TRAINED_ROWS = 200  # of which shares of groups are counted
_FEWEST_ROUNDS = 30
SET = "set of prompts"
KIND = "kind of text"
PLACE = "place in the answer"
# One name for the whole answer, or one for each of its tokens; "" where it can't be told.
Names = str | list[str]


@dataclass(frozen=True)
class Talk:
    """One answer with what is known of its prompt; ``row`` is None for text from elsewhere."""

    set: str
    prompt_tokens: int
    answer: list[int]
    row: AnswerRow | None


@dataclass(frozen=True)
class Group:
    """Counts of one group. ``low`` and ``high`` are its acceptance length's 95 % interval, None for
    a small group; ``deviation`` its difference from the rest of its split in standard errors, None
    where either is small; ``inside`` the tokens in the draft vocabulary."""

    split: str
    name: str
    answers: int
    rounds: int
    accepted: int
    tokens: int
    inside: int | None
    low: float | None
    high: float | None
    rest_rounds: int
    rest_accepted: int
    deviation: float | None
    served_share: float
    trained_share: float | None

    @property
    def length(self) -> float | None:
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def rest_length(self) -> float | None:
        return 1 + self.rest_accepted / self.rest_rounds if self.rest_rounds else None

    @property
    def small(self) -> bool:
        return self.answers < MIN_PROMPTS or self.rounds < _FEWEST_ROUNDS

    @property
    def coverage(self) -> float | None:
        return self.inside / self.tokens if self.inside is not None and self.tokens else None

    def as_dict(self) -> dict[str, Any]:
        """For ``metrics.json``: counts, and rates rounded for people."""
        rates = {"acceptance_length": self.length, "low": self.low, "high": self.high,
                 "coverage": self.coverage, "deviation": self.deviation,
                 "served_share": self.served_share,
                 "trained_share": self.trained_share}  # fmt: skip
        return {
            "split": self.split, "group": self.name, "answers": self.answers,
            "rounds": self.rounds, "accepted": self.accepted, "tokens": self.tokens,
            "small": self.small,
            **{k: None if v is None else round(v, 4) for k, v in rates.items()},
        }  # fmt: skip


def acceptance_groups(m: Material) -> tuple[list[Group], bool]:
    """(groups of every split that has at least one name, whether the target's tokenizer was read:
    without it there is no kind of text and no script). Empty without answers."""
    asked = {r.id: r for r in m.answers if not r.repeat}
    rows = [row for name in SETS for row in m.first_answers(name) if row.answer_token_ids]
    talks = [
        Talk(r.set, len(r.prompt_token_ids), r.answer_token_ids, asked.get(r.prompt)) for r in rows
    ]
    trained = [r for r in m.answers if r.trained and r.answer_token_ids]
    trained = trained[:: max(1, len(trained) // _TRAINED_ROWS)][:_TRAINED_ROWS]
    learnt = [Talk(r.set, len(r.prompt_token_ids), r.answer_token_ids, r) for r in trained]
    try:
        decode: Decode | None = decoder(m.target) if rows else None
    except UserError:
        decode = None
    t2d = m.drafter.t2d if m.drafter else (m.vocab.t2d if m.vocab else None)
    out = []
    for split, name_of in _splits(decode, m.target.stop_ids()).items():
        pairs = [
            (r, t) for r, t in zip(rows, talks, strict=True) if split == SET or t.set == SETS[0]
        ]
        named = [(r, name_of(t)) for r, t in pairs if split == SET or t.set == SETS[0]]
        shares = None if split in (SET, PLACE) else _shares(learnt, name_of)
        out += _groups(split, named, t2d, shares)
    return out, decode is not None or not rows


def _splits(decode: Decode | None, markers: Sequence[int]) -> dict[str, Callable[[Talk], Names]]:
    splits: dict[str, Callable[[Talk], Names]] = {
        SET: lambda t: t.set,
        "thinking": lambda t: "" if t.row is None else ("on" if thinks(t.row) else "off"),
        "system message": lambda t: _yes(t.row, lambda r: has_system(r)),
        "tools": lambda t: _yes(t.row, lambda r: bool(r.tools)),
        "prompt tokens": lambda t: _band(t.prompt_tokens, _PROMPT_BANDS),
        PLACE: lambda t: [_band(i, _ANSWER_BANDS) for i in range(len(t.answer))],
    }
    if decode is not None:
        splits["script"] = lambda t: main_script(decode(t.answer))
        splits[KIND] = lambda t: [kind for _, kind in token_kinds(t.answer, decode, markers)]
    return splits


def thinks(row: AnswerRow) -> bool:
    return row.reasoning_kind in ("complete", "cut") or row.sampling.get("thinking") == "on"


def has_system(row: AnswerRow) -> bool:
    return any(x.get("role") == "system" for x in row.messages)


def _yes(row: AnswerRow | None, test: Callable[[AnswerRow], bool]) -> str:
    return "" if row is None else ("with" if test(row) else "without")


def main_script(text: str) -> str:
    """Writing system of most letters; languages that share one are not told apart."""
    counts = Counter(script_of(c) for c in text if c.isalpha())
    return counts.most_common(1)[0][0].title() if counts else "no letters"


def _band(value: int, limits: Sequence[int]) -> str:
    low = max((x for x in limits if x <= value), default=0)
    high = min((x for x in limits if x > value), default=None)
    return f"{low:,} and more" if high is None else f"{low:,} to {high - 1:,}"


def _each(names: Names, count: int) -> list[str]:
    return [names] * count if isinstance(names, str) else names


def _shares(talks: list[Talk], name_of: Callable[[Talk], Names]) -> dict[str, float] | None:
    """Shares of answer tokens by group; None without answers."""
    counts = Counter(n for t in talks for n in _each(name_of(t), len(t.answer)))
    total = sum(counts.values())
    return {name: n / total for name, n in counts.items()} if total else None


def _groups(
    split: str,
    named: list[tuple[RequestRow, Names]],
    t2d: Tensor | None,
    trained: dict[str, float] | None,
) -> list[Group]:
    rounds: dict[str, dict[int, list[int]]] = defaultdict(dict)  # answer -> [rounds, accepted]
    tokens, inside = Counter[str](), Counter[str]()
    for at, (row, names) in enumerate(named):
        each = _each(names, len(row.answer_token_ids))
        for name, token in zip(each[1:], row.answer_token_ids[1:], strict=True):
            if not name:
                continue
            tokens[name] += 1
            inside[name] += bool(t2d[token]) if t2d is not None else 0
        for name, accepted, count in _rounds(row, names, each):
            if not name:
                continue
            sums = rounds[name].setdefault(at, [0, 0])
            sums[0] += count
            sums[1] += accepted
    total, whole = sum(tokens.values()), len(named)
    out = []
    for name in sorted(tokens, key=_natural):
        table = np.zeros((whole, 4))
        for other, by_answer in rounds.items():
            for at, sums in by_answer.items():
                table[at, (0 if other == name else 2) : (2 if other == name else 4)] += sums
        mine, rest = table[:, 0] > 0, table[:, 2] > 0
        low, high, deviation = None, None, None
        sums = table.sum(0).astype(int).tolist()
        enough = [int(mine.sum()) >= MIN_PROMPTS and sums[0] >= _FEWEST_ROUNDS,
                  int(rest.sum()) >= MIN_PROMPTS and sums[2] >= _FEWEST_ROUNDS]  # fmt: skip
        if enough[0]:
            low, high = bootstrap(table[mine, :2], _length)
        if all(enough):
            deviation = _deviation(table)
        out.append(
            Group(
                split, name, int(mine.sum()), sums[0], sums[1], tokens[name],
                inside[name] if t2d is not None else None, low, high, sums[2], sums[3], deviation,
                tokens[name] / total, None if trained is None else trained.get(name, 0.0),
            )
        )  # fmt: skip
    return out


def _rounds(row: RequestRow, names: Names, each: list[str]) -> list[tuple[str, int, int]]:
    """(group, accepted drafts, rounds): one by one, or as a whole where the engine tells no order,
    which says nothing of groups inside of an answer. A round past the end is the last token's."""
    if row.accepted is not None:
        starts, last = round_starts(row.accepted), len(each) - 1
        pairs = zip(starts, row.accepted, strict=True)
        return [(each[min(s + 1, last)], n, 1) for s, n in pairs]
    if row.counts is not None and isinstance(names, str):
        return [(names, row.counts["accepted"], row.counts["rounds"])]
    return []


def _natural(name: str) -> tuple[int, str]:
    """Bands by their number, names by the alphabet."""
    number = name.split(" ")[0].replace(",", "")
    return (int(number), name) if number.isdigit() else (-1, name)


def _length(sums: np.ndarray) -> np.ndarray:
    return 1 + sums[:, 1] / sums[:, 0]


def _deviation(table: np.ndarray, resamples: int = 2000) -> float:
    """Difference of two acceptance lengths in standard errors, [answers, rounds and accepted of the
    group, of the rest]. Draws without a round of either are left out."""
    drawn = np.random.default_rng(0).integers(0, len(table), (resamples, len(table)))
    sums = table[drawn].sum(1)
    sums = sums[(sums[:, 0] > 0) & (sums[:, 2] > 0)]
    error = float(np.std(_length(sums[:, :2]) - _length(sums[:, 2:])))
    whole = table.sum(0)
    difference = float(whole[1] / whole[0] - whole[3] / whole[2])
    return difference / max(error, 1e-9)


def groups_that_differ(groups: Sequence[Group], errors: float, tokens: float) -> list[Group]:
    """Those that accept less than the rest of their split by ``errors`` standard errors and by
    ``tokens`` a round, the dearest for the whole run first."""
    low = [
        g for g in groups
        if g.deviation is not None and g.deviation <= -errors
        and g.length is not None and g.rest_length is not None
        and g.rest_length - g.length >= tokens
    ]  # fmt: skip
    return sorted(low, key=lambda g: -cost_of(g))


def cost_of(g: Group) -> float:
    """Tokens a round of its split, had the group accepted what the rest does."""
    assert g.length is not None and g.rest_length is not None
    return (g.rest_length - g.length) * g.rounds / (g.rounds + g.rest_rounds)
