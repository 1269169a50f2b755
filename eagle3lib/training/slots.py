"""Which slots a drafter lives on: acceptance beside the states, slots taken away, slots retrained.

    correlation   does acceptance at a position go with what a layer's state shows there?
    knock-out     the trained drafter without one slot's information, replayed
    ablation      short trainings that differ in the slots alone: same answers, order, seed, tokens

The knock-out tells what this drafter learnt to use, the ablation what could have been learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.config import chosen_slots, default_slots
from eagle3lib.drafter.model import Drafter, PackedRows, unroll
from eagle3lib.drafter.simulate import Conversation, simulate
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_json, read_jsonl
from eagle3lib.lab.params import CaptureParams, TrainParams
from eagle3lib.target.capture import capture
from eagle3lib.target.folder import Target
from eagle3lib.target.layer_stats import LayerStates, Lens
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.evaluate import acceptance_counts
from eagle3lib.training.loop import Trainer


def accepted_at(
    drafter: Drafter, items: Sequence[Conversation], found: LayerStates, steps: int
) -> Int64[Tensor, " P"]:
    """``accepted_from`` at the picked positions of ``found``, whose rows ``items`` are."""
    every = [accepted_from(drafter, item, steps) for item in items]
    places = zip(found.row.tolist(), found.position.tolist(), strict=True)
    return torch.stack([every[row][position] for row, position in places])


@torch.no_grad()
def accepted_from(drafter: Drafter, item: Conversation, steps: int) -> Int64[Tensor, " T"]:
    """How many drafts would be accepted if a round began at each position; -1 at positions that no
    round begins at (``drafter/align.py``)."""
    span, tokens = base_span(item.prompt_tokens, len(item.token_ids)), item.token_ids
    accepted = torch.full((len(tokens),), -1)
    if span.count == 0:
        return accepted
    rows = PackedRows.pack([tokens], [item.prompt_tokens])
    made = unroll(drafter, rows, item.states.to(drafter.fc.weight.dtype), steps, feed="draft")
    base = torch.arange(span.first, span.first + span.count)
    still, count = torch.ones(span.count, dtype=torch.bool), torch.zeros(span.count, dtype=int)
    for step, out in enumerate(made):
        label = base + 2 + step
        exists = label < len(tokens)
        still &= exists & (out.drafts == tokens[label.clamp_max(len(tokens) - 1)])
        count += still
    accepted[base] = count
    return accepted


def correlations(
    found: LayerStates, lens: Lens, accepted: Int64[Tensor, " P"]
) -> list[dict[str, Any]]:
    """Spearman's rank correlation over positions between the drafts accepted from a position and
    what a layer shows there; NaN where one of them does not vary. One line a layer."""
    ranks = _ranks(accepted)
    shown = {
        "size": found.states.square().mean(-1).sqrt(),
        "reads the next token": lens.next_log_prob,
        "reads the token after": lens.drafted_log_prob,
        "unsure (entropy)": lens.entropy,
    }
    return [
        {"layer": found.name(i), "positions": len(ranks)}
        | {name: _correlation(ranks, _ranks(values[i])) for name, values in shown.items()}
        for i in range(len(found.layers))
    ]


def _ranks(values: Tensor) -> np.ndarray:
    """Ranks, of equal values their mean."""
    return pd.Series(values.numpy()).rank().to_numpy()


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() and b.std() else float("nan")


def knock_out(
    drafter: Drafter, items: Sequence[Conversation], slots: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """Rounds of the drafter as it is, without each slot, with each slot alone, and with none: what
    is left then the drafter knows from the tokens.

    A slot that is taken away is given its mean over all tokens of ``items``: its information is
    gone, its size is not. One line a variant: rounds, accepted, histogram, acceptance_length, and
    (rounds, accepted) of every conversation.
    """
    means = torch.cat([item.states.float() for item in items]).mean(0).chunk(len(slots))
    variants: dict[str, set[int]] = {"as trained": set()}
    variants |= {f"without {slot}": {i} for i, slot in enumerate(slots)}
    everything = set(range(len(slots)))
    variants |= {f"{slot} alone": everything - {i} for i, slot in enumerate(slots)}
    variants["none of them"] = everything
    lines = []
    for name, gone in variants.items():
        changed = [_without(item, means, gone) for item in items]
        replays = list(simulate(drafter, changed, steps))
        sums = [(len(r.accepted), sum(r.accepted)) for r in replays]
        counts = acceptance_counts(replays, steps)
        lines.append({"slots": name, **counts, "conversations": sums})
    return lines


def _without(item: Conversation, means: Sequence[Tensor], gone: set[int]) -> Conversation:
    parts = list(item.states.float().chunk(len(means), dim=1))
    for i in gone:
        parts[i] = means[i].expand_as(parts[i])
    return Conversation(item.token_ids, item.prompt_tokens, torch.cat(parts, dim=1))


def named_slots(text: str, num_layers: int) -> list[tuple[int, ...]]:
    """Triples of slots: ``first`` (1, 2, 3), ``default``, ``last`` (the three before the head), or
    numbers as 2-15-27; parted by commas. Raises ``UserError`` for others and for slots that the
    target has not."""
    n = num_layers
    known = {"first": (1, 2, 3), "last": (n - 2, n - 1, n)}
    out: list[tuple[int, ...]] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        if word == "default":
            out.append(default_slots(n))
        elif word in known:
            out.append(known[word])
        elif word.replace("-", "").isdigit():
            out.append(chosen_slots(word.replace("-", ","), n))
        else:
            raise UserError(
                f"parameter ablation_slots has {word!r}",
                expected="first, default, last, or slots as 2-15-27, parted by commas",
            )
    return out


def first_answers(rows: Sequence[AnswerRow], tokens: int, heldout: int) -> list[AnswerRow]:
    """Training answers until they hold ``tokens`` answer tokens, and ``heldout`` held-out ones of
    each set."""
    chosen, held = [], 0
    for row in rows:
        if row.trained and held < tokens:
            chosen.append(row)
            held += len(row.answer_token_ids)
    for name in ("workload", "general"):
        chosen += [r for r in rows if (r.split, r.set) == ("heldout", name)][:heldout]
    return chosen


def train_on_slots(
    target: Target,
    rows: Sequence[AnswerRow],
    choices: Sequence[tuple[int, ...]],
    vocab: Path,
    cfg: TrainParams,
    dtype: str,
    folder: Path,
) -> list[dict[str, Any]]:
    """Capture the same answers at each choice of slots and train on them: equal tokens, seed and
    order. A finished training in ``folder`` is not made again.

    One line a choice and held-out set: the greedy simulator after the last epoch, beside the
    unigram and the bigram that see no state.
    """
    lines, sizes = [], CaptureParams()
    for slots in choices:
        name = "-".join(map(str, slots))
        made_of = [cfg.model_dump(mode="json"), dtype, target.fingerprint, [r.id for r in rows]]
        where = folder / f"{name}-{hash_json(made_of)[:8]}"
        capture(
            target, list(rows), where / "states", slots=slots, dtype=dtype,
            batch_tokens=sizes.batch_tokens, shard_rows=sizes.shard_rows,
        )  # fmt: skip
        place = Folders(where, where / "states", vocab)
        Trainer(cfg, target, place).run()
        lines += _trained_lines(name, read_jsonl(place.metrics))
    return lines


def _trained_lines(name: str, log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    evaluations = [r for r in log if r["kind"] == "evaluation"]
    first, last = evaluations[0], evaluations[-1]
    seen = sum(r["tokens"] for r in log if r["kind"] == "train")
    lines = []
    for set_name, counts in last["sets"].items():
        lines.append(
            {
                "slots": name,
                "set": set_name,
                "tokens seen": seen,
                "epochs": last["epoch"],
                "rounds": counts["rounds"],
                "accepted": counts["accepted"],
                "acceptance_length": counts["acceptance_length"],
                **{
                    label: first["baselines"][f"{label}_{set_name}"]["acceptance_length"]
                    for label in ("unigram", "bigram")
                },
            }
        )
    return lines
