"""How fast a training update is on this GPU, as a share of what its matrix units can do.

    python -m eagle3lib.training.bench_step                 # a drafter for an 8B Llama, 4 x 4,096

Random states of the given shape go through the very update that training makes: unroll, loss,
backward, clipping and AdamW over fp32 weights, products in bf16. The matrix peak (a bf16 product of
8,192 x 8,192 random matrices) is measured in the same process, before and after. The last line of
the output is one JSON document.

The counting rule is ``arithmetic.py``'s: what the method needs, nothing that is recomputed.
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
from eagle3lib.lab.params import TrainParams
from eagle3lib.training.arithmetic import needed_operations
from eagle3lib.training.data import Batch
from eagle3lib.training.loss import step_scale
from eagle3lib.training.objective import Labels, Objective
from eagle3lib.training.optim import make_optimizers
from eagle3lib.training.parallel import Place, Replicated


class Bench:
    """A drafter, a batch of random rows, and the update that is timed."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.config = options, _config(options)
        self.params = TrainParams(steps=options.steps, loss=options.kind, precision="bfloat16")
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.drafter = Drafter(self.config)
            for parameter in self.drafter.parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=0.02)
            self.drafter.t2d[: options.draft_vocab] = True
            head = torch.randn(options.draft_vocab, options.hidden, dtype=torch.bfloat16)
            head.mul_(options.hidden**-0.5)
        self.drafter.embed_tokens.weight.requires_grad_(False)
        # All ids are in the draft vocabulary: every label has a loss.
        self.ids = torch.randint(options.draft_vocab, (options.rows, options.tokens))
        self.prompt_tokens = round(options.tokens * options.prompt_share) or 1
        self.batch, self.labels = self._batch()
        self.replica = Replicated(
            self.drafter,
            lambda drafter: Objective(drafter, head, self.params),
            torch.bfloat16,
            Place(torch.device("cuda")),
        )
        self.optimizers = make_optimizers(self.replica.named, self.params)
        exist = [max(0, options.tokens - self.prompt_tokens - 1 - k) for k in range(options.steps)]
        weights = [self.params.step_weight**k for k in range(options.steps)]
        self.scales = step_scale([n * options.rows for n in exist], weights)

    def _batch(self) -> tuple[Batch, Labels]:
        o, count = self.options, self.options.rows * self.options.tokens
        rows = PackedRows.pack(list(self.ids), [self.prompt_tokens] * o.rows)
        with torch.device("cuda"):
            states = torch.randn(count, len(self.config.slots) * o.hidden, dtype=torch.bfloat16)
            normed = torch.randn(count, o.hidden, dtype=torch.bfloat16)
            logsumexp = torch.full((count,), 12.0)
        greedy = torch.randint(o.draft_vocab, (count,))
        return Batch([], rows.to("cuda"), states, normed, rows), Labels(normed, greedy, logsumexp)

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


def matrix_peak_per_s(size: int = 8192, repeats: int = 10) -> float:
    """FLOP per second of a bf16 product of two square random matrices on the GPU."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - started)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    peak_before = matrix_peak_per_s()
    bench = Bench(options)
    started = time.perf_counter()
    for _ in range(2):  # the first one compiles
        bench.update()
    torch.cuda.synchronize()
    first_s = time.perf_counter() - started
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        bench.update()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    peak = (peak_before + matrix_peak_per_s()) / 2
    rows = [(ids, bench.prompt_tokens) for ids in bench.ids]
    needed = needed_operations(bench.config, rows, bench.drafter.t2d.cpu(), options.steps)
    flop = sum(needed.values())
    median_s = statistics.median(seconds)
    if options.profile:
        _print_profile(bench)
    return {
        "first_updates_s": first_s,
        "update_s": median_s,
        "tokens_per_s": options.rows * options.tokens / median_s,
        "flop": flop,
        "flop_by_part": needed,
        "flop_per_s": flop / median_s,
        "matrix_peak_flop_per_s": peak,
        "share_of_matrix_peak": flop / median_s / peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def _print_profile(bench: Bench) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        bench.update()
        torch.cuda.synchronize()
    table = profile.key_averages().table(
        sort_by="cuda_time_total", row_limit=25, max_name_column_width=60
    )
    print("\n".join(line[:62] + line[-90:] for line in table.splitlines()))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=4, help="conversations in an update")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each")
    parser.add_argument("--prompt-share", type=float, default=0.0, help="of each conversation")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=4096, help="H, of drafter and target")
    parser.add_argument("--intermediate", type=int, default=14_336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--kind", default="kl", help="loss")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print where the GPU's time goes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse()
    print(json.dumps(vars(given) | measure(given)))
