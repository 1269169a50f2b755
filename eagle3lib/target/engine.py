"""Capture through vLLM: a server beside this process writes states, we read, check, delete.

vLLM's speculative method ``extract_hidden_states`` keeps the wanted layers' inputs in its cache and
its connector writes one file a request. Layer id k is HF ``hidden_states[k]``; id n, the number of
layers, is the pre-norm last state. Ids come back sorted, whatever the order asked. Several requests
run at once; answers are paired by token ids, never by order.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib.engine.config import SERVED_NAME, EngineConfig
from eagle3lib.engine.launch import EngineServer
from eagle3lib.engine.settings import with_settings
from eagle3lib.lab.errors import UserError
from eagle3lib.target.folder import Target

REQUEST_DEADLINE_S = 600.0


def engine_config(
    target: Target,
    layer_ids: list[int],
    states: Path,
    *,
    dtype: str,
    max_model_len: int,
    on_gpu: bool,
    extra_flags: tuple[str, ...] = (),
) -> EngineConfig:
    """vLLM set up to write the inputs of ``layer_ids`` of each request's prompt into ``states``.

    The prefix cache is off in every ``EngineConfig``: of a prompt found there only the rest would
    be written.
    """
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(states)},
    }
    if not on_gpu:
        transfer["kv_connector"] = "CpuHiddenStatesConnector"
        transfer["kv_connector_module_path"] = "eagle3lib.target.vllm_connector"
    flags = ("--speculative-config", json.dumps(speculative))
    flags += ("--kv-transfer-config", json.dumps(transfer))
    return EngineConfig(
        target.folder, dtype=dtype, max_model_len=max_model_len, extra_flags=flags + extra_flags
    )


@dataclass
class FromVllm:
    """A ``StateSource`` that starts vLLM when the first shard needs it and stops it at the end."""

    target: Target
    slots: tuple[int, ...]
    dtype: str
    work: Path  # the server's log, and files of states on their way
    max_model_len: int  # of the longest row and the one token that is asked for
    at_once: int = 8
    extra_flags: tuple[str, ...] = ()
    settings: str = ""  # of ``eagle3 serve``
    say: Callable[[str], None] = print
    cells: int = 0
    _server: EngineServer | None = field(default=None, init=False)
    _states: Path | None = field(default=None, init=False)

    def __enter__(self) -> FromVllm:
        on_gpu = torch.accelerator.is_available()
        check_cpu_mla(self.target, self.dtype, on_gpu=on_gpu)
        self.work.mkdir(parents=True, exist_ok=True)
        self._states = Path(tempfile.mkdtemp(prefix=".from-engine-", dir=self.work.resolve()))
        config = engine_config(
            self.target,
            self.layer_ids,
            self._states,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            on_gpu=on_gpu,
            extra_flags=self.extra_flags,
        )
        config = with_settings(config, self.settings, "02_capture_hidden_states.engine_settings")
        self._server = EngineServer(config, log=self.work / "vllm.log", say=self.say)
        try:
            self._server.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.stop()
        if self._states is not None:
            shutil.rmtree(self._states, ignore_errors=True)
        self._server = self._states = None

    @property
    def layer_ids(self) -> list[int]:
        """What is asked of vLLM: the slots and the pre-norm last state, sorted, each once."""
        return sorted({*self.slots, self.target.num_layers})

    def states(self, rows: list[list[int]]) -> list[Tensor]:
        """States [T, S + 1, H] of each row, slots in the order asked, then ``last``."""
        columns = [self.layer_ids.index(i) for i in (*self.slots, self.target.num_layers)]
        with ThreadPoolExecutor(self.at_once) as pool:
            made = list(pool.map(self._one, rows))
        self.cells += sum(len(row) for row in rows)
        return [states[:, columns] for states in made]

    def _one(self, row: list[int]) -> Tensor:
        assert self._server is not None
        body = {"model": SERVED_NAME, "prompt": row, "max_tokens": 1, "temperature": 0}
        reply = _post(f"{self._server.url}/v1/completions", body, self._server.log)
        named = (reply.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not named:
            raise UserError(
                "vLLM answered without hidden states",
                expected="kv_transfer_params.hidden_states_path in its reply",
                where=self._server.log,
                next="use a vLLM that has extract_hidden_states (0.32 does), or capture with "
                "source=transformers",
            )
        return read_states(Path(named), row, len(self.layer_ids))


def check_cpu_mla(target: Target, dtype: str, *, on_gpu: bool) -> None:
    """Raise ``UserError`` for what kills vLLM 0.32 on a CPU after minutes of loading: its kernel
    for latent attention packs weights of 16 bits or fewer."""
    switched_off = os.environ.get("VLLM_MLA_DISABLE", "0") == "1"
    if "kv_lora_rank" in target.config and dtype == "float32" and not (on_gpu or switched_off):
        raise UserError(
            "vLLM on a CPU has no latent attention (MLA) in float32",
            expected="dtype=bfloat16, or latent attention written out",
            where=target.folder / "config.json",
            next="set dtype to bfloat16, or export VLLM_MLA_DISABLE=1",
        )


def read_states(path: Path, row: list[int], layers: int) -> Tensor:
    """The states [T, L, H] that the engine wrote for one row; the files are deleted.

    Waits for the writer's lock. Raises ``UserError`` when the file is missing, cut short, or holds
    another row's tokens or fewer states than tokens.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # the writer holds it until the file is whole
            tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the engine's hidden states can't be read: {error}",
            where=path,
            next="look for a full disk, and for 'Hidden-states write failed' in the engine's log",
        ) from None
    path.unlink()
    lock.unlink()
    states, ids = tensors["hidden_states"], tensors["token_ids"].tolist()
    if ids != row:
        raise UserError(
            f"the engine wrote the states of other tokens: {len(ids)}, sent {len(row)}",
            expected="the very token ids that were sent",
            where=path,
        )
    if tuple(states.shape[:2]) != (len(row), layers):
        raise UserError(
            f"the engine wrote states of shape {list(states.shape)} for {len(row)} tokens",
            expected=f"[{len(row)}, {layers}, hidden size]",
            where=path,
            next="switch the engine's prefix cache off, and chunked prefill too "
            "(--no-enable-prefix-caching --no-enable-chunked-prefill)",
        )
    return states


def _post(url: str, body: dict[str, Any], log: Path) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        raise UserError(f"vLLM refused a row: {said}", where=log) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"vLLM did not answer: {error}",
            where=log,
            next="read the log from its first ERROR on; run the phase again, shards are kept",
        ) from None
