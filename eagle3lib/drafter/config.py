"""What a drafter is made of, and the layer-id conventions, translated here and nowhere else.

A slot is named by its index into Hugging Face's ``hidden_states``: slot ``i`` is the residual
stream before layer ``i`` (the output of layer ``i - 1``). With ``n`` layers the default slots are
``2, n // 2, n - 3`` (EAGLE-3, arXiv 2503.01840, in the form of its code).

    n = 30:   slot (HF index, "before layer")   2   15   27
              output-of-layer id                1   14   26
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json
from eagle3lib.lab.finding import Finding


def default_slots(num_layers: int) -> tuple[int, int, int]:
    """HF indices of the three captured slots. Small targets whose slots collide are refused."""
    slots = (2, num_layers // 2, num_layers - 3)
    if not 0 < slots[0] < slots[1] < slots[2] < num_layers:
        raise UserError(
            f"a target of {num_layers} layers has no three distinct default slots, found {slots}",
            expected="at least 7 layers, or slots given by hand",
        )
    return slots


def before_layer_ids(slots: tuple[int, ...]) -> list[int]:
    """Slots as vLLM, speculators and EAGLE's own code number them: the layer they are read
    before."""
    return list(slots)


def output_layer_ids(slots: tuple[int, ...]) -> list[int]:
    """Slots as SpecForge and SGLang's Llama targets number them: the layer they come out of."""
    return [slot - 1 for slot in slots]


@dataclass(frozen=True)
class DrafterConfig:
    """A Llama-type EAGLE-3 drafter: one decoder layer of its own width over the target's states."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    slots: tuple[int, ...]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    @classmethod
    def for_target(cls, target_config: dict[str, Any], draft_vocab_size: int) -> DrafterConfig:
        """One layer in the shape of the target's own (the rotary embedding is copied, never
        guessed)."""
        c = target_config
        head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
        return cls(
            hidden_size=c["hidden_size"],
            intermediate_size=c["intermediate_size"],
            num_attention_heads=c["num_attention_heads"],
            num_key_value_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=head_dim,
            rms_norm_eps=c["rms_norm_eps"],
            rope_parameters=rope_parameters(c),
            max_position_embeddings=c["max_position_embeddings"],
            vocab_size=c["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=c["hidden_size"],
            slots=default_slots(c["num_hidden_layers"]),
            bos_token_id=c.get("bos_token_id"),
            eos_token_id=c.get("eos_token_id"),
        )

    @classmethod
    def from_folder(cls, folder: Path, num_target_layers: int) -> DrafterConfig:
        """Read a SGLang/SpecForge-style folder. Raises ``UserError`` for a missing or odd key."""
        path = folder / "config.json"
        c = read_json(path)
        try:
            return cls(
                hidden_size=c["hidden_size"],
                intermediate_size=c["intermediate_size"],
                num_attention_heads=c["num_attention_heads"],
                num_key_value_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
                head_dim=c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
                rms_norm_eps=c["rms_norm_eps"],
                rope_parameters=rope_parameters(c),
                max_position_embeddings=c["max_position_embeddings"],
                vocab_size=c["vocab_size"],
                draft_vocab_size=c.get("draft_vocab_size") or c["vocab_size"],
                target_hidden_size=c.get("target_hidden_size") or c["hidden_size"],
                slots=_read_slots(c, num_target_layers),
                bos_token_id=c.get("bos_token_id"),
                eos_token_id=c.get("eos_token_id"),
            )
        except KeyError as error:
            raise UserError(
                f"the drafter's config lacks {error.args[0]!r}",
                expected="a Llama-type EAGLE-3 config",
                where=path,
                next="export the drafter again with the tool that made it",
            ) from None

    def as_hf_config(self, dtype: str) -> dict[str, Any]:
        """``config.json`` that vLLM reads at the top level and SGLang in ``eagle_config``.

        vLLM wants the layer a slot is read before, SGLang's Llama and Qwen targets the layer it
        comes out of (they add one): the same tensors under two numbers, each where its engine
        looks.
        """
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_parameters["rope_theta"],
            "rope_parameters": self.rope_parameters,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "target_hidden_size": self.target_hidden_size,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "tie_word_embeddings": False,
            "torch_dtype": dtype,
            "eagle_aux_hidden_state_layer_ids": before_layer_ids(self.slots),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": output_layer_ids(self.slots),
                "use_aux_hidden_state": True,
            },
        }


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings of a config in either of its two spellings, as one dict."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    return rope


def _read_slots(config: dict[str, Any], num_target_layers: int) -> tuple[int, ...]:
    """Top-level ids are before-layer ids; nested ones alone are output ids; neither: the
    default."""
    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if top:
        return tuple(top)
    if nested:
        return tuple(i + 1 for i in nested)
    return default_slots(num_target_layers)


def check_drafter_config(config: DrafterConfig, target_config: dict[str, Any]) -> list[Finding]:
    """A drafter's config against its target's: what would load and then never be accepted."""
    findings = []

    def error(code: str, title: str, evidence: str, remedy: str) -> None:
        findings.append(
            Finding(code, "error", title, evidence, remedy, "config.json of the drafter")
        )

    layers = target_config["num_hidden_layers"]
    if list(config.slots) != sorted(set(config.slots)) or not all(
        0 < s <= layers for s in config.slots
    ):
        error(
            "slots-out-of-range",
            f"the drafter's slots are {list(config.slots)}",
            f"distinct, rising ids between 1 and {layers}",
            "export it again for this target",
        )
    for name in ("vocab_size", "hidden_size"):
        mine = config.vocab_size if name == "vocab_size" else config.target_hidden_size
        if mine != target_config[name]:
            error(
                "other-target",
                f"the drafter was made for a target of {name} {mine}",
                f"{name} {target_config[name]}",
                "use a drafter of this very target",
            )
    if config.max_position_embeddings < target_config["max_position_embeddings"]:
        findings.append(
            Finding(
                "short-rotary-table",
                "warning",
                f"the drafter's rotary table ends at {config.max_position_embeddings} positions",
                f"the target's: {target_config['max_position_embeddings']}",
                "keep max_model_len below it",
                "config.json of the drafter",
            )
        )
    return findings
