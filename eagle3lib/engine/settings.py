"""Parameters of ``eagle3 serve``: type, default and help, as for the phases.

A phase that starts an engine takes the same words as one text (``with_settings``).
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eagle3lib.engine.command import LOOPBACK
from eagle3lib.engine.config import EngineConfig
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.profile import parse_arguments

_OF_THE_SERVER = ("host", "port", "deadline_s", "stall_s", "log")
# What a phase has parameters of its own for, or must keep equal between its arms.
_OF_THE_PHASE = ("engine", "dtype", "max_model_len", "max_num_seqs", "drafter", "drafter_dtype")
_OF_THE_PHASE += ("num_speculative_tokens", "prefix_cache", "trust_remote_code")


class ServeParams(BaseModel):
    """An empty text means: the engine's own choice."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engine: Literal["vllm", "sglang"] = Field("vllm", description="which engine")
    dtype: str = Field("bfloat16", description="of target and drafter")
    max_model_len: int = Field(4096, ge=1, description="tokens of prompt and answer")
    max_num_seqs: int = Field(16, ge=1, description="requests at once")
    drafter: str = Field("", description="folder of an EAGLE-3 drafter; empty: none")
    drafter_dtype: str = Field("", description="refused if it is not the target's: no flag for it")
    num_speculative_tokens: int = Field(3, ge=1, description="K: depth of a chain or tree")
    topk: int = Field(1, ge=1, description="SGLang: branches of a drafted tree")
    tree_tokens: int = Field(0, ge=0, description="SGLang: a tree's tokens without root; 0: K*topk")
    attention_backend: str = Field("", description="by the engine's name for it")
    drafter_attention_backend: str = Field("", description="likewise, the drafter's own")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share each layer")
    pipeline_parallel: int = Field(1, ge=1, description="GPUs that share the layers")
    data_parallel: int = Field(1, ge=1, description="copies of the target")
    quantization: str = Field("", description="empty: what the target's config.json says")
    drafter_quantization: str = Field("", description="empty: the drafter is not quantised")
    reasoning_parser: str = Field("", description="the target's, e.g. kimi_k2")
    tool_parser: str = Field("", description="the target's, for tool calls")
    memory_share: float = Field(0.0, ge=0, le=1, description="of each GPU; 0: the engine's own")
    kv_cache_gb: int = Field(1, ge=1, description="on a CPU")
    compile: bool = Field(True, description="compile and capture graphs; false: eager")
    prefix_cache: bool = Field(True, description="reuse the states of equal beginnings")
    p2p: bool = Field(True, description="GPUs copy to each other directly")
    trust_remote_code: bool = Field(False, description="run code out of the target's folder")
    host: str = Field(LOOPBACK, description="address to listen on; others need an API key")
    port: int = Field(0, ge=0, le=65535, description="0: any that is free")
    deadline_s: float = Field(3600.0, gt=0, description="for the whole start")
    stall_s: float = Field(180.0, gt=0, description="no sign of life for so long is a hang")
    log: str = Field("", description="its log file; empty: in outputs/.servers")

    @classmethod
    def checked(cls, values: dict[str, Any], where: str = "the command line") -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise UserError("\n".join(lines), where=where, next="eagle3 serve --settings") from None

    def config(self, target: Path, flags: tuple[str, ...] = ()) -> EngineConfig:
        """The engine's settings; ``flags`` are passed through as they are."""
        values = self.model_dump(exclude=set(_OF_THE_SERVER))
        given = {name: value for name, value in values.items() if value not in ("", 0, 0.0)}
        # False equals 0: switches that are off are settings all the same.
        given |= {name: value for name, value in values.items() if value is False}
        if self.drafter:
            given["drafter"] = Path(self.drafter)
        return EngineConfig(target=target, extra_flags=flags, **given)


def split_words(
    words: list[str], where: str = "the command line"
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """NAME=VALUE words, and from the first word with a dash on the engine's own flags."""
    at = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    for word in words[:at]:
        if "=" not in word:
            raise UserError(
                f"{word!r} is not NAME=VALUE",
                where=where,
                next="eagle3 serve --settings lists the names; flags of the engine come after --",
            )
    flags = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    return parse_arguments(words[:at])[1], tuple(flags)


def with_settings(config: EngineConfig, text: str, where: str) -> EngineConfig:
    """``config`` with the settings of ``text`` ("memory_share=0.4 -- --flag") on top.

    Raises ``UserError`` naming ``where`` for words that ``eagle3 serve`` would refuse too, and for
    what the phase has parameters of its own for.
    """
    try:
        values, flags = split_words(shlex.split(text), where)
    except ValueError as error:  # an open quotation mark
        raise UserError(f"{text!r}: {error}", where=where) from None
    taken = sorted(set(values) & {*_OF_THE_PHASE, *_OF_THE_SERVER})
    if taken:
        raise UserError(
            f"{', '.join(taken)} among the engine's settings",
            expected="parameters of the phase for these",
            where=where,
        )
    params = ServeParams.checked(values, where)
    given = {name: getattr(params, name) for name in values}
    return replace(config, **given, extra_flags=config.extra_flags + flags)
