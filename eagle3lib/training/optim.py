"""Optimizers, the learning rate as a function of the update, and their state as plain tensors.

There is no scheduler object: a rate that depends on nothing but the update's number can't be
restored wrongly (a resumed run of another trainer warmed up twice: speculators#900).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.params import TrainParams

Named = dict[str, Tensor]
_BETAS = (0.9, 0.95)  # EAGLE-3, arXiv 2503.01840, section 5


def make_optimizers(named: Named, cfg: TrainParams) -> list[torch.optim.Optimizer]:
    """AdamW without decay on norms; with ``optimizer: muon`` the hidden matrices go to Muon.

    Muon's update is scaled to the size of AdamW's (``match_rms_adamw``, arXiv 2502.16982), so both
    take the same learning rate. The head stays with AdamW: it is an embedding of tokens.
    """
    hidden = [
        p for n, p in named.items() if p.ndim == 2 and "lm_head" not in n and "embed" not in n
    ]
    muon = hidden if cfg.optimizer == "muon" else []
    taken = {id(p) for p in muon}
    rest = [p for p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    fused = not any(isinstance(p, DTensor) for p in rest)
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=_BETAS, fused=fused)
    ]
    if muon:
        made.append(
            torch.optim.Muon(
                muon,
                lr=cfg.learning_rate,
                weight_decay=cfg.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return made


def rate_share(update: int, updates: int, warmup_share: float) -> float:
    """Learning rate of update ``update`` (from 0) over its peak: linear up, then half a cosine."""
    warmup = math.ceil(warmup_share * updates)
    if update < warmup:
        return (update + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup)))


def set_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (every rank must ask), any other as it is; detached."""
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def state_tensors(optimizers: list[torch.optim.Optimizer], named: Named) -> Named:
    """The optimizers' state by ``parameter name/state name``, gathered, so that it does not depend
    on the number of processes."""
    found = {}
    for name, parameter in named.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = whole(value).cpu().contiguous()
    return found


def load_state(
    optimizers: list[torch.optim.Optimizer], named: Named, tensors: Named, where: object
) -> None:
    """Put ``state_tensors`` back. Raises ``UserError`` where one is missing or misshapen."""
    for optimizer in optimizers:
        keys = _state_keys(optimizer)
        for name in _names_of(optimizer, named):
            parameter = named[name]
            for key in keys:
                value = tensors.get(f"{name}/{key}")
                shape = () if key == "step" else tuple(parameter.shape)
                if value is None or tuple(value.shape) != shape:
                    raise UserError(
                        f"the checkpoint's optimizer has {name}/{key} "
                        f"{'missing' if value is None else tuple(value.shape)}",
                        expected=f"shape {shape} of {type(optimizer).__name__}",
                        where=where,
                        next="delete this folder to train from the start",
                    )
                optimizer.state[parameter][key] = _placed(value, parameter, key, optimizer)


def _state_keys(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    muon = isinstance(optimizer, torch.optim.Muon)
    return ("momentum_buffer",) if muon else ("step", "exp_avg", "exp_avg_sq")


def _names_of(optimizer: torch.optim.Optimizer, named: Named) -> list[str]:
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name, parameter in named.items() if id(parameter) in mine]


def _placed(value: Tensor, like: Tensor, key: str, optimizer: torch.optim.Optimizer) -> Tensor:
    if key == "step":  # AdamW counts on the host unless it is fused
        return value.to(like.device) if optimizer.defaults.get("fused") else value
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return value.to(like.device)
