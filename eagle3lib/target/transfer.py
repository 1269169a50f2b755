"""Copies between host and GPU that wait for nothing else.

A plain ``.to`` or ``.cpu()`` waits for all that the GPU was given before; it then stands idle until
the host has launched more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on ``device``; itself when it is there."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def fetch(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin a copy to the host. The call returns it, once this copy is done; what the GPU was given
    since may still run."""
    if not tensor.is_cuda:
        return lambda: tensor
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> Tensor:
        done.synchronize()
        return host

    return wait
