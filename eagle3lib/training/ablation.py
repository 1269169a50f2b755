"""Losses compared by drafters that are trained to the end on equal tokens, with several seeds.

    python -m eagle3lib.training.ablation --target FOLDER --rows answers.jsonl.gz --out DIR \\
        --losses kl,ce,rkl,tv,lk,hybrid,kl+step_weight:1.0,kl+loss_temperature:0.7 \\
        --seeds 0,1,2 --tokens 1000000 --set batch_tokens=4096 --device cuda --jobs 7

A variant is a loss and, after plus signs, other parameters of phase 04 (name:value); a cell is a
variant and a seed. All cells see the same conversations (in an order of the seed), vocabulary map
and number of tokens. The target's states are made once a process and stay in memory; ``--jobs``
processes share the cells, and the device, in order, so that a process meets few variants (a GPU
compiles each).

    DIR/vocab_map.safetensors
    DIR/cells/VARIANT-SEED/drafter/      the last weights, as an engine serves them
    DIR/cells/VARIANT-SEED/result.json   its ``judge``-ment; a cell that has it is not trained again
    DIR/cells/VARIANT-SEED/settings.json what it was begun with: of these alone a training goes on
    DIR/cells/VARIANT-SEED/failed.txt    why there is no result: the other cells go on
    DIR/results.jsonl                    the finished cells, the best last, written as each one ends

Each is judged on held-out conversations, one by one: rounds of the greedy simulator (T = 0), and
the chain of expected acceptances along the answers (T = 1, ``evaluate.py``). Memory: the states,
2 (slots + 1) Ht bytes a token in bf16, beside a training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from eagle3lib.data.rows import json_line
from eagle3lib.lab.child import Child
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_atomic, write_json
from eagle3lib.lab.machine import free_cores, keep_freed_memory
from eagle3lib.training.ablation_cells import Ablation, Cell, Workbench
from eagle3lib.training.evaluate import chain_length

_POLL_S = 0.5


def run_cells(job: Ablation, cells: list[Cell], ended: Callable[[], object] = lambda: None) -> None:
    """In this process, one after the other; finished ones stay. ``ended`` is called after each.

    A cell that fails says why in its folder and costs the others nothing.
    """
    for cell in cells:
        job.params(cell)  # a wrong variant is refused before anything is computed
    left = [cell for cell in cells if not job.finished(cell)]
    bench = Workbench(job) if left else None
    for cell in left:
        where = _begin(job, cell)
        assert bench is not None
        try:
            result = bench.run(cell)
        except Exception as error:  # whatever it is: hours of other cells must not go with it
            why = f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}"
            (where / "failed.txt").write_text(why, encoding="utf-8")
            print(f"{cell.variant} seed {cell.seed}: failed, see {where}/failed.txt", flush=True)
        else:
            greedy, sampled = lengths(result["conversations"])
            print(
                f"{cell.variant} seed {cell.seed}: {greedy:.3f} at T = 0, {sampled:.3f} at T = 1, "
                f"{result['seconds']:.0f} s of updates",
                flush=True,
            )
        ended()


def _begin(job: Ablation, cell: Cell) -> Path:
    """The cell's folder. What other settings left there is gone: a training would go on with it."""
    where = cell.folder(job.out)
    path, settings = where / "settings.json", {"fingerprint": job.fingerprint(cell)}
    if not path.exists() or read_json(path) != settings:
        shutil.rmtree(where, ignore_errors=True)
        write_json(path, settings)
    (where / "failed.txt").unlink(missing_ok=True)
    return where


def run_ablation(job: Ablation, jobs: int = 1) -> list[dict[str, Any]]:
    """All cells, in ``jobs`` processes; returns what ``results.jsonl`` holds, the best last.

    Raises ``UserError`` at the end where cells failed or a process died; what is finished is in
    the file by then, and a second run makes what is left.
    """
    cells = job.cells()
    if jobs == 1:
        run_cells(job, cells, partial(write_results, job))
    else:
        _run_children(job, min(jobs, len(cells)))
    results, failed = write_results(job), _failures(job)
    if failed:
        cell, why = failed[0]
        raise UserError(
            f"{len(failed)} of {len(cells)} cells failed; {cell.variant} seed {cell.seed}: {why}",
            expected=f"a result of each; {len(results)} are in results.jsonl",
            where=cell.folder(job.out) / "failed.txt",
            next="mend it and run the same again: finished cells stay",
        )
    return results


def write_results(job: Ablation) -> list[dict[str, Any]]:
    """The finished cells, the best last, as they are in ``results.jsonl`` from now on."""
    results = [result for cell in job.cells() if (result := job.finished(cell))]
    results.sort(key=lambda result: sum(lengths(result["conversations"])))
    text = b"".join(json_line(result) for result in results)
    write_atomic(job.out / "results.jsonl", lambda temporary: temporary.write_bytes(text))
    return results


def _failures(job: Ablation) -> list[tuple[Cell, str]]:
    """Cells that said why they failed, with the first line of it."""
    notes = [(cell, cell.folder(job.out) / "failed.txt") for cell in job.cells()]
    return [(c, note.read_text("utf-8").split("\n")[0]) for c, note in notes if note.exists()]


def lengths(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Acceptance length of conversations: by the simulator (T = 0), expected at T = 1."""
    rounds, accepted = (sum(line[key] for line in lines) for key in ("rounds", "accepted"))
    labels, overlap = (
        [sum(step) for step in zip(*(line[key] for line in lines), strict=True)]
        for key in ("labels", "overlap")
    )
    return 1 + accepted / max(rounds, 1), chain_length(overlap, labels) or 1.0


def _run_children(job: Ablation, jobs: int) -> None:
    job.out.mkdir(parents=True, exist_ok=True)
    write_json(job.out / "job.json", asdict(job) | {"rows": str(job.rows), "out": str(job.out)})
    threads = str(max(1, free_cores() // jobs))
    env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
    with ExitStack() as stack:
        children = []
        for share in range(jobs):
            command = [sys.executable, "-m", "eagle3lib.training.ablation"]
            command += ["--job", str(job.out / "job.json"), "--share", f"{share}/{jobs}"]
            log = job.out / f"process-{share}.log"
            children.append(stack.enter_context(Child(command, log=log, env=env)))
        bar = stack.enter_context(tqdm(total=len(job.cells()), desc="cells", mininterval=5))
        while any(child.exit_code() is None for child in children):
            time.sleep(_POLL_S)
            made = sum((cell.folder(job.out) / "result.json").exists() for cell in job.cells())
            if made > bar.n:
                write_results(job)
            bar.update(made - bar.n)
        write_results(job)
        for child in children:
            if child.exit_code() != 0:
                raise UserError(
                    f"a process died (exit code {child.exit_code()}):\n{child.last_lines(12)}",
                    where=child.log,
                    next="mend it and run the same again: finished cells stay",
                )


def share_of(cells: list[Cell], share: int, shares: int) -> list[Cell]:
    """One of ``shares`` stretches of the cells, about as many in each."""
    return cells[len(cells) * share // shares : len(cells) * (share + 1) // shares]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="folder of the target")
    parser.add_argument("--rows", type=Path, help="answers.jsonl of phase 01, or its gzip")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--losses", default="kl,ce,rkl,tv,lk,hybrid", help="variants, by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="that each cell sees")
    parser.add_argument("--epochs", type=int, default=1, help="passes that make up the tokens")
    parser.add_argument("--heldout", type=int, default=48, help="conversations that are judged")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--speculative-tokens", type=int, default=5, help="K of the judgement")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", nargs="*", default=[], help="parameters of phase 04, name=value")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cells")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not options.job and not (options.target and options.rows and options.out):
        parser.error("--target, --rows and --out are needed")
    return options


def job_of(options: argparse.Namespace) -> Ablation:
    if options.job:
        given = read_json(options.job)
        paths = {name: Path(given[name]) for name in ("rows", "out")}
        lists = {name: tuple(given[name]) for name in ("variants", "seeds", "settings")}
        return Ablation(**(given | paths | lists))
    return Ablation(
        target=options.target,
        rows=options.rows,
        out=options.out,
        variants=tuple(options.losses.split(",")),
        seeds=tuple(int(seed) for seed in options.seeds.split(",")),
        tokens=options.tokens,
        epochs=options.epochs,
        heldout=options.heldout,
        draft_vocab_size=options.draft_vocab,
        num_speculative_tokens=options.speculative_tokens,
        device=options.device,
        settings=tuple(options.set),
    )


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    job = job_of(options)
    # A process meets several losses, and each is another specialisation of the same function.
    torch._dynamo.config.recompile_limit = 64
    if not torch.cuda.is_available():
        keep_freed_memory()
    try:
        if options.share:
            share, shares = (int(part) for part in options.share.split("/"))
            run_cells(job, share_of(job.cells(), share, shares))
        else:
            for result in run_ablation(job, options.jobs):
                shown = {k: result[k] for k in ("variant", "seed", "tokens", "updates", "seconds")}
                greedy, sampled = lengths(result["conversations"])
                print(json.dumps(shown | {"T=0": round(greedy, 4), "T=1": round(sampled, 4)}))
    except UserError as error:
        print(f"USER ERROR\n{error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
