"""Capture through SGLang: forward hooks in its process write states, we read, check, delete.

What SGLang itself returns is not enough (read in 0.5.15 and 0.5.23): ``return_hidden_states`` gives
the last state after the final norm, as JSON; 0.5.23's ``--enable-return-aux-hidden-states`` gives
the slots instead, without the last one. Its ``--forward-hooks`` gives both (``sglang_hooks.py``).
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib.engine.config import EngineConfig
from eagle3lib.engine.launch import check_installed
from eagle3lib.engine.settings import with_settings
from eagle3lib.lab.errors import UserError
from eagle3lib.target.engine import SETTINGS_OF, FromEngine, post, states_of_row, unreadable
from eagle3lib.target.folder import Target
from eagle3lib.target.sglang_hooks import PREFIX

OLDEST = (0, 5, 15)  # the oldest whose hooks, norms and batches were read
_MODULE = "eagle3_sglang_hooks"
_RESERVED_TOKENS = 8  # SGLang keeps six of the context for itself


class FromSglang(FromEngine):
    """Through SGLang's forward hooks; tensor parallel, not pipeline parallel."""

    def _config(self, states: Path) -> EngineConfig:
        config = hooked_config(
            self.target,
            self.layer_ids,
            states,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            extra_flags=self.extra_flags,
        )
        config = with_settings(config, self.settings, SETTINGS_OF)
        check_hooks_run(config)
        shutil.copy(Path(__file__).with_name("sglang_hooks.py"), states / f"{_MODULE}.py")
        return config

    def _one(self, row: list[int]) -> Tensor:
        assert self._server is not None and self._states is not None
        rid = f"{PREFIX}{uuid.uuid4().hex}"
        body = {"rid": rid, "input_ids": row,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0}}  # fmt: skip
        reply = post(f"{self._server.url}/generate", body, self._server)
        finish = (reply.get("meta_info") or {}).get("finish_reason") or {}
        if finish.get("type") == "abort":
            said = finish.get("message", "no reason given")
            raise UserError(f"SGLang gave a row up: {said}", where=self._server.log)
        return read_hooked(self._states / f"{rid}.safetensors", row, len(self.layer_ids))


def hooked_config(
    target: Target,
    layer_ids: list[int],
    states: Path,
    *,
    dtype: str,
    max_model_len: int,
    extra_flags: tuple[str, ...] = (),
) -> EngineConfig:
    """SGLang set up to write the inputs of ``layer_ids`` of each of our requests into ``states``.

    Eager, since a graph runs no hooks, without radix cache and chunks: a request is one forward.
    """
    n = target.num_layers
    hooks = [
        {
            "name": f"eagle3-{layer}",
            "target_modules": [
                "*model.norm" if layer == n else f"*model.layers.{layer}.input_layernorm"
            ],
            "hook_factory": f"{_MODULE}:keep",
            "config": {"layer": layer},
        }
        for layer in layer_ids
    ]
    written = {"layers": layer_ids, "folder": str(states)}
    hooks.append({"name": "eagle3-write", "target_modules": ["logits_processor",
                  "*.logits_processor"], "hook_factory": f"{_MODULE}:write",
                  "config": written})  # fmt: skip
    flags = ("--forward-hooks", json.dumps(hooks), "--chunked-prefill-size", "-1")
    # Fused with an all-reduce, a norm is no call of its module, and no hook runs.
    flags += ("--enforce-disable-flashinfer-allreduce-fusion",)
    return EngineConfig(
        target.folder,
        engine="sglang",
        dtype=dtype,
        max_model_len=max_model_len + _RESERVED_TOKENS,
        modules=states,
        extra_flags=flags + extra_flags,
    )


def check_hooks_run(config: EngineConfig) -> None:
    """Raise ``UserError`` for a version that was not read, and for settings under which no hook
    sees all states."""
    version = check_installed(config)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise UserError(
            f"SGLang {version} is installed",
            expected=f"{'.'.join(map(str, OLDEST))} or later, for its --forward-hooks",
            where=SETTINGS_OF,
            next="make setup-sglang, or capture with source=vllm",
        )
    wrong = [f"compile={config.compile}"] if config.compile else []
    if config.pipeline_parallel > 1:
        wrong.append(f"pipeline_parallel={config.pipeline_parallel}")
    if wrong:
        raise UserError(
            f"{' and '.join(wrong)} among the engine's settings",
            expected="compile=false and one pipeline stage: graphs run no hooks, and the stages "
            "before the last have no head",
            where=SETTINGS_OF,
            next="leave it out; tensor_parallel spreads a target over GPUs",
        )


def read_hooked(path: Path, row: list[int], layers: int) -> Tensor:
    """The states [T, L, H] that the hooks wrote for one row; the file is deleted.

    Raises ``UserError`` when there is none (with the hooks' reason, where they gave one), or it is
    another row's.
    """
    problem = path.with_suffix(".problem")
    if problem.exists():
        said = problem.read_text(encoding="utf-8")
        raise UserError(
            f"SGLang's forward holds no whole states: {said}",
            expected="every token of a request in one eager forward, each norm a module of its own",
            where=path,
            next="leave out settings that fuse norms or share prefixes (--enable-dp-attention, "
            "--enable-flashinfer-allreduce-fusion), or capture with source=vllm",
        )
    if not path.exists():
        raise UserError(
            "SGLang answered and its hooks wrote nothing",
            expected="one file of hidden states for each request",
            where=path.parent,
            next="look for 'Registered forward hook' in its log: a model whose norms are not "
            "model.layers.N.input_layernorm and model.norm can't be captured here; source=vllm can",
        )
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise unreadable(path, error, "the first Traceback") from None
    path.unlink()
    return states_of_row(tensors, path, row, layers)
