"""How fast a training update is on this GPU, as a share of what its matrix units can do.

    python -m eagle3lib.training.bench_step                 # a drafter for an 8B Llama, 4 x 4,096

Random states of the given shape go through the very ``unroll``, loss and clipping that training
uses, with fp32 weights under bf16 autocast and AdamW. The matrix peak (a bf16 product of 8,192 x
8,192 random matrices) is measured in the same process, before and after. The last line of the
output is one JSON document.

Counting rule: only the multiply-adds that the method needs, two operations each.

    part           positions                            forward + backward, per position
    fc             all tokens                           4 * slots*Ht*H     (states need no gradient)
    keys, values   all tokens; base at steps >= 1       6 * 2H * kv*(dk + dv)
    queries, o,    base, every step                     6 * (2H*heads*dk + heads*dv*H + 3*H*I)
    MLP
    head           rows with a loss, every step         6 * H * D
    teacher        states that some step needs          2 * Ht * D
    attention      (query, visible key) pairs           6 * heads * (dk + dv)

Not counted: recomputation (flash attention's second product of queries and keys), casts, norms,
rotary, softmaxes, the optimizer, padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.model import Drafter, unroll
from eagle3lib.drafter.rows import PackedRows
from eagle3lib.training.loss import (
    StepLabels,
    Teacher,
    draft_ids,
    label_steps,
    step_scale,
    ttt_loss,
)


def update_flop(c: DrafterConfig, rows: PackedRows, labels: StepLabels) -> int:
    """Arithmetic of one update, by the counting rule above. Llama-type drafters."""
    steps, tokens, base = len(labels.inside), len(rows.token_ids), len(rows.base)
    heads, kv, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    width, slots_width = c.hidden_size, len(c.slots) * c.target_hidden_size
    pairs = sum(int((rows.base + 1 + step).sum()) for step in range(steps))
    needed = int(labels.row[labels.row >= 0].unique().numel())
    per_base = 2 * width * heads * size + heads * size * width + 3 * width * c.intermediate_size
    return (
        4 * tokens * slots_width * width
        + 6 * (tokens + (steps - 1) * base) * 2 * width * kv * 2 * size
        + 6 * steps * base * per_base
        + 6 * sum(labels.inside) * width * c.draft_vocab_size
        + 2 * needed * c.target_hidden_size * c.draft_vocab_size
        + 6 * pairs * heads * 2 * size
    )


class Bench:
    """A drafter, a batch of random rows, and the update that is timed."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.config = options, _config(options)
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.drafter = Drafter(self.config)
            for parameter in self.drafter.parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=0.02)
            self.drafter.t2d[: options.draft_vocab] = True
            ids = [torch.randint(options.vocab, (options.tokens,)) for _ in range(options.rows)]
            count = options.rows * options.tokens
            shape = (count, len(self.config.slots) * options.hidden)
            self.states = torch.randn(shape, dtype=torch.bfloat16)
            self.normed = torch.randn(count, options.hidden, dtype=torch.bfloat16)
            head = torch.randn(options.draft_vocab, options.hidden, dtype=torch.bfloat16)
            self.draft_head = head.mul_(options.hidden**-0.5)
            greedy = torch.randint(options.draft_vocab, (count,))
        self.drafter.embed_tokens.weight.requires_grad_(False)
        prompt = [round(options.tokens * options.prompt_share) or 1] * options.rows
        self.rows = PackedRows.pack([row.cpu() for row in ids], prompt)
        draft_of = draft_ids(self.drafter.t2d)
        self.labels = label_steps(self.rows, greedy, draft_of, options.steps)
        self.rows_here = self.rows.to("cuda")
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-5, fused=True)

    def update(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            made = unroll(
                self.drafter, self.rows_here, self.states, self.options.steps, feed="truth"
            )
            scale = step_scale(self.labels.inside, [0.8**k for k in range(self.options.steps)])
            teacher = Teacher(self.normed, self.draft_head)
            loss, _ = ttt_loss(
                self.drafter, made, self.labels, teacher, scale, kind=self.options.kind
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


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
    flop = update_flop(bench.config, bench.rows, bench.labels)
    median_s = statistics.median(seconds)
    if options.profile:
        _print_profile(bench)
    return {
        "first_updates_s": first_s,
        "update_s": median_s,
        "tokens_per_s": options.rows * options.tokens / median_s,
        "flop": flop,
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
