"""Faults planted into a real vLLM: a plugin (entry point ``vllm.general_plugins``), loaded in the
server's own processes, plants the one that ``PLANTED_FAULT`` names. Its drafter is Llama-type, its
requests come one at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "PLANTED_FAULT"
_BLOCK = 16  # tokens in a cached block
_METADATA = "Metadata-Version: 2.1\nName: planted-fault\nVersion: 1\n"
_ENTRY_POINT = "[vllm.general_plugins]\nplanted_fault = engine_faults:plant\n"


def plugin_path(folder: Path) -> str:
    """What ``PYTHONPATH`` holds for a server that is to load this module as a plugin."""
    info = folder / "planted_fault-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(_METADATA)
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    shutil.copy(__file__, folder)
    return str(folder)


def plant() -> None:
    fault = os.environ.get(VARIABLE)
    if fault:
        ENGINE_FAULTS[fault]()


def _slots_reversed() -> None:
    """The target's states reach ``fc`` in reverse order."""
    import torch
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM as Model

    whole = Model.combine_hidden_states

    def reversed_slots(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        chunks = hidden_states.chunk(self.model.num_aux_hidden_states, dim=-1)
        return whole(self, torch.cat(chunks[::-1], dim=-1))

    Model.combine_hidden_states = reversed_slots


def _steps_late() -> None:
    """Draft steps after the first turn by one position too many. The engine counts on from there:
    from the third step on the keys go one cache slot too far as well, and what is read in their
    place (a rejected draft's key, say) no variant knows. The first two drafts are a variant's."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer

    whole, update = Proposer.propose, Proposer._update_positions_dependent_metadata

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.planted_late = True
        return whole(self, *args, **kwargs)

    def late(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = update(self, *args, **kwargs)
        if self.planted_late:  # once a round: each step counts on from the one before
            self.planted_late = False
            positions += 1
        return positions

    Proposer.propose, Proposer._update_positions_dependent_metadata = propose, late


def _prompt_keys_lost() -> None:
    """Draft keys and values of a prompt's whole blocks are zeros, as of a cache that nobody filled.
    More queries than a round drafts are a prompt."""
    import torch
    from vllm.model_executor.models import llama_eagle3

    build = llama_eagle3.LlamaDecoderLayer.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        attention = self.self_attn.attn
        forward = attention.forward

        def without_prefix(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any, **named: Any
        ) -> torch.Tensor:
            if len(q) > _BLOCK:
                cached = (len(q) - 1) // _BLOCK * _BLOCK
                k, v = k.clone(), v.clone()
                k[:cached], v[:cached] = 0, 0
            return forward(q, k, v, *more, **named)

        attention.forward = without_prefix

    llama_eagle3.LlamaDecoderLayer.__init__ = built


ENGINE_FAULTS: dict[str, Callable[[], None]] = {
    "slots reversed": _slots_reversed,
    "draft steps late": _steps_late,
    "prompt's draft keys lost": _prompt_keys_lost,
}
