"""What the fused loss costs: time, memory, share of the machine's matrix peak, and its error.

    python -m eagle3lib.training.bench_loss --device cuda --draft-vocab 151936 --positions 8192

The last line of the output is one JSON document. Random states stand in for a target's; drafter and
target agree in part, so that every kind has something to do. Counted arithmetic is what the method
needs: 6 D H FLOP per row of the drafter's head (logits, gradients of states and of the head) and
2 D H per teacher row, which serves all steps. Imports torch alone, so that it runs on a bare GPU
machine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3lib.training.fused import HeadLoss, head_loss
from eagle3lib.training.kinds import HYBRID_RATE, KINDS

_EPS = 1e-6


class Inputs:
    """Leaves and labels of ``positions`` base positions, each counted in every step."""

    def __init__(self, options: argparse.Namespace, positions: int):
        device, steps, width = options.device, options.steps, options.hidden
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(options.dtype)

        self.states = normal(positions + steps, width)
        self.head = normal(options.draft_vocab, width).mul_(3 * width**-0.5)
        self.rows = torch.arange(positions) + 1 + torch.arange(steps)[:, None]
        self.rows = self.rows.clamp(max=positions + steps - 1)
        near = [self.states[row] + normal(positions, width) for row in self.rows.to(device)]
        self.hidden = [h.requires_grad_() for h in near]
        self.weight = self.head.clone().requires_grad_()
        self.norm = torch.nn.RMSNorm(width, _EPS, dtype=options.dtype, device=device)
        self.token = torch.randint(options.draft_vocab, self.rows.shape)
        self.scale = [0.8**k / positions for k in range(steps)]

    def leaves(self) -> list[Tensor]:
        return [*self.hidden, self.norm.weight, self.weight]

    def clear(self) -> None:
        for leaf in self.leaves():
            leaf.grad = None


def fused(inputs: Inputs, options: argparse.Namespace) -> Tensor:
    spec = HeadLoss(
        kind=options.kind,
        temperature=1.0,
        teacher=inputs.rows,
        token=inputs.token,
        scale=inputs.scale,
        norm=inputs.norm,
        states=inputs.states,
        draft_head=inputs.head,
        buffer_bytes=options.buffer_mb << 20,
    )
    return head_loss(spec, inputs.hidden, inputs.weight)[0]


def plain(inputs: Inputs, options: argparse.Namespace, wide: torch.dtype) -> list[Tensor]:
    """Gradients of the leaves by full logits and autograd, all in ``wide``."""
    leaves = [leaf.detach().to(wide).requires_grad_() for leaf in inputs.leaves()]
    *hidden, gain, weight = leaves
    device, total = weight.device, torch.zeros((), dtype=wide, device=weight.device)
    for rows, token, h, scale in zip(
        inputs.rows.to(device), inputs.token.to(device), hidden, inputs.scale, strict=True
    ):
        p = (inputs.states[rows].to(wide) @ inputs.head.to(wide).T).softmax(-1)
        log_q = (F.rms_norm(h, gain.shape, gain, _EPS) @ weight.T).log_softmax(-1)
        total = total + scale * _plain_kind(options.kind, p, log_q, token).sum()
    return list(torch.autograd.grad(total, leaves))


def _plain_kind(kind: str, p: Tensor, log_q: Tensor, token: Tensor) -> Tensor:
    if kind == "ce":
        return -log_q.gather(1, token[:, None])[:, 0]
    if kind == "rkl":
        return (log_q.exp() * (log_q - p.log())).sum(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    kl = (p * (p.log() - log_q)).sum(-1)
    weight = (-HYBRID_RATE * alpha.detach()).exp()
    blend = weight * kl + (1 - weight) * (1 - alpha)
    return {"kl": kl, "tv": 1 - alpha, "lk": -alpha.log(), "hybrid": blend}[kind]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of one forward and backward; warm-ups are not counted."""
    warm = Inputs(options, min(options.positions, 8))
    fused(warm, options).backward()  # loads, and on a GPU compiles, what is made once
    inputs = Inputs(options, options.positions)
    used_bytes = _peak_bytes(options.device, lambda: fused(inputs, options).backward())
    seconds = []
    for _ in range(options.repeats):
        inputs.clear()
        seconds.append(_timed(options.device, lambda: fused(inputs, options).backward()))
    median_s, size = statistics.median(seconds), inputs.weight.element_size()
    head, wide = inputs.weight.numel(), 8 if size == 8 else 4
    # fp32 while it is added to, and once more where the parameter is narrower
    head_bytes = head * (wide + (size if size < wide else 0))
    rows = options.positions * options.steps
    flop = 6 * rows * head + 2 * (options.positions + options.steps - 1) * head
    peak_per_s = _matrix_peak(options)
    return {
        "seconds": median_s,
        "best_seconds": min(seconds),
        "tokens_per_s": options.positions / median_s,
        "peak_bytes_beyond_inputs": used_bytes,
        "head_gradient_bytes": head_bytes,
        "hidden_gradient_bytes": rows * options.hidden * size,
        "peak_bytes_beyond_inputs_and_weight_gradients": max(0, used_bytes - head_bytes),
        "flop": flop,
        "flop_per_s": flop / median_s,
        "matrix_peak_flop_per_s": peak_per_s,
        "share_of_matrix_peak": flop / median_s / peak_per_s,
    }


def errors(options: argparse.Namespace) -> dict[str, float]:
    """Relative errors (of the norm) of the gradients on ``check_positions``, against fp64."""
    inputs = Inputs(options, options.check_positions)
    fused(inputs, options).backward()
    found = [leaf.grad for leaf in inputs.leaves()]
    expected = plain(inputs, options, torch.float64)
    each = [
        float((a.double() - b).norm() / b.norm())  # type: ignore[union-attr]
        for a, b in zip(found, expected, strict=True)
    ]
    return {"hidden": max(each[:-2]), "norm": each[-2], "head": each[-1]}


def _timed(device: str, work: Callable[[], Any]) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_bytes(device: str, work: Callable[[], Any]) -> int:
    """Bytes above what was held before. On the CPU the process's largest size says it, so this
    comes before any other large work."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _matrix_peak(options: argparse.Namespace) -> float:
    """FLOP per second of the best of some large square products in this dtype."""
    size = 8192 if options.device == "cuda" else 1024
    a = torch.randn(size, size, device=options.device).to(options.dtype)
    b, out = a.clone(), torch.empty_like(a)
    best = min(_timed(options.device, lambda: torch.mm(a, b, out=out)) for _ in range(10))
    return 2 * size**3 / best


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--draft-vocab", type=int, default=8192, help="D")
    parser.add_argument("--positions", type=int, default=512, help="base positions")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--hidden", type=int, default=576, help="H, of drafter and target")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--kind", default="kl", choices=KINDS)
    parser.add_argument("--buffer-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--check-positions", type=int, default=16, help="0: no fp64 reference")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    shown = dict(vars(options))
    options.dtype = getattr(torch, options.dtype)
    result = shown | measure(options)
    if options.check_positions:
        result["gradient_errors"] = errors(options)
    if options.device == "cuda":
        result["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(result | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
