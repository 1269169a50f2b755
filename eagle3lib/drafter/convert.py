"""Anybody's drafter folder as another one: the same tensors, bit for bit, under the names and keys
that the goal reads; or one message that says what the goal can't express.

    both           SGLang/SpecForge style, layer ids for each engine where it looks
    vllm, sglang   the same for one of them: what only the other can't express is let through
    speculators    speculators style, ``layers.0.*``

Keys of the source that neither style knows are carried over as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3lib.drafter.checkpoint import check_tensors, expected_shapes, same_embedding, vocab_map
from eagle3lib.drafter.checks import check_drafter_config, check_servable
from eagle3lib.drafter.config import OPTIONS, DrafterConfig
from eagle3lib.drafter.formats import IDS, serving_config
from eagle3lib.drafter.read_config import flat_config, is_speculators, read_drafter_config
from eagle3lib.drafter.weights import read_weights, write_weights
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, replace_folder, write_json
from eagle3lib.lab.finding import Finding, raise_errors
from eagle3lib.target.folder import Target
from eagle3lib.target.model import TargetHead

Goal = Literal["both", "vllm", "sglang", "speculators"]
GOALS: tuple[Goal, ...] = ("both", "vllm", "sglang", "speculators")
_EMBEDDING = "embed_tokens.weight"
# Keys that say something about style, names or place, and are written anew for the goal.
_OF_A_STYLE = {
    "architectures", "auto_map", "model_type", "transformer_layer_config", "speculators_config",
    "speculators_model_type", "speculators_version", "eagle_config", "use_aux_norm", "rope_scaling",
    "rope_theta", "rope_parameters", "dtype", "torch_dtype", "transformers_version", IDS, *OPTIONS,
}  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A drafter's folder as it was read: nothing rounded, nothing made up."""

    folder: Path
    raw: dict[str, Any]
    config: DrafterConfig
    tensors: dict[str, Tensor]
    where: str

    @property
    def dtype(self) -> str:
        """Of the weights, which may not be what the config says."""
        return str(self.tensors["fc.weight"].dtype).removeprefix("torch.")


def convert_drafter(
    source: Path,
    destination: Path,
    goal: Goal,
    target: Target | None = None,
    *,
    max_shard_mib: int | None = None,
) -> Path:
    """Write ``source`` in the goal's style into ``destination``, whole or not at all.

    Without ``target`` the layer ids must stand at the top level, and own embeddings can't be told
    from copies. Raises ``UserError`` with everything that the goal can't express.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(
            "the destination is there already",
            expected="a folder that does not exist, or an empty one",
            where=destination,
            next="name another one, or delete it",
        )
    read = read_source(source, target)
    raise_errors(check_expressible(read, goal, target))
    config = goal_config(read, goal, target)
    tensors = _named(read.tensors, "layers.0." if goal == "speculators" else "midlayer.")

    def build(folder: Path) -> None:
        write_weights(folder, tensors, max_shard_mib)
        write_json(folder / "config.json", config)

    return replace_folder(destination, build)


def read_source(folder: Path, target: Target | None) -> Source:
    """Read and check a folder of any style. Raises ``UserError`` with all that is wrong in it."""
    raw = read_json(folder / "config.json")
    c = flat_config(raw)
    if target is None and not c.get(IDS):
        raise UserError(
            "the config has no layer ids at the top level: what it reads depends on the target",
            expected=f"{IDS}, or the target",
            where=folder / "config.json",
            next="--target TARGET",
        )
    layers = target.num_layers if target else max(c[IDS]) + 1
    config = read_drafter_config(folder, layers)
    if target:
        raise_errors(check_drafter_config(config, target.config))
    tensors, where = read_weights(folder)
    shapes = expected_shapes(config)
    optional = {k: torch.empty(shapes[k], device="meta") for k in (_EMBEDDING, "t2d", "d2t")}
    raise_errors(check_tensors(config, optional | tensors, where))
    vocab_map(tensors, config, where)
    return Source(folder, raw, config, tensors, where)


def check_expressible(read: Source, goal: Goal, target: Target | None) -> list[Finding]:
    """What the goal's readers would do otherwise than the source says, each an error."""
    found = []

    def error(code: str, title: str, evidence: str, remedy: str) -> None:
        found.append(Finding(code, "error", title, evidence, remedy, str(read.folder)))

    for f in check_servable(read.config):
        if f.severity == "error" or (f.code.startswith("sglang-") and goal in ("both", "sglang")):
            error(f.code, f.title, f.evidence, f.remedy)
    if goal == "speculators" and read.config.mla:
        error(
            "speculators-mla",
            "an MLA-type drafter in speculators style",
            "vLLM's reader of that style knows Llama and Qwen3 layers alone",
            "--to both",
        )
    if goal == "speculators" and target is None and not is_speculators(read.raw):
        error(
            "speculators-target",
            "speculators style names its target",
            "the target, for speculators_config.verifier",
            "--target TARGET",
        )
    if goal in ("both", "sglang"):
        found += _check_for_sglang(read, target)
    return found


def _check_for_sglang(read: Source, target: Target | None) -> list[Finding]:
    found, c = [], flat_config(read.raw)

    def error(code: str, title: str, evidence: str) -> None:
        found.append(Finding(code, "error", title, evidence, "--to vllm", str(read.folder)))

    if "sliding_attention" in (c.get("layer_types") or []) or c.get("use_sliding_window"):
        error(
            "sglang-sliding-window",
            f"a layer that looks back {c.get('sliding_window')} tokens",
            "SGLang's drafters look back without limit",
        )
    if c.get("logit_scale", 1.0) != 1.0:
        error("sglang-logit-scale", f"logit_scale {c['logit_scale']}", "SGLang reads none")
    own = read.tensors.get(_EMBEDDING)
    if own is None:
        return found
    if target is None:
        error(
            "embeddings-unknown",
            "the folder has embeddings: copies of the target's, or the drafter's own?",
            "SGLang replaces them by the target's; --target TARGET tells",
        )
    elif not same_embedding(own, TargetHead(target).embedding):
        error(
            "sglang-embeddings",
            "the drafter has embeddings of its own",
            "SGLang replaces them by the target's",
        )
    return found


def goal_config(read: Source, goal: Goal, target: Target | None) -> dict[str, Any]:
    """``config.json`` in the goal's style, with the source's other keys carried over."""
    known = target.config if target else None
    for_sglang = goal in ("both", "sglang")
    flat = serving_config(read.config, read.dtype, known, for_sglang=for_sglang)
    carried = {k: v for k, v in flat_config(read.raw).items() if k not in _OF_A_STYLE}
    if goal != "speculators":
        return carried | flat
    return _speculators_config(read, carried | flat, target)


def _speculators_config(
    read: Source, flat: dict[str, Any], target: Target | None
) -> dict[str, Any]:
    own = ("draft_vocab_size", "target_hidden_size", IDS, *OPTIONS)
    outside = ("eagle_config", "num_aux_hidden_states", "torch_dtype", "rope_theta", "rope_scaling")
    layer = {k: v for k, v in flat.items() if k not in (*own, *outside, "architectures")}
    methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
    verifier = {
        "name_or_path": target.name if target else None,
        "architectures": target.config.get("architectures") if target else None,
    }
    made = {"algorithm": "eagle3", "default_proposal_method": "greedy",
            "proposal_methods": methods, "verifier": verifier}  # fmt: skip
    return {k: flat[k] for k in own} | {
        "architectures": ["Eagle3Speculator"],
        "dtype": flat["torch_dtype"],
        "speculators_model_type": "eagle3",
        "speculators_config": read.raw.get("speculators_config") or made,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer | {"torch_dtype": flat["torch_dtype"]},
    }


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The layer's tensors under the goal's name of it; a copy of what shares memory, which
    safetensors refuses."""
    named = {}
    for name, value in tensors.items():
        new = prefix + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
        named[new] = value.contiguous().clone() if value.storage_offset() else value.contiguous()
    return named
