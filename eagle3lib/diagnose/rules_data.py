"""Questions 5 and 6: is the data the served distribution, and is the target hard here?"""

from __future__ import annotations

from collections import Counter
from typing import Any

from eagle3lib.data.rows import AnswerRow
from eagle3lib.data.template import ChatTemplate, RefusedTurn, load_chat_template
from eagle3lib.data.tokens_view import thinking_arguments
from eagle3lib.diagnose.cause import Cause, bars, rows_of
from eagle3lib.diagnose.evidence import Evidence, TargetView, cross_entropy, unseen_share
from eagle3lib.diagnose.groups import has_system, thinks
from eagle3lib.diagnose.material import Material
from eagle3lib.lab.errors import UserError
from eagle3lib.training.evaluate import ENOUGH_TOKENS

_ON_POLICY = 0.8  # share of greedy answers' tokens that the target itself would have said
_COVERED = 0.85
_RENDERED_ROWS = 20
_LONG_SHARE = 0.2
# Nats a token by which served answers may be stranger to the training answers' unigram than the
# training answers are to each other.
_STRANGE_NATS = 0.8
_HARD_NATS = 2.0
_WHERE = "01_generate_data"
_AGAIN = "eagle3 run PROFILE 01 02 03 04 05 06 07"


def data(e: Evidence) -> list[Cause]:
    m = e.material
    return [
        *off_policy(e), *train_template(m), *thinking(m), *system_prompt(m), *coverage(e),
        *smoke_test(m), *trained_length(m), *domain(m), *hard_target(e),
    ]  # fmt: skip


def _cause(code: str, severity: Any, title: str, evidence: str, remedy: str, **more: Any) -> Cause:
    more.setdefault("command", _AGAIN)
    more.setdefault("question", 5)
    return Cause(code, severity, title, evidence, remedy, _WHERE, **more)


def trained_tokens(m: Material) -> int | None:
    return m.training.get("trained_tokens")


def off_policy(e: Evidence) -> list[Cause]:
    """Training answers that the target would not have given. States captured now decide whether
    it is the answers or the stored states that disagree."""
    if e.material.generated.get("temperature", 0.0) or not e.stored:
        return []
    fresh = sum(s.teacher_fresh for s in e.stored) / len(e.stored)
    share = e.teacher_training
    if share is None or share >= _ON_POLICY or fresh >= _ON_POLICY:
        return []
    return [
        _cause(
            "off-policy", "error",
            f"only {share:.0%} of the training answers' tokens are what the target would say",
            f"states captured now say the same ({fresh:.0%}); greedy answers of this target give "
            "nearly 100 %",
            "generate the answers with the target that is served",
            proof="shown", experiment="the target's greedy token at every trained position",
            rows=rows_of("conversation", ((s.id, f"{s.teacher_fresh:.0%} of its answer tokens")
                         for s in sorted(e.stored, key=lambda s: s.teacher_fresh))),
            series=bars("Answer tokens that are the target's own choice", "share",
                        {"stored states": share, "captured now": fresh,
                         "expected at least": _ON_POLICY}),
        )
    ]  # fmt: skip


def _template(m: Material, row: AnswerRow) -> ChatTemplate | None:
    way = {"on": True, "off": False}.get(str(row.sampling.get("thinking", "default")))
    try:
        return load_chat_template(m.target.folder, m.target.stop_ids(), thinking_arguments(way))
    except UserError:
        return None


def train_template(m: Material) -> list[Cause]:
    """Prompts of trained rows against the target's own template."""
    rows = [r for r in m.answers if r.trained and r.messages and not r.turn]
    rows = rows[:: max(1, len(rows) // _RENDERED_ROWS)][:_RENDERED_ROWS]
    template = _template(m, rows[0]) if rows else None
    if template is None:
        return []
    differ: list[tuple[AnswerRow, list[int]]] = []
    for row in rows:
        try:
            text = template.render(row.messages, prompt=True, tools=row.tools or None)
            ids = template.ids(text)
        except RefusedTurn:
            continue
        if ids != row.prompt_token_ids:
            differ.append((row, ids))
    if len(differ) <= len(rows) / 2:
        return []
    row, ids = differ[0]
    return [
        _cause(
            "train-template", "error",
            f"{len(differ)} of {len(rows)} trained prompts are not the target's template",
            f"row {row.id} ends in {template.decode(row.prompt_token_ids[-6:])!r}, the template "
            f"gives {template.decode(ids[-6:])!r}",
            "take the ids that the server returns, never render them a second time",
            proof="shown", experiment="messages of trained rows rendered by the target's template",
            rows=rows_of("conversation", ((r.id, f"ends in "
                         f"{template.decode(r.prompt_token_ids[-6:])!r}, the template in "
                         f"{template.decode(made[-6:])!r}") for r, made in differ)),
        )
    ]  # fmt: skip


def _pairs(m: Material) -> tuple[list[AnswerRow], list[AnswerRow]]:
    """(trained rows, rows of the prompts that were benchmarked)"""
    asked = {r.prompt for r in m.own_rows}
    return [r for r in m.answers if r.trained], [r for r in m.answers if r.id in asked]


def _share(rows: list[AnswerRow], test: Any) -> float:
    return sum(bool(test(r)) for r in rows) / max(len(rows), 1)


def thinking(m: Material) -> list[Cause]:
    trained, served = _pairs(m)
    if not trained or not served:
        return []

    a, b = _share(trained, thinks), _share(served, thinks)
    if abs(a - b) < 0.5:
        return []
    return [
        _cause(
            "thinking-flipped", "error",
            f"{a:.0%} of the trained answers think, {b:.0%} of the served ones do",
            "thinking is other text after another prompt: little carries over",
            "train with the thinking mode that is served (parameter thinking, mixed for both)",
            experiment="share of answers with reasoning, trained and served",
            rows=rows_of("prompt", ((r.id, "thinks" if thinks(r) else "does not think")
                         for r in served if thinks(r) != (a > b))),
            series=bars("Answers that think", "share", {"trained": a, "served": b}),
        )
    ]  # fmt: skip


def system_prompt(m: Material) -> list[Cause]:
    trained, served = _pairs(m)
    if not trained or not served:
        return []

    a, b = _share(trained, has_system), _share(served, has_system)
    if abs(a - b) < 0.5:
        return []
    return [
        _cause(
            "system-prompt", "warning",
            f"{a:.0%} of the trained prompts have a system message, {b:.0%} of the served ones",
            "the system message is part of every state that the drafter reads",
            "train with the system prompts that are served",
            experiment="roles of the messages, trained and served",
            rows=rows_of("prompt", ((r.id, f"{'with' if has_system(r) else 'without'} a system "
                                     "message") for r in served if has_system(r) != (a > b))),
            series=bars("Prompts with a system message", "share", {"trained": a, "served": b}),
        )
    ]  # fmt: skip


def coverage(e: Evidence) -> list[Cause]:
    found = []
    for name in ("workload", "general"):
        views = [v for v in e.views if v.set == name]
        tokens = sum(v.answer_tokens - 1 for v in views)
        if not tokens:
            continue
        share = sum(v.inside_vocab for v in views) / tokens
        if share >= _COVERED:
            continue
        found.append(
            _cause(
                "low-coverage", "warning" if name == "workload" else "note",
                f"the draft vocabulary holds {share:.0%} of the answer tokens ({name})",
                f"{e.material.target.vocab_size:,} tokens in all; one outside ends every chain",
                "raise draft_vocab_size, or count over such text too (03_build_vocab_map)",
                cost=ceiling_cost(share, e.material.steps or 1), proof="shown",
                experiment="served tokens looked up in the map",
                rows=rows_of("prompt", ((v.id, f"{v.inside_vocab} of {v.answer_tokens - 1} tokens "
                             "are in the draft vocabulary") for v in _worst_covered(views))),
                series=bars("Answer tokens within the draft vocabulary", "share",
                            {name: share, "expected at least": _COVERED}),
                command="eagle3 run PROFILE 03 04 05 06 07",
            )
        )  # fmt: skip
    return found


def _worst_covered(views: list[TargetView]) -> list[TargetView]:
    told = [v for v in views if v.answer_tokens > 1]
    return sorted(told, key=lambda v: v.inside_vocab / (v.answer_tokens - 1))


def ceiling_cost(share: float, steps: int) -> float:
    """Accepted drafts a round that a drafter which is always right loses to tokens it can't say:
    K - sum of share^k."""
    return steps - sum(share**k for k in range(1, steps + 1))


def smoke_test(m: Material) -> list[Cause]:
    tokens = trained_tokens(m)
    if tokens is None or tokens >= ENOUGH_TOKENS:
        return []
    return [
        _cause(
            "smoke-test", "note", f"trained on {tokens:,} answer tokens: a smoke test",
            f"drafters for real use see far more than {ENOUGH_TOKENS:,}",
            "read the numbers as proof of the pipeline, not as the drafter's limit",
            experiment="answer tokens of the training",
        )
    ]  # fmt: skip


def trained_length(m: Material) -> list[Cause]:
    """Served positions beyond the longest trained conversation."""
    if m.store is None or not m.own_rows:
        return []
    longest = max((x.tokens for x in m.store.entries if x.split != "heldout"), default=0)
    spans = [(len(r.prompt_token_ids), len(r.answer_token_ids)) for r in m.own_rows]
    beyond = sum(max(0, p + a - max(longest, p)) for p, a in spans)
    share = beyond / max(sum(a for _, a in spans), 1)
    if share < _LONG_SHARE:
        return []
    return [
        _cause(
            "beyond-trained-length", "warning",
            f"{share:.0%} of the served answer tokens lie beyond position {longest}",
            f"no trained conversation is longer than {longest} tokens",
            "train on conversations as long as those that are served",
            experiment="lengths of trained and served conversations",
            rows=rows_of("prompt", ((r.prompt, f"{p + a} tokens, {a} of them the answer's")
                         for r, (p, a) in zip(m.own_rows, spans, strict=True) if p + a > longest)),
            series=bars("Longest conversation", "tokens",
                        {"trained": float(longest), "served": float(max(map(sum, spans)))}),
        )
    ]  # fmt: skip


def domain(m: Material) -> list[Cause]:
    """Served workload answers under the training answers' unigram, against those among each
    other."""
    trained = [r.answer_token_ids for r in m.answers if r.trained]
    served = [t for r in m.own_rows if r.set == "workload" for t in r.answer_token_ids]
    if len(trained) < 8 or not served:
        return []
    size, folds = m.target.vocab_size, 4
    own = []
    for k in range(folds):
        rest = Counter(t for i, ids in enumerate(trained) if i % folds != k for t in ids)
        held = [t for i, ids in enumerate(trained) if i % folds == k for t in ids]
        own.append(cross_entropy(rest, held, size))
    counts = Counter(t for ids in trained for t in ids)
    usual, strange = sum(own) / folds, cross_entropy(counts, served, size)
    if strange - usual < _STRANGE_NATS:
        return []
    return [
        _cause(
            "other-domain", "warning",
            "the served answers are another kind of text than the trained ones",
            f"{strange:.2f} nats a token under the training's unigram, {usual:.2f} among the "
            f"trained answers; {unseen_share(counts, served):.0%} of the tokens never trained",
            "train on answers to the prompts that are served",
            experiment="unigram cross-entropy of served and trained answers",
            rows=rows_of("prompt", sorted(
                ((r.prompt, f"{cross_entropy(counts, r.answer_token_ids, size):.2f} nats a token")
                 for r in m.own_rows if r.set == "workload" and r.answer_token_ids),
                key=lambda row: -float(row[1].split()[0]),
            )),
            series=bars("Answers under the training answers' unigram", "nats a token",
                        {"served": strange, "trained, among each other": usual}),
        )
    ]  # fmt: skip


def hard_target(e: Evidence) -> list[Cause]:
    nats = [v.entropy for v in e.views]
    if not nats or (mean := sum(nats) / len(nats)) < _HARD_NATS:
        return []
    return [
        _cause(
            "hard-target", "note", f"the target itself is undecided here: {mean:.1f} nats a token",
            "no drafter guesses what the target hardly prefers",
            "expect less on this workload; compare with one of lower entropy",
            question=6, experiment="entropy of the target at every served token",
            rows=rows_of("prompt", ((v.id, f"{v.entropy:.2f} nats a token")
                         for v in sorted(e.views, key=lambda v: -v.entropy))),
        )
    ]  # fmt: skip
