"""Read anybody's drafter folder, write our own: config.json and model.safetensors.

What is written is the SGLang/SpecForge style, which both engines read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib.drafter.checks import check_drafter_config, check_servable
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.formats import serving_config
from eagle3lib.drafter.model import Drafter
from eagle3lib.drafter.read_config import check_config_file, read_drafter_config
from eagle3lib.drafter.vocab import VocabMap, check_offsets, check_vocab_map
from eagle3lib.drafter.weights import read_weights, write_weights
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json
from eagle3lib.lab.finding import Finding, raise_errors

_EMBEDDING = "embed_tokens.weight"


def drafter_tensors(drafter: Drafter, dtype: torch.dtype, *, embeddings: bool) -> dict[str, Tensor]:
    """The checkpoint's tensors. Without embeddings an engine uses the target's (SGLang always
    does)."""
    tensors = {}
    for name, value in drafter.state_dict().items():
        if name.startswith("_rotary") or (name.startswith("embed_tokens") and not embeddings):
            continue
        tensors[name] = (value.to(dtype) if value.is_floating_point() else value).contiguous()
    return tensors


def write_drafter(
    folder: Path,
    drafter: Drafter,
    dtype: torch.dtype,
    target_config: dict[str, Any] | None = None,
    *,
    for_sglang: bool = True,
    max_shard_mib: int = 0,
) -> None:
    """Write a serving folder into ``folder`` (made by ``replace_folder``, so it appears whole).

    With ``target_config`` the layer ids are those that both engines read right for the target's
    class, which raises ``UserError`` where there are none (without ``for_sglang``, vLLM's alone).
    The whole vocabulary needs no map, and
    gets none: vLLM has no place for a d2t then.
    """
    c = drafter.config
    tensors = drafter_tensors(drafter, dtype, embeddings=c.own_embeddings)
    if c.draft_vocab_size == c.vocab_size:
        tensors = {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}
    write_weights(folder, tensors, max_shard_mib)
    name = str(dtype).removeprefix("torch.")
    written = c.as_hf_config(name)
    if target_config:
        written = serving_config(c, name, target_config, for_sglang=for_sglang)
    write_json(folder / "config.json", written)


def read_drafter(
    folder: Path, target_config: dict[str, Any], target_embedding: Tensor, dtype: torch.dtype
) -> Drafter:
    """Load a Llama-type or MLA-type drafter of either style; raises ``UserError`` naming what is
    missing, extra or misshapen. Without embeddings of its own it is given the target's."""
    config = read_drafter_config(folder, target_config["num_hidden_layers"])
    raise_errors(check_drafter_config(config, target_config))
    tensors, where = read_weights(folder)
    tensors |= vocab_map(tensors, config, where)
    own = tensors.get(_EMBEDDING)
    config = replace(
        config, own_embeddings=own is not None and not same_embedding(own, target_embedding)
    )
    tensors.setdefault(_EMBEDDING, target_embedding)
    raise_errors(check_tensors(config, tensors, where))
    drafter = Drafter(config)
    drafter.load_state_dict(tensors)
    return drafter.to(dtype).eval()


def check_drafter_folder(
    folder: Path, target_config: dict[str, Any], target_embedding: Tensor
) -> list[Finding]:
    """Everything that is wrong or to be known about a drafter's folder, warnings included, for
    people; ``read_drafter`` raises the errors among them."""
    path = folder / "config.json"
    findings = check_config_file(read_json(path), target_config["num_hidden_layers"], str(path))
    if any(f.severity == "error" for f in findings):
        return findings
    config = read_drafter_config(folder, target_config["num_hidden_layers"])
    tensors, where = read_weights(folder)
    own = tensors.get(_EMBEDDING)
    config = replace(
        config, own_embeddings=own is not None and not same_embedding(own, target_embedding)
    )
    findings += check_drafter_config(config, target_config) + check_servable(config)
    shapes = expected_shapes(config)
    absent = {k: torch.empty(shapes[k], device="meta") for k in (_EMBEDDING, "d2t", "t2d")}
    findings += check_tensors(config, absent | tensors, where)
    if "d2t" in tensors and "t2d" in tensors:
        findings += check_vocab_map(tensors["d2t"], tensors["t2d"], where)
    elif "d2t" in tensors:
        findings += _check_dtype(tensors["d2t"], where)
        findings += check_offsets(tensors["d2t"], config.vocab_size, where)
    elif config.draft_vocab_size != config.vocab_size:
        findings.append(_no_map(where))
    return findings


def _check_dtype(d2t: Tensor, where: str) -> list[Finding]:
    if d2t.dtype == torch.int64:
        return []
    return [
        Finding("vocab-map", "error", f"d2t is {d2t.dtype}", "int64", "store it as int64", where)
    ]


def _no_map(where: str) -> Finding:
    return Finding(
        "vocab-map-missing",
        "error",
        "the drafter has a reduced vocabulary but no d2t tensor",
        "d2t [draft_vocab_size] int64",
        "export it again: engines would silently use ids 0..D-1",
        where,
    )


def same_embedding(own: Tensor, target: Tensor) -> bool:
    """Equal in the checkpoint's dtype: a copy of the target's, rounded, is no embedding of its
    own."""
    return own.shape == target.shape and torch.equal(own, target.to(own.dtype))


def vocab_map(tensors: dict[str, Tensor], config: DrafterConfig, where: str) -> dict[str, Tensor]:
    """d2t and t2d, checked; made where they follow from what is there."""
    size, whole = config.draft_vocab_size, config.vocab_size
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if size != whole:
            raise_errors([_no_map(where)])
        d2t = torch.zeros(whole, dtype=torch.int64)
    findings = _wrong_size("d2t", d2t, size, "draft_vocab_size", where)
    findings += _check_dtype(d2t, where)
    if t2d is not None:
        findings += _wrong_size("t2d", t2d, whole, "vocab_size", where)
    raise_errors(findings or check_offsets(d2t, whole, where))
    if t2d is None:
        t2d = torch.zeros(whole, dtype=torch.bool)
        t2d[torch.arange(size) + d2t] = True
    raise_errors(check_vocab_map(d2t, t2d, where))
    return {"d2t": d2t, "t2d": t2d.to(torch.bool)}


def _wrong_size(name: str, found: Tensor, size: int, key: str, where: str) -> list[Finding]:
    if tuple(found.shape) == (size,):
        return []
    return [
        Finding(
            "vocab-map-size",
            "error",
            f"tensor {name} is {tuple(found.shape)}",
            f"{(size,)}, {key} of config.json",
            "use map and config of one export",
            where,
        )
    ]


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of a drafter, without making it."""
    with torch.device("meta"):
        state = Drafter(config).state_dict()
    return {k: tuple(v.shape) for k, v in state.items() if not k.startswith("_rotary")}


def check_tensors(config: DrafterConfig, tensors: dict[str, Tensor], where: str) -> list[Finding]:
    """Names and shapes of a checkpoint against the model of its own config: (name, found,
    expected)."""
    expected = expected_shapes(config)
    kind = f"{config.kind}-type drafter, options: {', '.join(config.options) or 'none'}"
    findings = []
    for name in sorted(expected.keys() - tensors.keys()):
        findings.append(
            Finding(
                "tensor-missing",
                "error",
                f"tensor {name} is missing",
                f"shape {expected[name]}, in a {kind}",
                "export it again, or correct the options in config.json",
                where,
            )
        )
    for name in sorted(tensors.keys() - expected.keys()):
        findings.append(
            Finding(
                "tensor-unknown",
                "error",
                f"tensor {name} has no place in this model",
                f"a {kind}",
                "its config.json lacks an option that it was trained with, or it is of a kind that "
                "this version does not read",
                where,
            )
        )
    for name in sorted(expected.keys() & tensors.keys()):
        found = tuple(tensors[name].shape)
        if found != expected[name]:
            findings.append(
                Finding(
                    "tensor-shape",
                    "error",
                    f"tensor {name} is {found}, expected {expected[name]}",
                    f"{expected[name]}, from config.json",
                    "use weights and config of one export",
                    where,
                )
            )
    return findings


def set_vocab(drafter: Drafter, vocab: VocabMap) -> None:
    """Give a drafter its map. Raises ``UserError`` for a map of another size."""
    sizes = (len(drafter.d2t), len(drafter.t2d)), (len(vocab.d2t), len(vocab.t2d))
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the vocabulary map holds {sizes[1][0]} of {sizes[1][1]} tokens",
            expected=f"{sizes[0][0]} of {sizes[0][1]}, as the drafter's head and target",
            next="build the map for this target and size: eagle3 run PROFILE 03",
        )
    drafter.d2t.copy_(vocab.d2t)
    drafter.t2d.copy_(vocab.t2d)
