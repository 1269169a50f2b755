"""vLLM's hidden-states connector where there is no GPU to copy from.

The engine's process loads this module (``kv_connector_module_path``); nothing here imports it. The
stock connector of vLLM 0.32 copies through pinned memory and a CUDA stream, and fails on a CPU
after the first request. Only that copy is replaced.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class _Done:
    """Stands for the CUDA event of a copy that is over when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuHiddenStatesConnector(ExampleHiddenStatesConnector):
    """``ExampleHiddenStatesConnector`` that copies out of a cache in main memory."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.int64)[:, None] * self._block_size
        places = (blocks + torch.arange(self._block_size)).flatten()
        # Indexing copies, so the blocks may be used again before the file is written.
        states = extract_from_kv_cache(self._kv_cache, places, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous(), "token_ids": pending.token_ids.clone()}
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        done: Any = _Done()
        future = self._executor.submit(self._write_tensors, tensors, done, pending.filename, lock)
        self._req_copy_events[pending.req_id] = done
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
