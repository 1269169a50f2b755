"""The target inside this process, through transformers: its states, its head, its embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.target.folder import Target
from eagle3lib.target.weights import TensorReader

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def best_device(wanted: str = "auto") -> str:
    """``wanted``, or for "auto" the machine's accelerator, else "cpu". Raises ``UserError`` for a
    device that torch here doesn't have."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        return accelerator.type if accelerator else "cpu"
    kind, _, number = wanted.partition(":")
    there = kind == "cpu" or (accelerator is not None and accelerator.type == kind)
    if not there or (number and int(number) >= torch.accelerator.device_count()):
        raise UserError(
            f"there is no device {wanted!r} here",
            expected=f"cpu{f', {accelerator.type}' if accelerator else ''} or auto",
            next="set parameter 'device'",
        )
    return wanted


def load_target(
    target: Target,
    dtype: str,
    device: str = "cpu",
    *,
    trust_remote_code: bool = False,
    vision: bool = False,
) -> nn.Module:
    """Load the target's text model, every weight of it, for capture.

    Of a multimodal wrapper only the text tower is read, unless ``vision``. Raises ``UserError``
    when transformers doesn't know the architecture and code of the model's folder is not trusted,
    and when a weight is missing (transformers would go on with a random one).
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = text_config(target, trust_remote_code=trust_remote_code)
    if vision:
        config = _wrapper_config(target, config)
    kind = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model, report = kind.from_pretrained(
        target.folder,
        config=config,
        dtype=DTYPES[dtype],
        # The default, sdpa, forgets Gemma 2's cap on the scores (transformers 5.19).
        attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
        key_mapping=_TEXT_TOWER if target.wrapper and not vision else None,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    lacking = sorted(report["missing_keys"]) + sorted(str(k) for k in report["mismatched_keys"])
    if lacking:
        raise UserError(
            f"{len(lacking)} weights are not in the target's files, or of another shape: "
            + ", ".join(lacking[:3]),
            expected=f"every weight of {type(model).__name__}",
            where=target.folder,
            next="download the model again, or capture with source=vllm",
        )
    return model.to(device).eval()


# Names of the text tower's weights in a wrapper's files -> names in the text model alone.
_TEXT_TOWER = {
    r"^(?:model\.)?language_model\.model\.": "model.",
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?!model\.|lm_head\.)": "model.",
}
# Text models that are another's under a name of their own.
_SAME_AS = {"kimi_k2": "deepseek_v3"}


def text_config(target: Target, *, trust_remote_code: bool = False) -> Any:
    """The transformers config of the target's text model."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(target.folder / "config.json")
    inner = raw.get("text_config") if target.wrapper else None
    values = dict(inner or raw)
    # Some wrappers say at the top what concerns the text model's loading.
    for key in ("quantization_config", "tie_word_embeddings"):
        if key in raw and key not in values:
            values[key] = raw[key]
    quantised = values.get("quantization_config") or {}
    if quantised.get("quant_method") == "compressed-tensors":
        # Else weights stay packed until the whole model, head and all, is called for once.
        values["quantization_config"] = quantised | {"dequantize": True}
    kind = str(values.get("model_type", ""))
    kind = _SAME_AS.get(kind, kind)
    if kind in CONFIG_MAPPING:
        values.pop("auto_map", None)
        return CONFIG_MAPPING[kind].from_dict(values | {"model_type": kind})
    if not trust_remote_code or "auto_map" not in raw:
        raise UserError(
            f"transformers knows no model of type {kind!r}",
            expected="a model_type that transformers has a class for",
            where=target.folder / "config.json",
            next="capture with source=vllm if vLLM serves it; or, after reading the folder's "
            "Python files, set trust_remote_code to true",
        )
    return AutoConfig.from_pretrained(target.folder, trust_remote_code=True)


def _wrapper_config(target: Target, text: Any) -> Any:
    """The transformers config of the whole multimodal target around that of its text model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw = read_json(target.folder / "config.json")
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    config.text_config = text
    if getattr(text, "quantization_config", None):
        config.quantization_config = text.quantization_config
    return config


def decoder_of(model: Any) -> Any:
    """The stack of layers with its final norm inside a causal language model.

    Raises ``UserError`` when there is none with ``layers`` and ``norm``.
    """
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise UserError(
            f"the layers of {type(model).__name__} are not where states can be recorded",
            expected="a decoder with .layers and .norm, as Llama, Qwen3, DeepSeek-V3, gpt-oss have",
            next="capture with source=vllm",
        )
    return decoder


@contextlib.contextmanager
def record_states(model: Any, slots: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """Record, during each forward, the input of the layers ``slots`` and of the final norm.

    The list then holds one tensor [B, T, H] a slot, in the order of ``slots``, and, last, the
    pre-norm final state: HF ``hidden_states[slot]``, and what ``hidden_states[-1]`` is not (that
    one is after the norm).
    """
    decoder = decoder_of(model)
    # Slot n, "before layer n", is the input of the final norm (vLLM counts it so too).
    before = [*decoder.layers[: decoder.config.num_hidden_layers], decoder.norm]
    modules = [before[slot] for slot in slots] + [decoder.norm]
    # By place, not by appending: layers run in their own order, whatever that of the slots.
    recorded: list[Tensor] = [torch.empty(0)] * len(modules)

    def keeper(place: int) -> Any:
        def keep(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            recorded[place] = arguments[0] if arguments else keywords["hidden_states"]

        return keep

    hooks = [
        module.register_forward_pre_hook(keeper(place), with_kwargs=True)
        for place, module in enumerate(modules)
    ]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


# Text models whose RMSNorm multiplies by 1 + weight (read in transformers 5.19).
_ONE_PLUS_WEIGHT = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "vaultgemma", "qwen3_next",
    "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
}  # fmt: skip


class TargetHead:
    """Final norm, head and embedding of a target, read from its files without loading the rest.

    Raises ``UserError`` for a final norm that is no RMSNorm.
    """

    def __init__(self, target: Target, dtype: str = "float32"):
        if "rms_norm_eps" not in target.config:
            raise UserError(
                "the target's config names no rms_norm_eps",
                expected="a target with an RMSNorm before its head",
                where=target.folder / "config.json",
            )
        self.eps = float(target.config["rms_norm_eps"])
        self.softcap = target.config.get("final_logit_softcapping")  # Gemma 2
        # Granite divides its logits, Cohere multiplies.
        self.scale = float(target.config.get("logit_scale") or 1.0)
        self.scale /= float(target.config.get("logits_scaling") or 1.0)
        read = TensorReader(target.folder)
        wanted = DTYPES[dtype]
        self.embedding: Float[Tensor, "V H"] = read("model.embed_tokens.weight").to(wanted)
        norm = read("model.norm.weight")
        if target.config.get("model_type") in _ONE_PLUS_WEIGHT:
            norm = norm.float() + 1
        self.norm: Float[Tensor, " H"] = norm.to(wanted)
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
        logits = self.normed(last) @ self.head.T
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if not self.softcap else self.softcap * torch.tanh(logits / self.softcap)

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
