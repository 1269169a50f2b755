"""How much arithmetic a training needs, and what the machine's matrix product reaches.

The counting rule. One multiply and add is two operations; a product counts 2 forward, 2 for the
gradient of its weights, 2 for that of its input, and only what reaches a loss is counted. For a
conversation of n prompt tokens and T tokens there are P = T - n - 1 base positions p = n-1 .. T-3
(``drafter/align.py``), and P_k = max(0, P - k) of them still have a label at step k. With H the
drafter's width, A = heads * head_dim, G = kv heads * head_dim, M the MLP's width, S the width of
all slots and D the draft vocabulary:

    fc              4 (T-2) S H          no gradient flows into the target's states
    target's keys   6 (T-2) 2H 2G        keys and values of every position a query can see
    layer           6 P_k (2H A + A H + 3 H M)                 for each step k
    own keys        6 P_k 2H 2G                                for each step k > 0
    attention       12 A (p + 1 + k)     scores and values over visible keys, each step and base
    head            6 D H                each step and base whose label is in the draft vocabulary
    teacher         2 P D H              the target's logits over the draft vocabulary, once

Not counted, though time passes: optimizer, norms, softmax, padding, the target's greedy tokens, and
anything that is computed and thrown away. The label of step k at p is taken to be x[p+2+k].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from eagle3lib.drafter.align import base_positions, base_span, label_index
from eagle3lib.drafter.config import DrafterConfig

# Square products large enough to be bound by arithmetic, small enough to take a second.
_SIZES, _REPEATS = (1024, 2048), 4


def needed_operations(
    config: DrafterConfig,
    rows: Iterable[tuple[Int64[Tensor, " _"], int]],
    t2d: Bool[Tensor, " V"],
    steps: int,
) -> dict[str, int]:
    """Operations of one epoch over ``rows`` (token ids, prompt tokens), by the names above.

    Of a Llama-type drafter.
    """
    width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    both_keys = 2 * width * 2 * config.num_key_value_heads * config.head_dim
    layer = 2 * width * heads + heads * width + 3 * width * config.intermediate_size
    head = config.draft_vocab_size * width
    slots = len(config.slots) * config.target_hidden_size
    names = ("fc", "target's keys", "layer", "own keys", "attention", "head", "teacher")
    total = dict.fromkeys(names, 0)
    for ids, prompt_tokens in rows:
        base = base_positions(base_span(prompt_tokens, len(ids)))
        if len(base) == 0:
            continue
        read = len(ids) - 2
        total["fc"] += 4 * read * slots * width
        total["target's keys"] += 6 * read * both_keys
        total["teacher"] += 2 * len(base) * head
        for step in range(steps):
            labelled = base[label_index(base, step) < len(ids)]
            inside = int(t2d[ids[label_index(labelled, step)]].sum())
            total["layer"] += 6 * len(labelled) * layer
            total["own keys"] += 6 * len(labelled) * both_keys if step else 0
            total["attention"] += 12 * heads * int((labelled + 1 + step).sum())
            total["head"] += 6 * inside * head
    return total


def seconds_of(work: Callable[[], object], threads: int) -> float:
    """Seconds of work on a CPU. Of one thread those that it computed: what else runs on the machine
    at the time then takes none of them. Of more those of the clock: threads spin while they wait.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    started = clock()
    work()
    return clock() - started


def gemm_peak(threads: int, dtype: str) -> float:
    """Operations a second of torch's matrix product on the CPU, the best of some (about 1 s; see
    ``seconds_of``)."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return max(_product_rate(size, getattr(torch, dtype), threads) for size in _SIZES)
    finally:
        torch.set_num_threads(before)


def _product_rate(size: int, dtype: torch.dtype, threads: int) -> float:
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    best_s = min(seconds_of(lambda: left @ right, threads) for _ in range(_REPEATS))
    return 2 * size**3 / best_s
