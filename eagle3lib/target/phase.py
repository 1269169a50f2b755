"""Phase 02: states of every answered conversation, proven against the answers themselves."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding, by_severity
from eagle3lib.lab.machine import cores, describe_machine
from eagle3lib.lab.params import CaptureParams
from eagle3lib.lab.run import Phase
from eagle3lib.target.capture import (
    CaptureResult,
    InProcess,
    StateSource,
    capture,
    teacher_agreement,
)
from eagle3lib.target.engine import FromVllm
from eagle3lib.target.folder import Target
from eagle3lib.target.images import text_entries
from eagle3lib.target.layers import check_layers, match_slots
from eagle3lib.target.model import TargetHead, best_device, load_target
from eagle3lib.target.proof import check_states, gather_facts
from eagle3lib.target.sglang_source import FromSglang
from eagle3lib.target.states import StateStore
from eagle3lib.target.weights import weight_files

LAYER_CHECK_ROWS = 4
PROOF_ROWS = 24  # of each split and set, where training makes its own states


def capture_answers(
    phase: Phase, cfg: CaptureParams, target: Target, slots: tuple[int, ...]
) -> CaptureResult:
    """Capture the states of all answers of phase 01, or with ``states: live`` of a sample, into
    ``states/``; resumes at the last shard."""
    torch.set_num_threads(cores())
    rows, sample_of = _wanted_rows(phase, cfg)
    if sample_of:
        phase.note(f"states: live: a proof, of {len(rows)} of {sample_of} answers")
    lengths = [len(r.prompt_token_ids) + len(r.answer_token_ids) for r in rows]
    with phase.progress(sum(lengths), "tokens", "hidden states") as bar:
        return capture(
            target,
            rows,
            phase.folder / "states",
            slots=slots,
            dtype=cfg.dtype,
            batch_tokens=cfg.batch_tokens,
            shard_rows=cfg.shard_rows,
            state_format=cfg.state_format,
            on_tokens=bar.update,
            source=_source(phase, cfg, target, slots, max(lengths, default=1)),
            sample_of=sample_of,
        )


def _wanted_rows(phase: Phase, cfg: CaptureParams) -> tuple[list[AnswerRow], int]:
    """The answers whose states are stored, and of how many they are a sample (0: of none).

    A sample has some of every length of each split and set, the longest among them.
    """
    rows = read_answers(phase.of("01_generate_data"))
    if cfg.states == "disk":
        return rows, 0
    groups: dict[tuple[str, str], list[AnswerRow]] = {}
    for row in sorted(rows, key=lambda r: -len(r.prompt_token_ids) - len(r.answer_token_ids)):
        groups.setdefault((row.set, row.split), []).append(row)
    return [r for group in groups.values() for r in _spread(group, PROOF_ROWS)], len(rows)


def _source(
    phase: Phase, cfg: CaptureParams, target: Target, slots: tuple[int, ...], longest: int
) -> StateSource:
    if cfg.source != "transformers":
        work = phase.log_file(cfg.source).parent
        # One more than the longest row: the engine must answer a token to it.
        flags = ("--trust-remote-code",) if cfg.trust_remote_code else ()
        return (FromVllm if cfg.source == "vllm" else FromSglang)(
            target,
            slots,
            cfg.dtype,
            work,
            longest + 1,
            extra_flags=flags,
            settings=cfg.engine_settings,
            say=phase.note,
        )
    device = best_device(cfg.device)
    return InProcess(target, slots, cfg.dtype, cfg.batch_tokens, device, cfg.trust_remote_code)


def prove_states(
    store: StateStore, phase: Phase, cfg: CaptureParams, target: Target
) -> tuple[pd.DataFrame, list[Finding]]:
    """A table of the shards' facts, and every finding on the states: what they hold, whose they
    are, and (where the target fits into this machine's memory) which layers they are."""
    rows, _ = _wanted_rows(phase, cfg)
    facts = gather_facts(store, rows, TargetHead(target), floor=cfg.min_teacher_agreement)
    findings = check_states(facts, cfg.min_teacher_agreement, greedy=was_greedy(phase))
    findings += _layer_findings(store, cfg, target)
    table = pd.DataFrame(
        [
            {
                "shard": s.shard,
                "conversations": s.rows,
                "tokens": s.tokens,
                "not finite": s.not_finite,
                "zero": s.zero,
                "damaged": len(s.damaged),
                "std": s.std,
                "agree": s.agree,
                "answer tokens": s.answer_tokens,
            }
            for s in facts.shards
        ]
    )
    return table, by_severity(findings)


def _layer_findings(store: StateStore, cfg: CaptureParams, target: Target) -> list[Finding]:
    weights = sum(f.stat().st_size for f in weight_files(target.folder))
    free = int(describe_machine(target.folder)["memory_available_bytes"])
    # Unpacked INT4 is four times its files; the rest is loaded as it is.
    if weights * (4 if "quantization_config" in target.config else 1) > 0.8 * free:
        return [
            Finding(
                "state-layers-unproven",
                "warning",
                "the layer check was left out: the target does not fit into memory here",
                f"{weights / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB free",
                "trust the teacher's agreement; check layers on a small target of this family",
                "states",
            )
        ]
    text = text_entries(store, store.entries, target.media_ids)
    if not text:
        return [
            Finding(
                "state-layers-unproven",
                "warning",
                "the layer check was left out: every conversation shows images",
                "it runs the text model alone",
                "trust the teacher's agreement, or add a few prompts without images",
                "states",
            )
        ]
    model = load_target(target, cfg.dtype, trust_remote_code=cfg.trust_remote_code)
    matches = match_slots(store, model, _spread(text, LAYER_CHECK_ROWS))
    return check_layers(matches, target.num_layers)


def agreement_table(store: StateStore, target: Target, most_rows: int = 60) -> pd.DataFrame:
    """How often lm_head(norm(state)) gives the next served token: for the pre-norm last state,
    which must be near 100 % on greedy answers, and for two wrong states that a bug would store
    instead."""
    head = TargetHead(target)
    kinds = {
        "last, pre-norm (stored)": [0, 0],
        "last, already normed": [0, 0],
        "highest slot": [0, 0],
    }
    for row in store.rows(_spread(store.entries, most_rows)):
        last = row.last.float()
        slot = row.slots[:, -last.shape[1] :].float()
        for name, states in zip(kinds, (last, head.normed(last), slot), strict=True):
            right, total = teacher_agreement(head, row.token_ids, states, row.entry.prompt_tokens)
            kinds[name][0] += right
            kinds[name][1] += total
    return pd.DataFrame(
        [
            {"state": k, "agree": r, "answer tokens": t, "share": r / max(t, 1)}
            for k, (r, t) in kinds.items()
        ]
    )


def _spread(items: list[Any], most: int) -> list[Any]:
    return items[:: max(1, len(items) // most)][:most]


def was_greedy(phase: Phase) -> bool:
    """Whether all answers of phase 01 are the target's own, asked for greedily."""
    params = read_json(phase.of("01_generate_data") / "manifest.json")["inputs"]["params"]
    return bool(params["temperature"] == 0 and not params.get("answers"))
