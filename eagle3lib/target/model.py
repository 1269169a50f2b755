"""The target inside this process, through transformers: its states, its head, its embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from safetensors import safe_open
from torch import Tensor, nn

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.target.folder import Target

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_target(target: Target, dtype: str, device: str = "cpu") -> nn.Module:
    """Load the whole target for capture. No remote code is run."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(target.folder, dtype=DTYPES[dtype])
    return model.to(device).eval()


@contextlib.contextmanager
def record_states(model: Any, slots: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Record, during each forward, the input of the layers ``slots`` and of the final norm.

    The list then holds one tensor [B, T, H] a slot and, last, the pre-norm final state: HF
    ``hidden_states[slot]``, and what ``hidden_states[-1]`` is not (that one is after the norm).
    """
    decoder = model.model
    # Slot n, "before layer n", is the input of the final norm (vLLM counts it so too).
    before = [*decoder.layers, decoder.norm]
    modules = [before[slot] for slot in slots] + [decoder.norm]
    recorded: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        recorded.append(arguments[0] if arguments else keywords["hidden_states"])

    hooks = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


class TargetHead:
    """Final norm, head and embedding of a target, read from its files without loading the rest."""

    def __init__(self, target: Target, dtype: str = "float32"):
        self.eps = float(target.config["rms_norm_eps"])
        read = _TensorReader(target.folder)
        wanted = DTYPES[dtype]
        self.embedding: Float[Tensor, "V H"] = read("model.embed_tokens.weight").to(wanted)
        self.norm: Float[Tensor, " H"] = read("model.norm.weight").to(wanted)
        # A config may leave out tie_word_embeddings; the files tell whether there is a head.
        tied = target.config.get("tie_word_embeddings", not read.has("lm_head.weight"))
        self.head: Float[Tensor, "V H"] = (
            self.embedding if tied else read("lm_head.weight").to(wanted)
        )

    def normed(self, last: Float[Tensor, "P H"]) -> Float[Tensor, "P H"]:
        """The final RMSNorm of pre-norm states, its mean in fp32."""
        wide = last.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.norm * scaled.to(self.norm.dtype)

    def logits(self, last: Float[Tensor, "P H"]) -> Float[Tensor, "P V"]:
        return self.normed(last) @ self.head.T

    def greedy(self, last: Float[Tensor, "P H"], chunk: int = 1024) -> Int64[Tensor, " P"]:
        """The target's greedy next token after each state; logits exist ``chunk`` rows at a
        time."""
        return torch.cat([self.logits(part).argmax(-1) for part in last.split(chunk)])

    def greedy_and_logsumexp(
        self, last: Float[Tensor, "P H"], temperature: float = 1.0, chunk: int = 1024
    ) -> tuple[Int64[Tensor, " P"], Float[Tensor, " P"]]:
        """``greedy``, and log sum exp(logits / temperature) over the whole vocabulary, fp32."""
        tokens, sums = [], []
        for part in last.split(chunk):
            logits = self.logits(part).float()
            tokens.append(logits.argmax(-1))
            sums.append((logits / temperature).logsumexp(-1))
        return torch.cat(tokens), torch.cat(sums)


class _TensorReader:
    """One tensor by name out of a folder of safetensors shards (with or without a name prefix)."""

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        self._where: dict[str, Path] = {}
        if index.exists():
            self._where = {k: folder / v for k, v in read_json(index)["weight_map"].items()}
        else:
            for shard in sorted(folder.glob("*.safetensors")):
                with safe_open(shard, framework="pt") as file:
                    self._where |= {name: shard for name in file.keys()}  # noqa: SIM118
        self._folder = folder

    def has(self, name: str) -> bool:
        return bool(self._full_names(name))

    def _full_names(self, name: str) -> list[str]:
        # Multimodal wrappers keep the text model under a prefix, e.g.
        # language_model.model.norm.weight.
        return [full for full in self._where if full == name or full.endswith(f".{name}")]

    def __call__(self, name: str) -> Tensor:
        found = self._full_names(name)
        if not found:
            raise UserError(
                f"the target has no tensor {name}",
                where=self._folder,
                expected="a decoder with embed_tokens, norm and lm_head",
            )
        with safe_open(self._where[found[0]], framework="pt") as file:
            return file.get_tensor(found[0])
