"""What a storage format costs in acceptance: drafters trained on each, judged on exact states.

Arms differ in the numbers that training reads, nothing else: same conversations, order, seed and
weights to begin with. All are judged on the held-out conversations of the full store, whose states
are those that an engine serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lib.drafter.align import base_span
from eagle3lib.drafter.simulate import Conversation
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import hash_json
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.folder import Target
from eagle3lib.target.states import StateStore
from eagle3lib.target.storage_convert import convert_states
from eagle3lib.training.data import conversations
from eagle3lib.training.evaluate import evaluate
from eagle3lib.training.job import best_drafter
from eagle3lib.training.loop import Folders, Trainer

EXACT = "full"
Arms = dict[str, StateStore]


def make_arms(store: StateStore, formats: list[str], folder: Path) -> Arms:
    """The run's own store as the arm ``full``, and its conversion to each other format."""
    if store.state_format != EXACT:
        raise UserError(
            f"the run's states are stored as {store.state_format}",
            expected="state_format: full, to compare with",
            where=store.folder,
            next="eagle3 run PROFILE 02 state_format=full",
        )
    made = {name: convert_states(store, folder / name, name) for name in formats if name != EXACT}
    return {EXACT: store} | made


def size_rows(arms: Arms, hidden: int) -> list[dict[str, Any]]:
    """Bytes a token of the files, and their share of four whole bf16 states (all last states
    kept, the layout of other tools)."""
    lines = []
    for name, store in arms.items():
        tokens = sum(entry.tokens for entry in store.entries)
        answers = sum(entry.tokens - entry.prompt_tokens for entry in store.entries)
        per_token = store.stored_bytes / tokens
        lines.append(
            {
                "format": name,
                "tokens": tokens,
                "answer_share": answers / tokens,
                "bytes_per_token": per_token,
                "of_four_bf16_states": per_token / (2 * (len(store.slots) + 1) * hidden),
            }
        )
    return lines


def train_arms(
    arms: Arms, vocab: Path, target: Target, cfg: TrainParams, seeds: int, folder: Path
) -> list[dict[str, Any]]:
    """Train a drafter on every arm with every seed; one line a drafter and held-out set.

    A finished training of these parameters in ``folder`` is not made again. Acceptance is that of
    the best epoch's checkpoint, by the greedy simulator.
    """
    heldout = _heldout(arms[EXACT])
    lines = []
    for seed in range(seeds):
        for name, store in arms.items():
            seeded = cfg.model_copy(update={"seed": seed})
            inputs = hash_json([seeded.model_dump(mode="json"), [e.id for e in store.entries]])
            where = Folders(folder / f"{name}-{seed}-{inputs[:8]}", store.folder, vocab)
            where.phase.mkdir(parents=True, exist_ok=True)
            Trainer(seeded, target, where).run()
            drafter, state = best_drafter(where, target)
            found = evaluate(drafter, heldout, cfg.num_speculative_tokens)
            for set_name, counts in found.items():
                kept = {key: counts[key] for key in ("rounds", "accepted", "acceptance_length")}
                lines.append(
                    {"seed": seed, "format": name, "set": set_name, "epoch": state["epoch"], **kept}
                )
    return lines


def loss_rows(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Acceptance length of each format and set, pooled over seeds, and the share of ``full``'s
    that is lost (negative: gained), with the least and greatest loss of a seed."""
    found = []
    for name, set_name in dict.fromkeys((line["format"], line["set"]) for line in lines):
        own = [x for x in lines if (x["format"], x["set"]) == (name, set_name)]
        exact = [x for x in lines if (x["format"], x["set"]) == (EXACT, set_name)]
        by_seed = [_length([a]) / _length([b]) for a, b in zip(own, exact, strict=True)]
        found.append(
            {
                "format": name,
                "set": set_name,
                "acceptance_length": round(_length(own), 4),
                "lost": 1 - _length(own) / _length(exact),
                "least_of_a_seed": 1 - max(by_seed),
                "most_of_a_seed": 1 - min(by_seed),
            }
        )
    return found


def _length(lines: list[dict[str, Any]]) -> float:
    return 1 + sum(x["accepted"] for x in lines) / sum(x["rounds"] for x in lines)


def _heldout(store: StateStore) -> dict[str, list[Conversation]]:
    entries = [
        e for e in store.select(split="heldout") if base_span(e.prompt_tokens, e.tokens).count > 0
    ]
    return {
        name: conversations(store, [e for e in entries if e.set == name])
        for name in dict.fromkeys(e.set for e in entries)
    }
