"""Question 4: is the training sound? States, mask, steps, and whether anything was learnt."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from eagle3lib.diagnose.cause import Cause, Series, bars, rows_of
from eagle3lib.diagnose.evidence import Evidence
from eagle3lib.diagnose.material import Material

_STATES, _TRAIN = "02_capture_hidden_states", "04_train_drafter"
_CLOSE = 0.1  # relative error below which states are taken for those of a hypothesis
_MOVED = 0.03  # share by which the first step's loss must fall in a training that learns
_FEW_UPDATES = 10


def training(e: Evidence) -> list[Cause]:
    m = e.material
    return [
        *other_target(m), *broken_states(e), *stored_states(e), *last_state(e), *mask(m),
        *steps(m), *never_learnt(m), *no_better_than_counting(m),
    ]  # fmt: skip


def _cause(code: str, severity: Any, title: str, evidence: str, remedy: str, **more: Any) -> Cause:
    more.setdefault("where", _TRAIN)
    more.setdefault("command", "eagle3 run PROFILE 02 04")
    return Cause(code, severity, title, evidence, remedy, question=4, **more)


def other_target(m: Material) -> list[Cause]:
    if m.store is None or m.store.target_fingerprint == m.target.fingerprint:
        return []
    return [
        _cause(
            "other-target", "error", "the states were captured from another target",
            f"fingerprint {m.store.target_fingerprint}, this one is {m.target.fingerprint}",
            "capture again from the target that is served: a fine-tune is another target",
            where=_STATES, proof="shown", experiment="fingerprints of weights and config",
        )
    ]  # fmt: skip


def broken_states(e: Evidence) -> list[Cause]:
    if not e.broken_states:
        return []
    row, problem = e.broken_states[0]
    return [
        _cause(
            "states-broken", "error",
            f"the states of {len(e.broken_states)} conversations are broken: {problem}",
            f"conversation {row} among others",
            "delete these shards and capture again; in an engine switch the prefix cache off",
            where=_STATES, proof="shown",
            experiment="finite, non-zero and changing states, position by position",
            rows=rows_of("conversation", e.broken_states),
        )
    ]  # fmt: skip


def stored_states(e: Evidence) -> list[Cause]:
    """Stored slots against the same tokens captured now, under every hypothesis."""
    wrong = [s for s in e.stored if s.stored_error > _CLOSE]
    if not wrong:
        return []
    fit = Counter(s.fits for s in wrong if s.error < _CLOSE).most_common(1)
    code, title, remedy = {
        "one token late": ("states-shifted", "stored states lie one token late",
                           "pair the state after x[i] with token i"),
        "one token early": ("states-shifted", "stored states lie one token early",
                            "pair the state after x[i] with token i"),
        "slots + 1": ("states-layer", "stored slots are one layer later than their names",
                      "slot i is the state before layer i: output ids are one less"),
        "slots - 1": ("states-layer", "stored slots are one layer earlier than their names",
                      "slot i is the state before layer i: output ids are one less"),
    }.get(fit[0][0] if fit else "", ("states-other-row", "stored states are not of their tokens",
          "pair states and conversations by id and token hash"))  # fmt: skip
    return [
        _cause(
            code, "error", title,
            f"{len(wrong)} of {len(e.stored)} conversations captured again: median error "
            f"{wrong[0].stored_error:.2f} as stored, {wrong[0].error:.3f} as \"{wrong[0].fits}\"",
            remedy, where=_STATES, proof="shown",
            experiment="the same tokens captured now, compared under each hypothesis",
            rows=rows_of("conversation", ((s.id, f"error {s.stored_error:.2f} as stored, "
                         f"{s.error:.3f} as \"{s.fits}\"") for s in wrong)),
            series=bars("Relative error of the stored states", "median over positions",
                        {"as stored": wrong[0].stored_error, wrong[0].fits: wrong[0].error}),
        )
    ]  # fmt: skip


def last_state(e: Evidence) -> list[Cause]:
    """The stored last state, which the teacher's head reads, under every hypothesis."""
    fit = Counter(s.last_fits for s in e.stored if s.last_error < _CLOSE).most_common(1)
    code, title, remedy = {
        "already normed": ("last-normed", "the stored last state is already normed",
                           "store the input of the final norm, or leave the norm out of the "
                           "teacher"),
        "one token late": ("states-shifted", "the stored last states lie one token late",
                           "pair the state after x[i] with token i"),
        "one token early": ("states-shifted", "the stored last states lie one token early",
                            "pair the state after x[i] with token i"),
    }.get(fit[0][0] if fit else "", ("", "", ""))  # fmt: skip
    if not code:
        return []
    s = next(s for s in e.stored if s.last_fits == fit[0][0])
    return [
        _cause(
            code, "error", title,
            f"the teacher gives {s.teacher_stored:.0%} of the answer tokens, "
            f"{s.teacher_fresh:.0%} from states captured now",
            remedy, where=_STATES, proof="shown",
            experiment="the last state captured now, under each hypothesis",
            rows=rows_of("conversation", ((x.id, f"the teacher gives {x.teacher_stored:.0%}, from "
                         f"states captured now {x.teacher_fresh:.0%}") for x in e.stored
                         if x.last_fits == s.last_fits)),
            series=bars("Answer tokens that the teacher gives", "share",
                        {"stored states": s.teacher_stored, "captured now": s.teacher_fresh}),
        )
    ]  # fmt: skip


def mask(m: Material) -> list[Cause]:
    """Trained spans (prompt_tokens and tokens of the index) against the answers as served."""
    if m.store is None or not m.answers:
        return []
    rows = {r.id: r for r in m.answers}
    pairs = [(x, rows[x.id]) for x in m.store.entries if x.id in rows and x.split != "heldout"]
    starts = Counter(x.prompt_tokens - len(r.prompt_token_ids) for x, r in pairs)
    whole = sum(x.prompt_tokens <= 1 < len(r.prompt_token_ids) for x, r in pairs)
    ends = Counter(x.tokens - len(r.prompt_token_ids) - len(r.answer_token_ids) for x, r in pairs)
    found, count = [], max(len(pairs), 1)
    if whole / count > 0.1:
        found.append(
            (
                "mask-all-ones",
                f"{whole} prompts are trained on as if they were answers",
                "train on the answer's span alone",
            )
        )
    elif (off := count - starts[0]) / count > 0.1:
        by = next(n for n, _ in starts.most_common() if n)
        found.append(
            (
                "mask-shifted",
                f"the trained span starts {by:+d} tokens off in {off} rows",
                "shift the mask with the tokens: the first base position is n - 1",
            )
        )
    if (short := sum(n for by, n in ends.items() if by < 0)) / count > 0.1:
        found.append(("stop-missing", f"{short} answers were cut before training: their stop token "
                      "is not trained", "keep the stop token in the answer"))  # fmt: skip
    return [
        _cause(
            code, "error", title, f"{len(pairs)} trained rows, index against answers.jsonl",
            remedy, proof="shown", experiment="trained span beside the served answer, row by row",
        )
        for code, title, remedy in found
    ]  # fmt: skip


def steps(m: Material) -> list[Cause]:
    trained, served = m.training_params.get("steps"), m.steps
    if not trained or not served or trained >= served:
        return []
    per_step = next(
        (a["acceptance"]["conditional"] for a in m.benchmark.get("arms", []) if "acceptance" in a),
        [],
    )
    return [
        _cause(
            "few-steps", "warning", f"{trained} steps were trained, {served} are served",
            f"acceptance given the step before: {per_step}; later steps read the drafter's own "
            "output, which it never saw in training",
            f"train at least {served} steps (parameter steps)", command="eagle3 run PROFILE 04",
            experiment="acceptance by step, against the steps of the training",
            series=bars("Acceptance given the step before", "share",
                        {f"step {k}": share for k, share in enumerate(per_step, start=1)}),
        )
    ]  # fmt: skip


def never_learnt(m: Material) -> list[Cause]:
    """The loss of the first step over the updates, and the drafter against its untrained self."""
    losses = [r["steps"][0]["loss"] for r in m.curve if r.get("kind") == "train" and r["steps"]]
    if len(losses) < _FEW_UPDATES:
        return []
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    if last < (1 - _MOVED) * first:
        return []
    return [
        _cause(
            "never-learnt", "error", f"the loss did not fall: {first:.2f} at first, {last:.2f} now",
            f"step 1, means over the first and last {tenth} of {len(losses)} updates",
            "look at the learning rate, the mask, and whether weights are handed to the optimizer",
            proof="shown", experiment="first step's loss over the updates",
            series=_curve(losses),
            command="eagle3 run PROFILE 04",
        )
    ]  # fmt: skip


def _curve(losses: list[float], points: int = 60) -> Series:
    """Means over stretches of updates: a long training makes no longer finding."""
    wide = max(1, math.ceil(len(losses) / points))
    parts = [losses[i : i + wide] for i in range(0, len(losses), wide)]
    names = tuple(str(i * wide + 1) for i in range(len(parts)))
    means = tuple(sum(part) / len(part) for part in parts)
    return Series("Loss of the first step over the updates", "nats", names, means, line=True)


def no_better_than_counting(m: Material) -> list[Cause]:
    """The trained drafter on held-out answers against a unigram, which sees nothing at all."""
    trained = ((m.training.get("heldout") or {}).get("workload") or {}).get("acceptance_length")
    unigram = ((m.training.get("baselines") or {}).get("unigram_workload") or {}).get(
        "acceptance_length"
    )
    if trained is None or unigram is None or trained > unigram:
        return []
    return [
        _cause(
            "no-better-than-counting", "error",
            f"the trained drafter ({trained:.2f}) is no better than the commonest token "
            f"({unigram:.2f})",
            "held-out answers of the workload", "check states, labels and learning rate",
            experiment="the simulator on held-out answers, beside the unigram's",
            series=bars("Held-out acceptance length", "tokens a round",
                        {"trained drafter": trained, "the commonest token": unigram}),
        )
    ]  # fmt: skip
