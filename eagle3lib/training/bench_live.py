"""How fast training on live states is, and what its time goes to.

    python -m eagle3lib.training.bench_live TARGET_FOLDER --update-tokens 65536 --draft-vocab 16384

Random rows go through the very updates that phase 04 makes (``loop.py``); then the same pieces run
one by one, each waited for. ``host_wait`` is what the host waits for the device in an update: near
zero means that the host is the bottleneck. ``unaccounted`` is an update less all pieces: time in
which the GPU stood idle, or, below zero, what overlapping saved. ``graphs`` counts compilations
before and in the timed updates; more than a few in these are recompilations. The draft vocabulary
is what the target says most on such rows, so that most labels count. The last line of the output is
one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3lib.data.rows import AnswerRow
from eagle3lib.drafter.config import chosen_slots
from eagle3lib.drafter.vocab import build_vocab_map, count_tokens
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_text
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.capture import capture
from eagle3lib.target.folder import Target, open_target
from eagle3lib.target.model import TargetHead
from eagle3lib.target.stream import LiveStates
from eagle3lib.training.checkpoints import Folders
from eagle3lib.training.data import assemble
from eagle3lib.training.feed import Feed
from eagle3lib.training.loop import Trainer
from eagle3lib.training.objective import FullHead, step_scales
from eagle3lib.training.parallel import Place

_WARM_UPDATES = 3  # these compile
_SAMPLE_ROWS = 2


def random_rows(options: argparse.Namespace, vocab_size: int) -> list[AnswerRow]:
    """Rows for all updates, of half to one and a half times ``tokens``."""
    draw = torch.Generator().manual_seed(0)
    wanted = (options.updates + _WARM_UPDATES + 1) * options.update_tokens
    rows: list[AnswerRow] = []
    while wanted > 0:
        spread = float(torch.rand(1, generator=draw))
        length = max(4, round(options.tokens * (0.5 + spread)))
        ids = torch.randint(vocab_size, (length,), generator=draw).tolist()
        prompt = max(1, min(length - 3, round(options.prompt_share * length)))
        name = f"row-{len(rows):06d}"
        row = AnswerRow(name, "workload", "train", [], ids[:prompt], ids[prompt:], "", "stop")
        rows.append(row)
        wanted -= length
    return rows


def make_trainer(options: argparse.Namespace, target: Target, folder: Path) -> Trainer:
    """A training in ``folder`` whose states are live."""
    rows = random_rows(options, target.vocab_size)
    slots = chosen_slots("", target.num_layers)
    folders = Folders(folder / "phase", folder / "states", folder / "vocab.safetensors", folder)
    folders.phase.mkdir()
    lines = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    write_text(folder / "answers.jsonl", lines)
    common = {"slots": slots, "dtype": options.precision}
    capture(target, rows[:_SAMPLE_ROWS], folders.states, batch_tokens=options.tokens, shard_rows=64,
            sample_of=len(rows), **common)  # fmt: skip
    device = Place.open(options.device).device
    live = LiveStates(target, rows[:16], batch_tokens=8192, device=str(device), **common)
    batch = assemble(live, live.entries, device)
    said = FullHead(TargetHead(target), device, keep=False).labels(batch).greedy
    counts = count_tokens([said[said >= 0].tolist()])
    build_vocab_map(counts, target.vocab_size, options.draft_vocab).save(folders.vocab)
    cfg = TrainParams(
        target=str(target.folder),
        states="live",
        steps=options.steps,
        batch_tokens=options.update_tokens,
        target_batch_tokens=options.forward_tokens,
        precision=options.precision,
        device=options.device,
        epochs=1,
    )
    return Trainer(cfg, target, folders)


def measure(options: argparse.Namespace, target: Target, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(options, target, folder)
    updates, device = trainer.plan[0], trainer.place.device
    parts, waited = trainer._parts(updates), _watch_waits(trainer)
    started = time.perf_counter()
    for update in updates[:_WARM_UPDATES]:
        trainer._update(update, parts)
    warm_s, graphs = time.perf_counter() - started, _graphs()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    waited.clear()
    timed = updates[_WARM_UPDATES : _WARM_UPDATES + options.updates]
    _wait(device)
    started = time.perf_counter()
    for update in timed:
        trainer._update(update, parts)
    _wait(device)
    update_s = (time.perf_counter() - started) / len(timed)
    new_graphs = _graphs() - graphs
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    pieces = measure_pieces(trainer, timed[-1], options.repeats)
    tokens = sum(e.tokens for update in timed for e in update) / len(timed)
    if options.profile:
        _print_profile(trainer, parts, updates[_WARM_UPDATES + len(timed)])
    parts.close()
    return {
        "tokens_per_s": round(tokens / update_s, 1),
        "tokens_per_update": round(tokens, 1),
        "conversations_per_update": round(sum(map(len, timed)) / len(timed), 1),
        "update_s": round(update_s, 5),
        "host_wait_s": round(sum(waited) / len(timed), 5),
        "pieces_s": {name: round(value, 5) for name, value in pieces.items()},
        "unaccounted_s": round(update_s - sum(pieces.values()), 5),
        "tokens_per_s_by_piece": {n: round(tokens / v, 1) for n, v in pieces.items()},
        "warm_up_s": round(warm_s, 2),
        "graphs": [graphs, new_graphs],
        "peak_memory_bytes": peak,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
    }


def measure_pieces(trainer: Trainer, update: list[Any], repeats: int) -> dict[str, float]:
    """Seconds of each piece of an update alone, medians."""
    device, states, cfg = trainer.place.device, trainer.store, trainer.cfg
    batch = assemble(states, update, device)
    labels = trainer.head.labels(batch)
    scales = step_scales(update, cfg.steps, cfg.step_weight)

    def drafter() -> None:
        trainer.replica.start()
        trainer.replica.backward(batch, labels, scales, last=True)()

    def optimizer() -> None:
        trainer.replica.clip(cfg.max_grad_norm)
        for one in trainer.optimizers:
            one.step()

    pieces: dict[str, Callable[[], Any]] = {
        "target_forward": lambda: assemble(states, update, device),
        "labels": lambda: trainer.head.labels(batch),
        "drafter_forward_backward": drafter,
        "optimizer": optimizer,
    }
    return {name: _median_s(piece, repeats, device) for name, piece in pieces.items()}


def _median_s(piece: Callable[[], Any], repeats: int, device: torch.device) -> float:
    seconds = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        piece()
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _watch_waits(trainer: Trainer) -> list[float]:
    """Seconds of every wait for the counts of a part, as they come."""
    waited: list[float] = []
    backward = trainer.replica.backward

    def watched(*inputs: Any, last: bool) -> Callable[[], Any]:
        counts = backward(*inputs, last=last)

        def wait() -> Any:
            started = time.perf_counter()
            found = counts()
            waited.append(time.perf_counter() - started)
            return found

        return wait

    trainer.replica.backward = watched  # type: ignore[method-assign]
    return waited


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _print_profile(trainer: Trainer, parts: Feed, update: list[Any]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if trainer.place.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        trainer._update(update, parts)
        _wait(trainer.place.device)
    on = "cuda" if len(activities) > 1 else "cpu"
    for order in dict.fromkeys((f"{on}_time_total", "cpu_time_total")):
        print(profile.key_averages().table(sort_by=order, row_limit=20, max_name_column_width=60))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", help="folder of the target")
    parser.add_argument("--tokens", type=int, default=512, help="mean of a conversation")
    parser.add_argument("--prompt-share", type=float, default=0.35, help="of each conversation")
    parser.add_argument("--update-tokens", type=int, default=65_536)
    parser.add_argument("--forward-tokens", type=int, default=32_768, help="of the target at once")
    parser.add_argument("--updates", type=int, default=8, help="timed ones")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--draft-vocab", type=int, default=16_384)
    parser.add_argument("--precision", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=5, help="of each piece alone")
    parser.add_argument("--profile", action="store_true", help="print where an update's time goes")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        target = open_target(options.target)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(vars(options) | measure(options, target, Path(folder))))
    except UserError as error:
        print(f"USER ERROR\n{error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
