"""What SGLang runs inside its own process so that hidden states come out: forward hooks.

SGLang attaches hooks by its flag ``--forward-hooks`` (0.5.15 and 0.5.23, ``hook_manager.py``), and
imports this file, copied into a folder on its path, to get them; nothing else of this package is
there. A norm in SGLang takes ``(x, residual)`` and gives ``(normed, x + residual)``: the second is
the state before that norm, complete after the all-reduces. So slot k is read at the input norm of
layer k and the pre-norm last state at the final norm, whatever ids the version gives to layers.

One file a request, named by its ``rid``: hidden_states [T, L, H] in the order of the layers,
token_ids [T]; or RID.problem, a text, where a request can't be written. It is there before the
request is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PREFIX = "eagle3-"  # of our requests' ids; a server asks itself things too

_seen: dict[int, torch.Tensor] = {}  # layer -> states of the forward that runs


def keep(config: dict[str, Any]) -> Callable[..., None]:
    """The hook of one norm; ``config``: ``layer``, the HF index of the state before it."""

    def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        state = output[1] if isinstance(output, tuple) else arguments[0]
        _seen[config["layer"]] = state.detach().clone()  # SGLang adds into it, further on

    return hook


def write(config: dict[str, Any]) -> Callable[..., None]:
    """The hook of the logits processor, which knows whose tokens a forward held; ``config``:
    ``layers`` and ``folder``."""
    layers, folder = list(config["layers"]), Path(config["folder"])

    def hook(module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        seen = dict(_seen)
        _seen.clear()
        batch = next((a for a in arguments if hasattr(a, "rids")), None)
        if batch is None or not batch.forward_mode.is_extend() or not batch.rids:
            return
        if not any(rid.startswith(PREFIX) for rid in batch.rids) or not _writes():
            return
        lengths = [int(n) for n in batch.extend_seq_lens_cpu]
        before = [int(n) for n in batch.extend_prefix_lens_cpu]
        ids = batch.input_ids.cpu().long()
        problem = _problem(seen, layers, sum(lengths))
        for place, rid in enumerate(batch.rids):
            if not rid.startswith(PREFIX):
                continue
            own = problem or (f"its first {before[place]} tokens were not computed anew"
                              if before[place] else "")  # fmt: skip
            start = sum(lengths[:place])
            rows = slice(start, start + lengths[place])
            _write_one(folder, rid, own, seen, layers, rows, ids[rows])

    return hook


def _writes() -> bool:
    """Each rank of a tensor-parallel target holds the whole states; one of them writes."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not there or torch.distributed.get_rank() == 0


def _problem(seen: dict[int, torch.Tensor], layers: list[int], tokens: int) -> str:
    lacking = [layer for layer in layers if layer not in seen]
    if lacking:
        return f"no state passed the norm before layers {lacking}"
    rows = {len(seen[layer]) for layer in layers}
    return "" if rows == {tokens} else f"{sorted(rows)} states for {tokens} tokens"


def _write_one(
    folder: Path,
    rid: str,
    problem: str,
    seen: dict[int, torch.Tensor],
    layers: list[int],
    rows: slice,
    ids: torch.Tensor,
) -> None:
    if problem:
        (folder / f"{rid}.problem").write_text(problem, encoding="utf-8")
        return
    states = torch.stack([seen[layer][rows] for layer in layers], dim=1).cpu()
    temporary = folder / f".{rid}.tmp"
    save_file({"hidden_states": states, "token_ids": ids.clone()}, temporary)
    temporary.replace(folder / f"{rid}.safetensors")
