"""Phase 01: from prompt files to answered rows, as its notebook runs it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.near import drop_near_duplicates
from eagle3lib.data.prompts import Prompt, Reject, read_source, write_read_rejects
from eagle3lib.data.rows import REASONING_KINDS, AnswerRow, read_answers, read_rejects
from eagle3lib.data.turns import Conversation, Sampling
from eagle3lib.engine.client import Client
from eagle3lib.engine.launch import EngineConfig, EngineServer
from eagle3lib.engine.pool import Pool
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

    def table(self) -> pd.DataFrame:
        counts = Counter((p.set, p.split) for p in self.train + self.heldout)
        return pd.DataFrame(
            [{"set": s, "split": k, "prompts": n} for (s, k), n in sorted(counts.items())]
        )


def load_prompt_sets(cfg: GenerateParams, folder: Path | None = None) -> PromptSets:
    """Training prompts come from the workload alone; the general set is only ever held out.

    What was left out goes to ``rejects.jsonl`` in ``folder``. Raises ``UserError`` when the rows
    of a file that are not usable pass ``max_reject_share``.
    """
    sources = {"workload": cfg.workload} | ({"general": cfg.general} if cfg.heldout_general else {})
    files = [
        read_source(source, name, cfg.prompt_format, cfg.max_prompt_chars)
        for name, source in sources.items()
    ]
    files = drop_near_duplicates(files, cfg.near_duplicate_similarity)
    rejects = [reject for file in files for reject in file.rejects]
    where = write_read_rejects(folder, rejects) if folder else ""
    for file in files:
        file.check(cfg.max_reject_share, where)
    by_id = [sorted(file.prompts, key=lambda p: p.id) for file in files]  # the file's order is none
    known = {p.id for p in by_id[0]}
    heldout = [[p for p in part if p.split == "heldout"] for part in by_id]
    others = [p for part in heldout[1:] for p in part if p.id not in known]
    return PromptSets(
        train=[p for p in by_id[0] if p.split == "train"],
        heldout=heldout[0][: cfg.heldout_workload] + others[: cfg.heldout_general],
        rejects=rejects,
        notes=tuple(file.summary() for file in files),
    )


# Our own engine does not come back once it is dead; others may be started again by someone.
_OWN_GIVE_UP_S, _OTHERS_GIVE_UP_S = 20.0, 300.0


@contextlib.contextmanager
def target_server(
    cfg: GenerateParams, target: Path, log: Path, say: Callable[[str], None] = print
) -> Iterator[Pool]:
    """The servers that answer: those at ``cfg.server``, or a vLLM of our own for as long as
    needed."""
    if cfg.servers():
        clients = [Client(url, timeout_s=cfg.timeout_s) for url in cfg.servers()]
        yield Pool(clients, give_up_s=_OTHERS_GIVE_UP_S)
        return
    engine = EngineConfig(target, cfg.dtype, cfg.max_model_len, max_num_seqs=cfg.concurrency)
    with EngineServer(engine, log=log, say=say) as server:
        yield Pool([Client(server.url, timeout_s=cfg.timeout_s)], give_up_s=_OWN_GIVE_UP_S)


def answer_all(phase: Phase, cfg: GenerateParams, sets: PromptSets, target: Path) -> dict[str, Any]:
    """Answer held-out prompts, then training prompts until enough tokens are there; show
    progress."""
    before = read_answers(phase.folder)
    started = time.perf_counter()
    with target_server(cfg, target, phase.log_file("vllm"), phase.note) as servers:
        ready_s = time.perf_counter() - started
        made = _answer_heldout(phase, cfg, sets, servers, before)
        made += _answer_training(phase, cfg, sets, servers, before)
    asking_s = time.perf_counter() - started - ready_s
    rows = read_answers(phase.folder)
    return {
        "prompt_files": list(sets.notes),
        **describe_answers(
            rows,
            sets.rejects,
            read_rejects(phase.folder),
        ),
        "surplus_answers": len(read_jsonl(phase.folder / "surplus.jsonl")),
        "server_ready_s": round(ready_s, 1),
        "tokens_per_s": round(made / asking_s, 1) if made else None,
    }


def _answer_heldout(
    phase: Phase, cfg: GenerateParams, sets: PromptSets, servers: Pool, before: list[AnswerRow]
) -> int:
    """Tokens that were made now."""
    made: list[int] = []
    total = sum(Conversation(prompt).turns for prompt in sets.heldout)
    held = sum(row.split == "heldout" for row in before)
    with phase.progress(total, "answers", "held-out prompts", held) as bar:

        def on_answer(row: AnswerRow) -> None:
            made.append(len(row.answer_token_ids))
            bar.update(1)

        options = _options(phase, cfg)
        generate_answers(sets.heldout, servers, phase.folder, **options, on_answer=on_answer)
    return sum(made)


def _answer_training(
    phase: Phase, cfg: GenerateParams, sets: PromptSets, servers: Pool, before: list[AnswerRow]
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
            **_options(phase, cfg),
            want_tokens=cfg.answer_tokens,
            answers_per_prompt=cfg.answers_per_prompt,
            on_answer=on_answer,
        )
    return sum(made)


def _options(phase: Phase, cfg: GenerateParams) -> dict[str, Any]:
    return {
        "sampling": Sampling(
            cfg.max_new_tokens,
            cfg.temperature,
            cfg.thinking,
            cfg.thinking_share,
            cfg.train_on_cut,
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
        "cut_answers": sum(r.finish_reason == "length" for r in rows),
        "kept_apart": dict(Counter(r.kept_apart for r in rows if r.kept_apart)),
        "reasoning": {k: sum(r.reasoning_kind == k for r in rows) for k in REASONING_KINDS},
        "thinking": dict(Counter(r.sampling.get("thinking", "default") for r in rows)),
        "servers": dict(Counter(f"{r.server} ({r.engine or 'version unknown'})" for r in rows)),
        "left_out": dict(Counter([r.reason for r in skipped] + [r["reason"] for r in refused])),
    }
