"""Capture through an engine: a server beside this process writes states, we read, check, delete.

vLLM's speculative method ``extract_hidden_states`` keeps the wanted layers' inputs in its cache and
its connector writes one file a request. Layer id k is HF ``hidden_states[k]``; id n, the number of
layers, is the pre-norm last state. Ids come back sorted, whatever the order asked. Several requests
run at once; answers are paired by token ids, never by order. SGLang: ``sglang_source.py``.
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
SETTINGS_OF = "02_capture_hidden_states.engine_settings"


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
class FromEngine:
    """A ``StateSource`` that starts an engine when the first shard needs it and stops it at the
    end. ``_config`` and ``_one`` are the engine's own."""

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
    shows_images = False  # rows are sent as token ids, which no image can go along with
    _server: EngineServer | None = field(default=None, init=False)
    _states: Path | None = field(default=None, init=False)

    def _config(self, states: Path) -> EngineConfig:
        """The engine set up to write states into ``states``."""
        raise NotImplementedError

    def _one(self, row: list[int]) -> Tensor:
        """The states [T, L, H] of a row, layers as in ``layer_ids``."""
        raise NotImplementedError

    def __enter__(self) -> FromEngine:
        self.work.mkdir(parents=True, exist_ok=True)
        self._states = Path(tempfile.mkdtemp(prefix=".from-engine-", dir=self.work.resolve()))
        try:
            config = self._config(self._states)
            self._server = EngineServer(
                config, log=self.work / f"{config.engine}.log", say=self.say
            )
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
        """What is asked of the engine: the slots and the pre-norm last state, sorted, each once."""
        return sorted({*self.slots, self.target.num_layers})

    def states(
        self, rows: list[list[int]], pictures: list[list[str]] | None = None
    ) -> list[Tensor]:
        """States [T, S + 1, H] of each row, slots in the order asked, then ``last``."""
        assert not pictures, "an engine is shown no images"
        columns = [self.layer_ids.index(i) for i in (*self.slots, self.target.num_layers)]
        with ThreadPoolExecutor(self.at_once) as pool:
            made = list(pool.map(self._one, rows))
        self.cells += sum(len(row) for row in rows)
        return [states[:, columns] for states in made]


class FromVllm(FromEngine):
    """Through vLLM's ``extract_hidden_states``."""

    def _config(self, states: Path) -> EngineConfig:
        on_gpu = torch.accelerator.is_available()
        check_cpu_mla(self.target, self.dtype, on_gpu=on_gpu)
        config = engine_config(
            self.target,
            self.layer_ids,
            states,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            on_gpu=on_gpu,
            extra_flags=self.extra_flags,
        )
        return with_settings(config, self.settings, SETTINGS_OF)

    def _one(self, row: list[int]) -> Tensor:
        assert self._server is not None
        body = {"model": SERVED_NAME, "prompt": row, "max_tokens": 1, "temperature": 0}
        reply = post(f"{self._server.url}/v1/completions", body, self._server)
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
    """The states [T, L, H] that vLLM wrote for one row; the files are deleted.

    Waits for the writer's lock. Raises ``UserError`` when the file is missing, cut short, or holds
    another row's tokens or fewer states than tokens.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        with lock.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_SH)  # the writer holds it until the file is whole
            tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error, "'Hidden-states write failed'") from None
    path.unlink()
    lock.unlink()
    return states_of_row(tensors, path, row, layers)


def unreadable(path: Path, error: Exception, said: str) -> UserError:
    return UserError(
        f"the engine's hidden states can't be read: {error}",
        where=path,
        next=f"look for a full disk, and for {said} in the engine's log",
    )


def states_of_row(tensors: dict[str, Tensor], path: Path, row: list[int], layers: int) -> Tensor:
    """``hidden_states`` [T, L, H] of what an engine wrote, if they are this row's, and whole."""
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


def post(url: str, body: dict[str, Any], server: EngineServer) -> dict[str, Any]:
    """The engine's JSON reply. Raises ``UserError`` with what it said instead of one."""
    name = server.config.engine
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_DEADLINE_S) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
        raise UserError(f"{name} refused a row: {said}", where=server.log) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{name} did not answer: {error}",
            where=server.log,
            next="read the log from its first ERROR on; run the phase again, shards are kept",
        ) from None
