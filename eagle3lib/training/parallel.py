"""Where a process computes, and the weights of all processes: replicated or sharded (FSDP2).

The optimizer's weights are always fp32. Replicated ones have a copy in the dtype of the products,
made once an update, and gradients in one flat fp32 buffer that ranks sum at once. There is nothing
to overlap that sum with: each weight serves every step, so its gradient is whole only at the very
end of the backward (which is why this isn't torch's DDP).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from eagle3lib.drafter.model import Drafter
from eagle3lib.lab.errors import UserError
from eagle3lib.training.loss import StepCounts, no_counts
from eagle3lib.training.objective import Objective
from eagle3lib.training.optim import Named, whole

MakeObjective = Callable[[Drafter], Objective]
Counts = Callable[[], list[StepCounts]]
# Rank 0 evaluates while the others wait for its next collective.
_PATIENCE = timedelta(hours=3)


@dataclass(frozen=True)
class Place:
    """This process among all."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @classmethod
    def open(cls, device: str) -> Place:
        """Choose the device, and join the others that torchrun started. Raises ``UserError`` for
        ``cuda`` without a GPU, or with more processes than GPUs."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        gpus = torch.cuda.device_count() if device != "cpu" else 0
        if device == "cuda" and gpus == 0:
            raise UserError(
                "device is cuda, and torch sees no GPU",
                expected="device: auto or cpu, or a torch that is built for this GPU",
                next="python -c 'import torch; print(torch.cuda.is_available())'",
            )
        if gpus and local >= gpus:
            raise UserError(
                f"process {local} of this machine has no GPU of its own",
                expected=f"processes: at most {gpus}",
            )
        chosen = torch.device(f"cuda:{local}" if gpus else "cpu")
        if gpus:
            torch.cuda.set_device(chosen)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if gpus else "gloo", timeout=_PATIENCE)
        if not dist.is_initialized():
            return cls(chosen)
        return cls(chosen, dist.get_rank(), dist.get_world_size())

    def sum(self, values: list[float]) -> list[float]:
        """Sums over all ranks, fp64."""
        if self.world == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()


class Replicated:
    """Every rank holds all weights (``sharding: none``)."""

    def __init__(self, drafter: Drafter, make: MakeObjective, dtype: torch.dtype, place: Place):
        self.drafter, self.place = drafter, place
        self.named: Named = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
        computing = drafter if dtype == torch.float32 else copy.deepcopy(drafter).to(dtype)
        self._objective = make(computing)
        used = dict(computing.named_parameters())
        self._pairs = [(p, used[n]) for n, p in self.named.items() if used[n] is not p]
        self._flat = torch.zeros(sum(p.numel() for p in self.named.values()), device=place.device)
        sizes = [p.numel() for p in self.named.values()]
        for parameter, part in zip(self.named.values(), self._flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def start(self) -> None:
        """Forget the gradients and take over the weights that the optimizer made."""
        self._flat.zero_()
        with torch.no_grad():
            for master, used in self._pairs:
                used.copy_(master)

    def backward(self, *inputs: Any, last: bool) -> Counts:
        """Add the gradients of one part of the update; the counts wait for the device."""
        if inputs[0] is None:
            return partial(no_counts, self._objective.steps)
        loss, counts = self._objective(*inputs)
        loss.backward()
        for master, used in self._pairs:
            if used.grad is not None:
                assert master.grad is not None
                master.grad.add_(used.grad)
                used.grad = None
        return counts

    def clip(self, max_norm: float) -> float:
        """Sum the gradients of all ranks, and scale them to ``max_norm``; returns the norm
        before."""
        if self.place.world > 1:
            dist.all_reduce(self._flat)
        norm = float(self._flat.norm())
        if norm > max_norm:
            self._flat.mul_(max_norm / (norm + 1e-6))
        return norm

    def whole_drafter(self) -> Drafter:
        return self.drafter

    def whole_weights(self) -> Named:
        return {n: p.detach() for n, p in self.named.items()}

    def load(self, weights: Named) -> None:
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.copy_(weights[name])


class Sharded:
    """Weights, gradients and optimizer state cut over the ranks (``sharding: fsdp``, FSDP2), one
    gather and one reduce-scatter a part."""

    def __init__(self, drafter: Drafter, make: MakeObjective, dtype: torch.dtype, place: Place):
        if place.world == 1:
            raise UserError(
                "sharding: fsdp with one process has nothing to cut",
                expected="processes or nodes above 1, or sharding: none",
            )
        self.place = place
        self._judge = copy.deepcopy(drafter) if place.rank == 0 else drafter
        objective = make(drafter)
        mesh = dist.device_mesh.init_device_mesh(place.device.type, (place.world,))
        self._objective: Any = fully_shard(
            objective,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            ignored_params={drafter.embed_tokens.weight},
        )
        # Each rank's loss is its share of the update's mean: gradients are summed, not averaged.
        self._objective.set_gradient_divide_factor(1.0)
        self._objective.set_force_sum_reduction_for_comms(True)
        self.named: Named = {
            n.removeprefix("drafter."): p
            for n, p in objective.named_parameters()
            if p.requires_grad
        }

    def start(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def backward(self, *inputs: Any, last: bool) -> Counts:
        self._objective.set_requires_gradient_sync(last)
        loss, counts = self._objective(*inputs)
        loss.backward()
        return counts

    def clip(self, max_norm: float) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(list(self.named.values()), max_norm)
        return float(norm.full_tensor())

    def whole_drafter(self) -> Drafter:
        """The gathered drafter, of use on rank 0 alone; every rank must ask."""
        weights = self.whole_weights()
        if self.place.rank == 0:
            self._judge.load_state_dict(weights, strict=False)
        return self._judge

    def whole_weights(self) -> Named:
        return {n: whole(p) for n, p in self.named.items()}

    def load(self, weights: Named) -> None:
        with torch.no_grad():
            for name, parameter in self.named.items():
                assert isinstance(parameter, torch.distributed.tensor.DTensor)
                value: Tensor = weights[name].to(self.place.device)
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(value, mesh, placements))
