"""A Kimi-shaped target, replayed at small scale: each step of a pipeline for Kimi-K2.5, in minutes.

    python -m eagle3lib.diagnose.kimi_bench WORK target --rows ANSWERS.jsonl --seconds 90
    python -m eagle3lib.diagnose.kimi_bench WORK answers train serve compare --rows ANSWERS.jsonl

Each step reads what the one before left in WORK, leaves a ``STEP.json`` when it is whole (serve and
compare one an engine), and is skipped when that is there; remove the file to make it anew. With
``--minutes`` a step that no longer fits is not begun: the same command goes on from there. On one
GPU, with engines in environments of their own (``EAGLE3_VLLM_PYTHON``, ``EAGLE3_SGLANG_PYTHON``).

    target    a small target learns the given answers (``training/small_target.py``); its folder in
              Kimi-K2.5's form, and one with INT4 experts
    answers   the INT4 target, served by an engine, answers the prompts of those rows itself
    train     states of these answers; a Llama-type and an MLA-type drafter, at the same time
    serve     both drafters in each engine, one engine after the other (``kimi_serve.py``)
    compare   the engines' rounds beside the simulator's
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3lib.data.generate import generate_answers
from eagle3lib.data.prompts import Prompt
from eagle3lib.data.renderer import target_renderer
from eagle3lib.data.rows import AnswerRow, read_answers
from eagle3lib.data.turns import Sampling
from eagle3lib.diagnose.kimi_serve import Arm, failure, requests_file, serve_engine, server_of
from eagle3lib.diagnose.kimi_setting import ENGINE_FLAGS, KINDS, Bench, Kind, Told
from eagle3lib.diagnose.live import StatesOf
from eagle3lib.diagnose.replay import compare_counts, replay_answers
from eagle3lib.drafter.checkpoint import read_drafter, write_drafter
from eagle3lib.drafter.config import default_slots
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.engine.client import Client
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, read_jsonl, replace_folder, write_json
from eagle3lib.measure.arms import RequestRow
from eagle3lib.target.capture import InProcess, capture
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.forward import forward_states
from eagle3lib.target.int4 import KIMI_IGNORES, pack_int4
from eagle3lib.target.kimi_shaped import new_text_tower, save_kimi_shaped
from eagle3lib.target.model import DTYPES, TargetHead, best_device, load_target
from eagle3lib.training.checkpoints import Folders, has_checkpoint
from eagle3lib.training.small_target import TargetTraining, train_small_target
from eagle3lib.training.start import trained_drafter

# Seconds below which a step is not begun, the target's training apart.
_LEAST_S = {"target": 30.0, "answers": 110.0, "train": 120.0, "serve": 110.0, "compare": 20.0}
_STOPPING_S = 60.0  # from the clock's end to the end of a training's process


def make_target(b: Bench) -> dict[str, Any]:
    """Step ``target``."""
    if b.rows is None or not b.rows.exists():
        raise UserError("no answers to learn from", expected="--rows answers.jsonl of phase 01")
    if b.int4 and importlib.util.find_spec("compressed_tensors") is None:
        raise UserError(
            "compressed_tensors can't be imported here", expected="it reads the INT4 experts back",
            next="put the package (vLLM's environment has it) on this Python's path",
        )  # fmt: skip
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
    failed: dict[str, Told] = {}
    for engine in b.engines:
        try:
            with server_of(b, f"answers-{engine}", engine, None, b.concurrency) as server:
                told = _answered(b, asked, engine, server.url)
                ready_s = server.ready_after_s
        except UserError as error:
            failed[engine] = failure(error, b.work / f"answers-{engine}.log")
            print(f"{engine}: {failed[engine]['failed']}", flush=True)
        else:
            return told | {"engine": engine, "ready_s": ready_s, "failed": failed}
    write_json(b.work / "answers-failed.json", failed)
    raise UserError("no engine serves the target", where=b.work / "answers-failed.json",
                    expected=f"one of {', '.join(b.engines)}")  # fmt: skip


class _Late(Exception):
    pass


def _answered(b: Bench, asked: list[Prompt], engine: str, url: str) -> Told:
    """The held-out prompts come first, so what the clock leaves out is of the training ones."""
    target, began_s = b.served(), time.monotonic()
    sampling = Sampling(b.max_new_tokens, 0.0, train_on_cut=True, stop_ids=tuple(target.stop_ids()))
    renderer = target_renderer(b.folder, trust_remote_code=True) if engine == "sglang" else None
    by_the_clock = False

    def look(_: AnswerRow) -> None:
        if time.monotonic() - began_s > b.answer_s:
            raise _Late

    try:
        generate_answers(
            asked, Client(url, renderer=renderer), b.work / "answers", sampling,
            concurrency=b.concurrency, max_reject_share=0.5, on_answer=look,
            target_fingerprint=target.fingerprint,
        )  # fmt: skip
    except _Late:
        by_the_clock = True
    seconds, made = time.monotonic() - began_s, read_answers(b.work / "answers")
    tokens = sum(len(r.answer_token_ids) for r in made)
    return {"answers": len(made), "of": len(asked), "ended_by_the_clock": by_the_clock,
            "tokens": tokens, "tokens_per_s": round(tokens / seconds),
            "stopped": sum(r.finish_reason == "stop" for r in made),
            "looping": sum(r.looping for r in made)}  # fmt: skip


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
        found = dict(zip(KINDS, pool.map(lambda kind: _train_or_tell(b, kind), KINDS), strict=True))
    whole = [kind for kind in KINDS if "failed" not in found[kind]]
    if not whole:
        raise UserError(f"no drafter was trained: {found[KINDS[0]]['failed']}")
    for kind in whole:
        drafter = trained_drafter(_checkpoint(b, kind), target)

        def build(folder: Path, drafter: Any = drafter) -> None:
            write_drafter(folder, drafter, DTYPES[b.dtype], target.config)

        replace_folder(b.drafter_folder(kind), build)
    return {"states": asdict(states), "answer_tokens": sum(map(len, trained)), "slots": slots,
            "drafters": found}  # fmt: skip


def _train_or_tell(b: Bench, kind: Kind) -> Told:
    """The other kind is served without the one that failed."""
    try:
        return _train(b, kind)
    except UserError as error:
        print(f"{kind}: {error}", flush=True)
        return {"failed": str(error)}


def _train(b: Bench, kind: Kind) -> dict[str, Any]:
    folder = b.work / kind
    changes = {"target": str(b.folder), "drafter_kind": kind, "num_speculative_tokens": b.steps,
               "max_minutes": min(b.train_s, b.left_s()) / 60}  # fmt: skip
    params = b.drafter.model_copy(update=changes)
    job = {"params": params.model_dump(mode="json"), "threads": 4 if best_device() != "cpu" else 1,
           "phase": str(folder), "states": str(b.work / "states"),
           "vocab": str(b.work / "vocab_map.safetensors")}  # fmt: skip
    write_json(folder / "job.json", job)
    command = [sys.executable, "-m", "eagle3lib.training", str(folder / "job.json")]
    with Child(command, log=folder / "training.log") as child:
        try:
            code = child.wait(b.train_s + _STOPPING_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            what = "was not ready in time" if code is None else f"died ({code})"
            raise UserError(f"training {what}: {child.last_lines()}", where=child.log)
    lines = read_jsonl(Folders(folder, folder, folder).metrics)
    updates = [line for line in lines if line["kind"] == "train"]
    judged = [line for line in lines if line["kind"] == "evaluation"][-1]
    return {"updates": len(updates), "of": updates[-1]["updates"],
            "seconds": updates[-1]["seconds"], "heldout": judged["sets"],
            "heldout_at_update": judged["update"],
            "tokens_per_s": updates[-1]["tokens_per_s"]}  # fmt: skip


def _checkpoint(b: Bench, kind: Kind) -> Path:
    """The best one; of a training that the clock ended before it was judged the last one."""
    found = Folders(b.work / kind, b.work / kind, b.work / kind)
    return found.best if has_checkpoint(found.best) else found.last


def compare_engine(b: Bench, engine: str) -> Told:
    """Each arm's rounds beside the simulator's along its own answers."""
    rows = [RequestRow(**row) for row in read_jsonl(requests_file(b, engine))]
    target, out = b.served(), {}
    states_of, head = _states_on(target, b.dtype, best_device()), TargetHead(target, b.dtype)
    alone = Arm(engine, None).name
    plain = {r.prompt: r.answer_token_ids for r in rows if r.arm == alone}
    for kind in KINDS:
        name = Arm(engine, kind).name
        told = [r for r in rows if r.arm == name and r.accepted is not None]
        if told:
            folder, dtype = b.drafter_folder(kind), DTYPES[b.dtype]
            drafter = read_drafter(folder, target.config, head.embedding, dtype)
            answers = replay_answers(
                told, head, states_of, drafter, steps=b.steps, slots=drafter.config.slots,
                plain=plain,
            )  # fmt: skip
            out[name] = compare_counts(answers, b.steps, b.dtype)
            out[name]["engine_counts"] = _summed(told)
    return out


def serve_all(b: Bench) -> Told:
    """Step ``serve``: one engine after the other; what no longer fits waits for the next run."""
    return _each_engine(b, "serve", serve_engine, b.engines)


def compare_all(b: Bench) -> Told:
    """Step ``compare``, of the engines that were served."""
    served = [engine for engine in b.engines if requests_file(b, engine).exists()]
    return _each_engine(b, "compare", compare_engine, served)


def _each_engine(
    b: Bench, step: str, work: Callable[[Bench, str], Told], engines: Iterable[str]
) -> Told:
    told: Told = {}
    for engine in engines:
        done = b.work / f"{step}-{engine}.json"
        if not done.exists():
            if b.left_s() < _LEAST_S[step]:
                print(f"{step} {engine}: {_no_time(b, step)}", flush=True)
                continue
            write_json(done, work(b, engine))
        told |= read_json(done)
    return told


def summary_rows(b: Bench) -> list[dict[str, Any]]:
    """One line an arm: what the engine counted beside the simulator, and its speed beside the
    engine alone."""
    lines = []
    for engine in (e for e in b.engines if (b.work / f"serve-{e}.json").exists()):
        compare = b.work / f"compare-{engine}.json"
        served = read_json(b.work / f"serve-{engine}.json")
        compared = read_json(compare) if compare.exists() else {}
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


STEPS: dict[str, Callable[[Bench], Told]] = {
    "target": make_target, "answers": make_answers, "train": train_drafters, "serve": serve_all,
    "compare": compare_all,
}  # fmt: skip


def run_step(b: Bench, name: str) -> Told:
    """What step ``name`` tells, from its file when it was done before. Raises ``UserError`` for one
    that the minutes left don't hold."""
    if name in ("serve", "compare"):  # kept for each engine
        return STEPS[name](b)
    done = b.work / f"{name}.json"
    if not done.exists():
        least_s = _LEAST_S[name] + (b.training.seconds if name == "target" else 0.0)
        if b.left_s() < least_s:
            raise UserError(f"{name}: {_no_time(b, name)}", next="the same command again")
        started_s = time.monotonic()
        told = STEPS[name](b)
        gc.collect()
        torch.cuda.empty_cache()  # what this process keeps, an engine's start does not find
        write_json(done, told | {"step_s": round(time.monotonic() - started_s, 1)})
    return read_json(done)


def _no_time(b: Bench, step: str) -> str:
    return f"not begun, {max(b.left_s(), 0):.0f} of {60 * b.minutes:.0f} s are left for it"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("work", type=Path)
    parser.add_argument("steps", nargs="+", choices=list(STEPS))
    parser.add_argument("--rows", type=Path, help="answers.jsonl of phase 01")
    parser.add_argument("--of", default=Bench.of, help="whose tokenizer: a folder, or a known name")
    parser.add_argument("--seconds", type=float, default=150.0, help="to train the target")
    parser.add_argument("--prompts", type=int, default=3000, help="prompts the target answers")
    parser.add_argument("--engines", default="vllm,sglang")
    parser.add_argument("--minutes", type=float, default=0.0, help="for all steps, 0 is no limit")
    parser.add_argument("--bf16", action="store_true", help="serve the target before packing")
    parser.add_argument("--flag", action="append", default=[], help="ENGINE=FLAG, added to it")
    told = parser.parse_args()
    flags = {e: (*f, *_flags_for(e, told.flag)) for e, f in ENGINE_FLAGS.items()}
    bench = Bench(
        told.work, told.rows, training=TargetTraining(told.seconds), prompts=told.prompts,
        engines=tuple(told.engines.split(",")), int4=not told.bf16, flags=flags,
        minutes=told.minutes, of=told.of,
    )  # fmt: skip
    told.work.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    try:
        for name in told.steps:
            print(f"{name}: {run_step(bench, name)}", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for line in summary_rows(bench):
        print(line)
    return 0


class _Raw(argparse.RawDescriptionHelpFormatter):
    pass


def _flags_for(engine: str, words: list[str]) -> list[str]:
    return [w.split("=", 1)[1] for w in words if w.startswith(f"{engine}=")]


if __name__ == "__main__":
    sys.exit(main())
