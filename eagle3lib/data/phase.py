"""Phase 01: from prompt files to answered rows, as its notebook runs it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.given import (
    GivenAnswers,
    TakenAnswers,
    check_refused,
    take_given,
    write_given,
)
from eagle3lib.data.near import drop_near_duplicates
from eagle3lib.data.prompts import Prompt, PromptFile, Reject, read_source, write_read_rejects
from eagle3lib.data.renderer import target_renderer
from eagle3lib.data.rows import (
    REASONING_KINDS,
    RENDERED,
    TOKEN_IDS_FROM,
    AnswerRow,
    read_answers,
    read_rejects,
)
from eagle3lib.data.template import load_chat_template, stop_ids_of
from eagle3lib.data.turns import Conversation, Sampling
from eagle3lib.engine.client import Client
from eagle3lib.engine.launch import EngineConfig, EngineServer
from eagle3lib.engine.pool import Pool
from eagle3lib.engine.settings import with_settings
from eagle3lib.lab.files import read_jsonl
from eagle3lib.lab.params import GenerateParams
from eagle3lib.lab.run import Phase


@dataclass(frozen=True)
class PromptSets:
    """``train`` in the order in which they are asked; ``heldout`` as many as the parameters say."""

    train: list[Prompt]
    heldout: list[Prompt]
    rejects: list[Reject]
    notes: tuple[str, ...] = ()  # one line a file: its format, its rows, what was left out
    given: GivenAnswers | None = None  # answers to ``train`` that are not the target's own

    def table(self) -> pd.DataFrame:
        counts = Counter((p.set, p.split) for p in self.train + self.heldout)
        return pd.DataFrame(
            [{"set": s, "split": k, "prompts": n} for (s, k), n in sorted(counts.items())]
        )


def load_prompt_sets(cfg: GenerateParams, folder: Path | None = None) -> PromptSets:
    """Training prompts come from the workload alone; the general set is only ever held out. Where
    ``answers`` are given, the training side is theirs, and the workload is only held out as well.

    What was left out goes to ``rejects.jsonl`` in ``folder``. Raises ``UserError`` when the rows
    of a file that are not usable pass ``max_reject_share``.
    """
    sources = {"workload": cfg.workload} | ({"general": cfg.general} if cfg.heldout_general else {})
    files = [
        read_source(source, name, cfg.prompt_format, cfg.max_prompt_chars)
        for name, source in sources.items()
    ]
    if cfg.answers:
        # A given answer is no duplicate of a prompt that is not trained on.
        files = [replace(f, prompts=[p for p in f.prompts if p.split == "heldout"]) for f in files]
        files.append(
            read_source(
                cfg.answers, "workload", cfg.prompt_format, cfg.max_prompt_chars, answered=True
            )
        )
    files = drop_near_duplicates(files, cfg.near_duplicate_similarity)
    rejects = [reject for file in files for reject in file.rejects]
    where = write_read_rejects(folder, rejects) if folder else ""
    for file in files:
        file.check(cfg.max_reject_share, where)
    notes = tuple(file.summary() for file in files)
    by_id = [sorted(file.prompts, key=lambda p: p.id) for file in files]  # the file's order is none
    given = _given_of(files.pop(), by_id.pop()) if cfg.answers else None
    known = {p.id for p in by_id[0]}
    heldout = [[p for p in part if p.split == "heldout"] for part in by_id]
    others = [p for part in heldout[1:] for p in part if p.id not in known]
    return PromptSets(
        train=given.prompts if given else [p for p in by_id[0] if p.split == "train"],
        heldout=heldout[0][: cfg.heldout_workload] + others[: cfg.heldout_general],
        rejects=rejects,
        notes=notes,
        given=given,
    )


def _given_of(file: PromptFile, by_id: list[Prompt]) -> GivenAnswers:
    train = [p for p in by_id if p.split == "train"]
    return GivenAnswers(train, file.answers, file.places, held_out=len(by_id) - len(train))


# Our own engine does not come back once it is dead; others may be started again by someone.
_OWN_GIVE_UP_S, _OTHERS_GIVE_UP_S = 20.0, 300.0


@contextlib.contextmanager
def target_server(
    cfg: GenerateParams, target: Path, log: Path, say: Callable[[str], None] = print
) -> Iterator[Pool]:
    """The servers that answer: those at ``cfg.server``, or a vLLM of our own for as long as
    needed."""
    if cfg.servers():
        renderer = target_renderer(target, trust_remote_code=cfg.trust_remote_code)
        clients = [Client(u, timeout_s=cfg.timeout_s, renderer=renderer) for u in cfg.servers()]
        yield Pool(clients, give_up_s=_OTHERS_GIVE_UP_S)
        return
    trusted = cfg.trust_remote_code
    engine = EngineConfig(
        target,
        cfg.dtype,
        cfg.max_model_len,
        max_num_seqs=cfg.concurrency,
        engine=cfg.engine,
        trust_remote_code=trusted,
    )
    engine = with_settings(engine, cfg.engine_settings, "01_generate_data.engine_settings")
    # SGLang's chat API tells no token ids: the prompt is rendered here.
    needed = cfg.engine == "sglang"
    renderer = target_renderer(target, trust_remote_code=trusted) if needed else None
    with EngineServer(engine, log=log, say=say) as server:
        client = Client(server.url, timeout_s=cfg.timeout_s, renderer=renderer)
        yield Pool([client], give_up_s=_OWN_GIVE_UP_S)


def answer_all(phase: Phase, cfg: GenerateParams, sets: PromptSets, target: Path) -> dict[str, Any]:
    """Answer held-out prompts, then training prompts until enough tokens are there; show
    progress. Where answers are given, those are trained on, and only held-out prompts asked."""
    options = _options(phase, cfg, stop_ids_of(target))
    if not options["sampling"].stop_ids:
        phase.note(
            "the target's files name no stop token (eos_token_id): a missing one is not seen"
        )
    taken = _take_given(phase, cfg, sets, target)
    rejects = sets.rejects + (taken.rejects if taken else [])
    before = read_answers(phase.folder)
    started = time.perf_counter()
    with target_server(cfg, target, phase.log_file(cfg.engine), phase.note) as servers:
        ready_s = time.perf_counter() - started
        made = _answer_heldout(phase, sets, servers, before, options)
        if not taken:
            made += _answer_training(phase, cfg, sets, servers, before, options)
    asking_s = time.perf_counter() - started - ready_s
    rows = read_answers(phase.folder)
    return {
        "prompt_files": list(sets.notes),
        **describe_answers(rows, rejects, read_rejects(phase.folder)),
        **(_describe_given(cfg, sets.given, taken) if taken and sets.given else {}),
        "surplus_answers": len(read_jsonl(phase.folder / "surplus.jsonl")),
        "server_ready_s": round(ready_s, 1),
        "tokens_per_s": round(made / asking_s, 1) if made else None,
    }


def _take_given(
    phase: Phase, cfg: GenerateParams, sets: PromptSets, target: Path
) -> TakenAnswers | None:
    """Render the given answers and write their rows; those refused go beside the other rejects."""
    if sets.given is None:
        return None
    phase.note(
        f"training on the answers of {cfg.answers}: they are not the target's own, so how much of "
        "them it would have said is unknown; held-out prompts are answered by the target"
    )
    template = load_chat_template(
        target, stop_ids_of(target), trust_remote_code=cfg.trust_remote_code
    )
    taken = take_given(
        sets.given,
        template,
        want_tokens=cfg.answer_tokens,
        thinking=cfg.thinking,
        target_fingerprint=phase.inputs["target"],
    )
    where = write_read_rejects(phase.folder, sets.rejects + taken.rejects)
    check_refused(taken, cfg.max_reject_share, where)
    write_given(phase.folder, taken.rows)
    return taken


def _describe_given(
    cfg: GenerateParams, given: GivenAnswers, taken: TakenAnswers
) -> dict[str, Any]:
    return {
        "given_answers": {
            "source": cfg.answers,
            "on_policy": "unknown: these are not the target's own answers",
            "conversations": taken.conversations,
            "rows": len(taken.rows),
            "refused_turns": len(taken.rejects),
            "held_out_conversations_left_out": given.held_out,
            "conversations_beyond_answer_tokens": taken.not_needed,
        }
    }


class _Announcer:
    """Says once for each server where its rows' ids come from."""

    def __init__(self, phase: Phase):
        self._phase = phase
        self._said: set[tuple[str, str]] = set()

    def hear(self, row: AnswerRow) -> None:
        key = row.server, row.token_ids_from
        if key in self._said:
            return
        self._said.add(key)
        if row.token_ids_from == RENDERED:
            self._phase.note(
                f"{row.server} tells no token ids: they are rendered by the target's template and "
                "checked against its text (vLLM and SGLang tell them)"
            )
        elif (row.server, RENDERED) in self._said:
            self._phase.note(f"{row.server} tells token ids now")


def _answer_heldout(
    phase: Phase,
    sets: PromptSets,
    servers: Pool,
    before: list[AnswerRow],
    options: dict[str, Any],
) -> int:
    """Tokens that were made now."""
    made: list[int] = []
    announcer = _Announcer(phase)
    total = sum(Conversation(prompt).turns for prompt in sets.heldout)
    held = sum(row.split == "heldout" for row in before)
    with phase.progress(total, "answers", "held-out prompts", held) as bar:

        def on_answer(row: AnswerRow) -> None:
            made.append(len(row.answer_token_ids))
            announcer.hear(row)
            bar.update(1)

        generate_answers(sets.heldout, servers, phase.folder, **options, on_answer=on_answer)
    return sum(made)


def _answer_training(
    phase: Phase,
    cfg: GenerateParams,
    sets: PromptSets,
    servers: Pool,
    before: list[AnswerRow],
    options: dict[str, Any],
) -> int:
    """Tokens that were made now, those that turn out to be surplus among them."""
    made: list[int] = []
    trained = sum(row.usable_tokens for row in before if row.split == "train")
    with phase.progress(cfg.answer_tokens, "tokens", "training answers", trained) as bar:

        def on_answer(row: AnswerRow) -> None:
            made.append(len(row.answer_token_ids))
            bar.update(row.usable_tokens)

        generate_answers(
            sets.train,
            servers,
            phase.folder,
            **options,
            want_tokens=cfg.answer_tokens,
            answers_per_prompt=cfg.answers_per_prompt,
            on_answer=on_answer,
        )
    return sum(made)


def _options(phase: Phase, cfg: GenerateParams, stop_ids: tuple[int, ...]) -> dict[str, Any]:
    return {
        "sampling": Sampling(
            cfg.max_new_tokens,
            cfg.temperature,
            cfg.thinking,
            cfg.thinking_share,
            cfg.train_on_cut,
            cfg.train_before_loop,
            stop_ids,
        ),
        "concurrency": cfg.concurrency,
        "max_reject_share": cfg.max_reject_share,
        "target_fingerprint": phase.inputs["target"],
    }


def describe_answers(
    rows: list[AnswerRow], skipped: list[Reject], refused: list[dict[str, str]]
) -> dict[str, Any]:
    """Counts of what was answered, what is trained on, and what was left out, by reason."""
    return {
        "answers": len(rows),
        "answer_tokens": {
            f"{s}_{k}": sum(len(r.answer_token_ids) for r in rows if (r.set, r.split) == (s, k))
            for s, k in sorted({(r.set, r.split) for r in rows})
        },
        "prompt_tokens": sum(len(r.prompt_token_ids) for r in rows),
        "trained_answers": sum(r.trained for r in rows),
        "trained_tokens": sum(len(r.answer_token_ids) for r in rows if r.trained),
        "finish_reasons": dict(Counter(r.finish_reason for r in rows)),
        "looping_answers": sum(r.looping for r in rows),
        "cut_before_loop": sum(r.loop_tokens > 0 for r in rows),
        "cut_answers": sum(r.finish_reason == "length" for r in rows),
        "kept_apart": dict(Counter(r.kept_apart for r in rows if r.kept_apart)),
        "token_ids_from": {k: sum(r.token_ids_from == k for r in rows) for k in TOKEN_IDS_FROM},
        "reasoning": {k: sum(r.reasoning_kind == k for r in rows) for k in REASONING_KINDS},
        "thinking": dict(Counter(r.sampling.get("thinking", "default") for r in rows)),
        "servers": dict(
            Counter(f"{r.server} ({r.engine or 'version unknown'})" for r in rows if r.server)
        ),
        "left_out": dict(Counter([r.reason for r in skipped] + [r["reason"] for r in refused])),
    }
