"""A Kimi-shaped target, replayed at small scale: each step of a pipeline for Kimi-K2.5, in minutes.

    python -m eagle3lib.diagnose.kimi_bench WORK target --rows ANSWERS.jsonl --seconds 150
    python -m eagle3lib.diagnose.kimi_bench WORK answers train serve compare

Each step reads what the one before left in WORK, leaves a ``STEP.json`` when it is whole, and is
skipped when that is there. On one GPU, with engines in environments of their own
(``EAGLE3_VLLM_PYTHON``, ``EAGLE3_SGLANG_PYTHON``).

    target    a small target learns the given answers (``training/small_target.py``); its folder in
              Kimi-K2.5's form, and one with INT4 experts
    answers   the INT4 target, served by vLLM, answers the prompts of those rows itself
    train     states of these answers; a Llama-type and an MLA-type drafter, at the same time
    serve     both drafters in every engine, all servers up at once, held-out prompts one by one
    compare   the engines' rounds beside the simulator's, in ``compare.json``
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.prompts import Prompt
from eagle3lib.data.rows import AnswerRow, json_line, read_answers
from eagle3lib.data.turns import Sampling
from eagle3lib.diagnose.live import StatesOf
from eagle3lib.diagnose.replay import compare_counts, replay_answers
from eagle3lib.drafter.checkpoint import write_drafter
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.engine.client import Client
from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, replace_folder, write_atomic, write_json
from eagle3lib.lab.params import BenchmarkParams, TrainParams
from eagle3lib.measure.arms import RequestRow
from eagle3lib.measure.ask import Asker
from eagle3lib.measure.points import Point
from eagle3lib.target.capture import InProcess, capture, forward_states
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.int4 import KIMI_IGNORES, pack_int4
from eagle3lib.target.kimi_shaped import Size, new_text_tower, save_kimi_shaped
from eagle3lib.target.model import DTYPES, best_device, load_target
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.small_target import TargetTraining, train_small_target
from eagle3lib.training.start import trained_drafter

Kind = Literal["llama", "mla"]
KINDS: tuple[Kind, ...] = ("llama", "mla")
# Several engines on one GPU: each is told its cache, none measures what the others left free.
ENGINE_FLAGS: dict[str, tuple[str, ...]] = {
    "vllm": ("--language-model-only", "--kv-cache-memory-bytes", str(2 * 2**30)),
    "sglang": ("--skip-server-warmup", "--mm-attention-backend", "sdpa",
               "--max-total-tokens", "65536"),
}  # fmt: skip
_TRAIN_DEADLINE_S = 900.0
_MODEL_LEN = 1024  # tokens of prompt and answer, as served
_SIZE, _TRAINING = Size(), TargetTraining(150.0)
_DRAFTER = TrainParams(epochs=6, steps=5, batch_tokens=16_000, checkpoint_every=3)


@dataclass(frozen=True)
class Bench:
    """What a replay is made of; the defaults are those of one H200."""

    work: Path
    rows: Path | None = None
    of: str = "smollm2-135m-instruct"  # whose tokenizer, template and answers
    size: Size = _SIZE
    training: TargetTraining = _TRAINING
    int4: bool = True
    dtype: str = "bfloat16"
    prompts: int = 3000
    heldout: int = 16
    max_new_tokens: int = 128
    concurrency: int = 128
    draft_vocab_size: int = 8192
    steps: int = 3  # K
    drafter: TrainParams = _DRAFTER
    engines: tuple[str, ...] = ("vllm", "sglang")
    kinds: tuple[Kind | None, ...] = (None, *KINDS)  # arms of each engine; None: without a drafter
    flags: dict[str, tuple[str, ...]] = field(default_factory=lambda: ENGINE_FLAGS)
    fallback: bool = True  # an engine that does not start is tried with other settings
    starts_at_once: int = 6

    @property
    def folder(self) -> Path:
        """The target that is served."""
        return self.work / ("target-int4" if self.int4 else "target")

    def served(self) -> Target:
        return open_target(str(self.folder))

    def engine(self, engine: str, drafter: Path | None, most: int = 8) -> EngineConfig:
        sglang = engine == "sglang"
        return EngineConfig(
            self.folder,
            self.dtype,
            max_model_len=min(_MODEL_LEN, self.size.positions),
            max_num_seqs=most,
            drafter=drafter,
            num_speculative_tokens=self.steps,
            engine="sglang" if sglang else "vllm",
            attention_backend="triton" if sglang else None,
            trust_remote_code=True,
            memory_share=0.5 if sglang else None,
            extra_flags=self.flags.get(engine, ()),
        )


def make_target(b: Bench) -> dict[str, Any]:
    """Step ``target``."""
    if b.rows is None or not b.rows.exists():
        raise UserError("no answers to learn from", expected="--rows answers.jsonl of phase 01")
    rows = [AnswerRow(**row) for row in read_jsonl(b.rows)]
    of, device = open_target(b.of), best_device()
    model = new_text_tower(b.size, of)
    found = train_small_target(model, rows, b.training, device)
    save_kimi_shaped(model.cpu(), b.size, of, b.work / "target", DTYPES[b.dtype])

    def pack(folder: Path) -> None:
        pack_int4(b.work / "target", folder, ".experts.", KIMI_IGNORES)

    replace_folder(b.work / "target-int4", pack)
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "size": asdict(b.size), "training": found, "device": device}


def make_answers(b: Bench) -> dict[str, Any]:
    """Step ``answers``: the target's own, and the share of them that ended by themselves."""
    if b.rows is None or not b.rows.exists():
        raise UserError("no prompts to ask", expected="--rows answers.jsonl of phase 01")
    rows = [AnswerRow(**row) for row in read_jsonl(b.rows)]
    first = {
        r.id: Prompt(r.id, tuple(r.messages), "workload") for r in rows if not r.repeat + r.turn
    }
    held = [p for p in first.values() if p.split == "heldout"][: 2 * b.heldout]
    asked = held + [p for p in first.values() if p.split == "train"][: b.prompts]
    target = b.served()
    sampling = Sampling(b.max_new_tokens, 0.0, train_on_cut=True, stop_ids=tuple(target.stop_ids()))
    config, log = b.engine("vllm", None, b.concurrency), b.work / "answers.log"
    with EngineServer(config, log, fallback=b.fallback) as server:
        started = time.perf_counter()
        made = generate_answers(
            asked, Client(server.url), b.work / "answers", sampling, concurrency=b.concurrency,
            max_reject_share=0.5, target_fingerprint=target.fingerprint,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        ready_s = server.ready_after_s
    tokens = sum(len(r.answer_token_ids) for r in made)
    return {"answers": len(made), "tokens": tokens, "tokens_per_s": round(tokens / seconds),
            "stopped": sum(r.finish_reason == "stop" for r in made),
            "looping": sum(r.looping for r in made), "ready_s": ready_s}  # fmt: skip


def train_drafters(b: Bench) -> dict[str, Any]:
    """Step ``train``: one capture, both trainings beside each other, two exported folders."""
    target, rows = b.served(), [r for r in read_answers(b.work / "answers") if not r.looping]
    slots, device = default_slots(target.num_layers), best_device()
    states = capture(
        target, rows, b.work / "states", slots=slots, dtype=b.dtype, batch_tokens=16_384,
        shard_rows=256, source=InProcess(target, slots, b.dtype, 16_384, device),
    )  # fmt: skip
    trained = [r.answer_token_ids for r in rows if r.trained]
    size = min(b.draft_vocab_size, target.vocab_size)
    vocab = build_vocab_map(count_tokens(trained), target.vocab_size, size, target.stop_ids())
    vocab.save(b.work / "vocab_map.safetensors")
    with ThreadPoolExecutor(len(KINDS)) as pool:
        found = dict(zip(KINDS, pool.map(lambda kind: _train(b, kind), KINDS), strict=True))
    for kind in KINDS:
        drafter = trained_drafter(b.work / kind / "checkpoints" / "best", target)

        def build(folder: Path, drafter: Any = drafter) -> None:
            write_drafter(folder, drafter, DTYPES[b.dtype], target.config)

        replace_folder(b.work / f"drafter-{kind}", build)
    return {"states": asdict(states), "answer_tokens": sum(map(len, trained)), "slots": slots,
            "drafters": found}  # fmt: skip


def _train(b: Bench, kind: Kind) -> dict[str, Any]:
    folder = b.work / kind
    changes = {"target": str(b.folder), "drafter_kind": kind, "num_speculative_tokens": b.steps}
    params = b.drafter.model_copy(update=changes)
    job = {"params": params.model_dump(mode="json"), "threads": 4 if best_device() != "cpu" else 1,
           "phase": str(folder), "states": str(b.work / "states"),
           "vocab": str(b.work / "vocab_map.safetensors")}  # fmt: skip
    write_json(folder / "job.json", job)
    command = [sys.executable, "-m", "eagle3lib.training", str(folder / "job.json")]
    with Child(command, log=folder / "training.log") as child:
        code = child.wait(_TRAIN_DEADLINE_S)
        if code:
            raise UserError(f"training died ({code}): {child.last_lines()}", where=child.log)
    lines = read_jsonl(Folders(folder, folder, folder).metrics)
    updates = [line for line in lines if line["kind"] == "train"]
    judged = [line for line in lines if line["kind"] == "evaluation"][-1]
    return {"updates": len(updates), "seconds": updates[-1]["seconds"], "heldout": judged["sets"],
            "tokens_per_s": updates[-1]["tokens_per_s"]}  # fmt: skip


def serve_all(b: Bench) -> dict[str, Any]:
    """Step ``serve``: all servers start at once and are asked in turn, so that none is timed beside
    another's work; an arm that does not start is told, not died of."""
    arms = [Arm(e, kind) for e in b.engines for kind in b.kinds]
    held = [r for r in read_answers(b.work / "answers") if r.split == "heldout"][: b.heldout]
    rows: list[RequestRow] = []
    told: dict[str, Any] = {}
    with contextlib.ExitStack() as opened, ThreadPoolExecutor(b.starts_at_once) as pool:
        for arm, server in zip(arms, pool.map(lambda arm: _start(b, arm), arms), strict=True):
            if isinstance(server, str):
                told[arm.name] = {"failed": server}
                continue
            opened.callback(server.stop)
            told[arm.name] = {"version": server.version, "ready_s": server.ready_after_s,
                              "attempts": server.attempts}  # fmt: skip
            arm.server = server
        for arm in (arm for arm in arms if arm.server):
            made = _ask(b, arm, held)
            rows += made
            seconds = sum(r.duration_s for r in made)
            tokens = sum(len(r.answer_token_ids) for r in made)
            told[arm.name] |= {"tokens": tokens, "tokens_per_s": round(tokens / seconds, 1)}

    def write(path: Path) -> None:
        path.write_bytes(b"".join(json_line(asdict(row)) for row in rows))

    write_atomic(b.work / "requests.jsonl", write)
    return told


@dataclass
class Arm:
    engine: str
    kind: Kind | None
    server: EngineServer | None = None

    @property
    def name(self) -> str:
        return f"{self.engine} {self.kind or 'alone'}"


def _start(b: Bench, arm: Arm) -> EngineServer | str:
    drafter = b.work / f"drafter-{arm.kind}" if arm.kind else None
    log = b.work / f"{arm.name.replace(' ', '-')}.log"
    try:
        return EngineServer(b.engine(arm.engine, drafter), log, fallback=b.fallback).start()
    except UserError as error:
        return str(error)[-1500:]


def _ask(b: Bench, arm: Arm, held: list[AnswerRow]) -> list[RequestRow]:
    assert arm.server is not None
    cfg = BenchmarkParams(max_new_tokens=b.max_new_tokens, num_speculative_tokens=b.steps)
    asker, point = Asker(cfg, b.folder, arm.engine, b.steps), Point(arm.engine, b.steps)
    asker.row(arm.server, arm.name, held[0], point, 0, 0)  # what is compiled at first use
    made = (asker.row(arm.server, arm.name, row, point, 0, 0) for row in held)
    return [_with_rounds(row, b.steps) for row in made]


def _with_rounds(row: RequestRow, steps: int) -> RequestRow:
    """Rounds out of the chunks of a lone request, where the engine keeps no record of them."""
    if row.accepted is not None or row.counts is None:
        return row
    accepted = [n - 1 for n in row.chunk_tokens[1:]]
    return replace(row, accepted=accepted, drafted=[steps] * len(accepted))


def compare_all(b: Bench) -> dict[str, Any]:
    """Step ``compare``: each arm's rounds beside the simulator's along its own answers."""
    rows = [RequestRow(**row) for row in read_jsonl(b.work / "requests.jsonl")]
    target, out = b.served(), {}
    states_of = _states_on(target, b.dtype, best_device())
    for engine in b.engines:
        alone = Arm(engine, None).name
        plain = {r.prompt: r.answer_token_ids for r in rows if r.arm == alone}
        for kind in KINDS:
            name = Arm(engine, kind).name
            told = [r for r in rows if r.arm == name and r.accepted is not None]
            if told:
                answers = replay_answers(
                    told, target, b.work / f"drafter-{kind}", dtype=b.dtype, steps=b.steps,
                    plain=plain, states_of=states_of,
                )  # fmt: skip
                out[name] = compare_counts(answers, b.steps, b.dtype)
                out[name]["engine_counts"] = _summed(told)
    return out


def summary_rows(b: Bench) -> list[dict[str, Any]]:
    """One line an arm: what the engine counted beside the simulator, and its speed beside the
    engine alone."""
    served, compared = (read_json(b.work / f"{name}.json") for name in ("serve", "compare"))
    lines = []
    for engine in b.engines:
        alone = served.get(Arm(engine, None).name, {}).get("tokens_per_s")
        for kind in b.kinds:
            name = Arm(engine, kind).name
            told, speed = compared.get(name), served[name].get("tokens_per_s")
            line = {"arm": name, "version": served[name].get("version"), "tokens_per_s": speed,
                    "speed_up": round(speed / alone, 2) if speed and alone else None}  # fmt: skip
            if told:
                line |= {side: told[side]["acceptance_length"] for side in ("engine", "simulator")}
                line |= {
                    k: told[k] for k in ("rounds_equal", "rounds_compared", "largest_parted_gap")
                }
            lines.append(line | {"failed": served[name].get("failed")})
    return lines


def _summed(rows: list[RequestRow]) -> dict[str, int]:
    """The engine's own counters of these requests, beside the rounds read from chunks."""
    told = [r.counts for r in rows if r.counts]
    return {key: sum(c[key] for c in told) for key in ("rounds", "accepted")}


def _states_on(target: Target, dtype: str, device: str) -> StatesOf:
    model = load_target(target, dtype, device)
    return lambda ids, slots: forward_states(model, [ids], slots)[0]


STEPS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "target": make_target, "answers": make_answers, "train": train_drafters, "serve": serve_all,
    "compare": compare_all,
}  # fmt: skip


def run_step(b: Bench, name: str) -> dict[str, Any]:
    """What step ``name`` tells, from its file when it was done before."""
    done = b.work / f"{name}.json"
    if not done.exists():
        started = time.monotonic()
        told = STEPS[name](b)
        write_json(done, told | {"step_s": round(time.monotonic() - started, 1)})
    return read_json(done)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("work", type=Path)
    parser.add_argument("steps", nargs="+", choices=list(STEPS))
    parser.add_argument("--rows", type=Path, help="answers.jsonl of phase 01")
    parser.add_argument("--seconds", type=float, default=150.0, help="to train the target")
    parser.add_argument("--prompts", type=int, default=3000, help="prompts the target answers")
    parser.add_argument("--engines", default="vllm,sglang")
    parser.add_argument("--bf16", action="store_true", help="serve the target before packing")
    parser.add_argument("--flag", action="append", default=[], help="ENGINE=FLAG, added to it")
    told = parser.parse_args()
    flags = {e: (*f, *_flags_for(e, told.flag)) for e, f in ENGINE_FLAGS.items()}
    bench = Bench(
        told.work, told.rows, training=TargetTraining(told.seconds), prompts=told.prompts,
        engines=tuple(told.engines.split(",")), int4=not told.bf16, flags=flags,
    )  # fmt: skip
    told.work.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    try:
        for name in told.steps:
            print(f"{name}: {run_step(bench, name)}", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def _flags_for(engine: str, words: list[str]) -> list[str]:
    return [w.split("=", 1)[1] for w in words if w.startswith(f"{engine}=")]


if __name__ == "__main__":
    sys.exit(main())
