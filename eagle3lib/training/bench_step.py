"""How fast a training update is, as a share of what the machine's matrix product reaches.

    python -m eagle3lib.training.bench_step                 # a drafter for an 8B Llama, 4 x 4,096
    python -m eagle3lib.training.bench_step --device cpu    # one for SmolLM2, 6 x 180, 8k vocab

Random states of the given shape go through the very update that training makes: unroll, loss,
backward, clipping and AdamW over fp32 weights. The matrix peak (the product of large square random
matrices, in the dtype of the update's products) is measured before every update: machines drift,
and the share is taken within each pair. On a busy CPU give it one thread (OMP_NUM_THREADS=1): then
only the time counts in which it computed. The last line of the output is one JSON document.

The counting rule is ``arithmetic.py``'s: what the method needs, nothing that is padded, recomputed
or thrown away.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.rows import PackedRows
from eagle3lib.lab.machine import keep_freed_memory
from eagle3lib.lab.params import TrainParams
from eagle3lib.target.model import DTYPES
from eagle3lib.training.arithmetic import gemm_peak, needed_operations, seconds_of
from eagle3lib.training.data import Batch
from eagle3lib.training.loss import step_scale
from eagle3lib.training.objective import Labels, Objective
from eagle3lib.training.optim import make_optimizers
from eagle3lib.training.parallel import Place, Replicated

# What a device is asked for where nothing is said: an 8B Llama's drafter on a GPU, SmolLM2's on a
# CPU, with rows of the demo's length.
_SHAPES = {
    "cuda": {
        "rows": 4, "tokens": 4096, "prompt_share": 0.0, "hidden": 4096, "intermediate": 14_336,
        "heads": 32, "kv_heads": 8, "vocab": 128_256, "draft_vocab": 32_000,
    },
    "cpu": {
        "rows": 6, "tokens": 180, "prompt_share": 0.34, "hidden": 576, "intermediate": 1536,
        "heads": 9, "kv_heads": 3, "vocab": 49_152, "draft_vocab": 8192,
    },
}  # fmt: skip


class Bench:
    """A drafter, a batch of random rows, and the update that is timed."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.config = options, _config(options)
        self.dtype, self.device = DTYPES[options.precision], torch.device(options.device)
        self.params = TrainParams(
            steps=options.steps, loss=options.kind, precision=options.precision
        )
        torch.manual_seed(0)
        with self.device:
            self.drafter = Drafter(self.config)
            for parameter in self.drafter.parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=0.02)
            self.drafter.t2d[: options.draft_vocab] = True
            head = torch.randn(options.draft_vocab, options.hidden, dtype=self.dtype)
            head.mul_(options.hidden**-0.5)
        self.drafter.embed_tokens.weight.requires_grad_(False)
        # All ids are in the draft vocabulary: every label has a loss.
        self.ids = torch.randint(options.draft_vocab, (options.rows, options.tokens))
        self.prompt_tokens = round(options.tokens * options.prompt_share) or 1
        self.batch, self.labels = self._batch()
        self.replica = Replicated(
            self.drafter,
            lambda drafter: Objective(drafter, head, self.params),
            self.dtype,
            Place(self.device),
        )
        self.optimizers = make_optimizers(self.replica.named, self.params)
        exist = [max(0, options.tokens - self.prompt_tokens - 1 - k) for k in range(options.steps)]
        weights = [self.params.step_weight**k for k in range(options.steps)]
        self.scales = step_scale([n * options.rows for n in exist], weights)

    def _batch(self) -> tuple[Batch, Labels]:
        o, count = self.options, self.options.rows * self.options.tokens
        rows = PackedRows.pack(list(self.ids), [self.prompt_tokens] * o.rows)
        with self.device:
            states = torch.randn(count, len(self.config.slots) * o.hidden, dtype=self.dtype)
            normed = torch.randn(count, o.hidden, dtype=self.dtype)
            logsumexp = torch.full((count,), 12.0)
        greedy = torch.randint(o.draft_vocab, (count,))
        batch = Batch([], rows.to(self.device), states, normed, rows)
        return batch, Labels(normed, greedy, logsumexp)

    def update(self) -> None:
        self.replica.start()
        self.replica.backward(self.batch, self.labels, self.scales, last=True)
        self.replica.clip(self.params.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()


def _config(options: argparse.Namespace) -> DrafterConfig:
    target = {
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "num_hidden_layers": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "vocab_size": options.vocab,
    }
    return DrafterConfig.for_target(target, options.draft_vocab)


def matrix_peak_per_s(options: argparse.Namespace, size: int = 8192, repeats: int = 10) -> float:
    """FLOP per second of a product of two square random matrices, there and in that dtype."""
    if options.device == "cpu":
        return gemm_peak(torch.get_num_threads(), options.precision)
    a, b = (
        torch.randn(size, size, device=options.device, dtype=DTYPES[options.precision])
        for _ in range(2)
    )
    for _ in range(3):
        a @ b
    _wait(options)
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    _wait(options)
    return 2 * size**3 * repeats / (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    bench = Bench(options)
    first_s = _timed(bench, options, 2)  # the first one compiles
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    peaks, seconds = [], []
    for _ in range(options.repeats):
        peaks.append(matrix_peak_per_s(options))
        seconds.append(_timed(bench, options, 1))
    rows = [(ids, bench.prompt_tokens) for ids in bench.ids]
    needed = needed_operations(bench.config, rows, bench.drafter.t2d.cpu(), options.steps)
    flop = sum(needed.values())
    shares = [flop / s / peak for s, peak in zip(seconds, peaks, strict=True)]
    median_s = statistics.median(seconds)
    if options.profile:
        _print_profile(bench)
    on_gpu = options.device == "cuda"
    return {
        "first_updates_s": first_s,
        "update_s": median_s,
        "updates_s": seconds,
        "tokens_per_s": options.rows * options.tokens / median_s,
        "flop": flop,
        "flop_by_part": needed,
        "flop_per_s": flop / median_s,
        "matrix_peak_flop_per_s": statistics.median(peaks),
        "share_of_matrix_peak": statistics.median(shares),
        "shares": shares,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _timed(bench: Bench, options: argparse.Namespace, updates: int) -> float:
    def work() -> None:
        for _ in range(updates):
            bench.update()
        _wait(options)

    _wait(options)
    # The host's own seconds say nothing of a GPU's.
    return seconds_of(work, torch.get_num_threads() if options.device == "cpu" else 0)


def _wait(options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.synchronize()


def _print_profile(bench: Bench) -> None:
    kind = bench.options.device
    activity = getattr(torch.profiler.ProfilerActivity, kind.upper())
    with torch.profiler.profile(activities=[activity]) as profile:
        bench.update()
        _wait(bench.options)
    order = "cuda_time_total" if kind == "cuda" else "self_cpu_time_total"
    table = profile.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=60)
    print("\n".join(line[:62] + line[-90:] for line in table.splitlines()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="bfloat16", choices=tuple(DTYPES))
    parser.add_argument("--rows", type=int, help="conversations in an update")
    parser.add_argument("--tokens", type=int, help="tokens of each")
    parser.add_argument("--prompt-share", type=float, help="of each conversation")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--hidden", type=int, help="H, of drafter and target")
    parser.add_argument("--intermediate", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--draft-vocab", type=int)
    parser.add_argument("--kind", default="kl", help="loss")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --device cpu")
    for name, value in _SHAPES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    given = parse()
    if given.device == "cpu":
        keep_freed_memory()  # as the trainer does
    print(json.dumps(vars(given) | measure(given)))
