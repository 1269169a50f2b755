"""What a drafter is made of, and the layer-id conventions, translated here and nowhere else.

A slot is named by its index into Hugging Face's ``hidden_states``: slot ``i`` is the residual
stream before layer ``i`` (the output of layer ``i - 1``). With ``n`` layers the default slots are
``2, n // 2, n - 3`` (EAGLE-3, arXiv 2503.01840, in the form of its code).

    n = 30:   slot (HF index, "before layer")   2   15   27
              output-of-layer id                1   14   26
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eagle3lib.drafter.rope import rope_parameters
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.phase_params import numbers_of

OPTIONS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
LLAMA_ARCHITECTURE, MLA_ARCHITECTURE = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"


def default_slots(num_layers: int) -> tuple[int, int, int]:
    """HF indices of the three captured slots. Small targets whose slots collide are refused."""
    slots = (2, num_layers // 2, num_layers - 3)
    if not 0 < slots[0] < slots[1] < slots[2] < num_layers:
        raise UserError(
            f"a target of {num_layers} layers has no three distinct default slots, found {slots}",
            expected="at least 7 layers, or slots given by hand",
        )
    return slots


def chosen_slots(text: str, num_layers: int) -> tuple[int, ...]:
    """Slots that a parameter lists, parted by commas; the default ones where it lists none. Raises
    ``UserError`` unless they rise and lie between 1 and ``num_layers``."""
    try:
        slots = tuple(numbers_of(text, int))
    except ValueError:
        slots = (-1,)
    if not slots:
        return default_slots(num_layers)
    if list(slots) != sorted(set(slots)) or not 0 < slots[0] <= slots[-1] <= num_layers:
        raise UserError(
            f"parameter slots is {text!r}",
            expected=f"distinct rising numbers from 1 to {num_layers}, parted by commas",
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
class MLA:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    q_lora_rank: int | None  # None: queries are projected directly
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> MLA | None:
        """Sizes that a Hugging Face config names; None where it has no latent attention."""
        if config.get("kv_lora_rank") is None:
            return None
        return cls(
            q_lora_rank=config.get("q_lora_rank"),
            kv_lora_rank=config["kv_lora_rank"],
            qk_nope_head_dim=config["qk_nope_head_dim"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
        )


@dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-3 drafter: one decoder layer of its own width over the target's states.

    ``mla`` makes it MLA-type (``head_dim`` is then the width of a query and every head has its own
    key); without it, it is Llama-type. The options are those of EAGLE 3.1 and of vLLM's trainer:

    ``fc_norm``               one RMSNorm a slot before ``fc``
    ``norm_output``           the next step reads the normed output, the one that the head reads
    ``norm_before_fc``        one RMSNorm (``input_norm``) over the concatenated slots before ``fc``
    ``norm_before_residual``  the residual starts from ``hidden_norm``'s output
    """

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
    mla: MLA | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    own_embeddings: bool = False  # embed_tokens is the drafter's, not a copy of the target's

    @property
    def kind(self) -> Literal["llama", "mla"]:
        return "mla" if self.mla else "llama"

    @property
    def options(self) -> list[str]:
        """Names of the options that are on."""
        return [name for name in OPTIONS if getattr(self, name)]

    @property
    def layer_parameters(self) -> int:
        """Parameters of the projections of the one layer, which every drafted token reads (norms,
        ``fc``, which a round reads once, and the head apart)."""
        h, heads, width = self.hidden_size, self.num_attention_heads, 2 * self.hidden_size
        if self.mla is None:
            attention = width * self.head_dim * (heads + 2 * self.num_key_value_heads)
            attention += heads * self.head_dim * h
        else:
            m, queries = self.mla, heads * self.head_dim
            rank = m.q_lora_rank
            attention = width * queries if rank is None else rank * (width + queries)
            attention += width * (m.kv_lora_rank + m.qk_rope_head_dim)
            attention += m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim)
            attention += heads * m.v_head_dim * h
        return attention + 3 * h * self.intermediate_size

    @classmethod
    def for_target(
        cls,
        target_config: dict[str, Any],
        draft_vocab_size: int,
        *,
        kind: Literal["auto", "llama", "mla"] = "auto",
        slots: tuple[int, ...] | None = None,
        intermediate_size: int = 0,
        **options: bool,
    ) -> DrafterConfig:
        """One layer in the shape of the target's own (the rotary embedding is copied, never
        guessed). ``kind`` "auto" takes the target's, ``intermediate_size`` 0 too; ``options`` are
        those of ``OPTIONS``.

        A Llama-type drafter of an MLA target has heads as wide as the target's values. Raises
        ``UserError`` for an MLA-type drafter of a target without latent attention.
        """
        c, latent = target_config, MLA.of(target_config)
        if kind == "mla" and latent is None:
            raise UserError(
                "an MLA-type drafter takes its sizes from the target's latent attention, and this "
                "target has none",
                expected="a target with kv_lora_rank (DeepSeek, Kimi), or a Llama-type drafter",
            )
        return cls(
            hidden_size=c["hidden_size"],
            intermediate_size=intermediate_size or c["intermediate_size"],
            **heads_of(c, latent, latent if kind != "llama" else None),
            rms_norm_eps=c["rms_norm_eps"],
            rope_parameters=rope_parameters(c, "the target's config.json"),
            max_position_embeddings=c["max_position_embeddings"],
            vocab_size=c["vocab_size"],
            draft_vocab_size=draft_vocab_size,
            target_hidden_size=c["hidden_size"],
            slots=slots or default_slots(c["num_hidden_layers"]),
            bos_token_id=c.get("bos_token_id"),
            eos_token_id=c.get("eos_token_id"),
            **options,
        )

    def as_hf_config(self, dtype: str) -> dict[str, Any]:
        """``config.json`` that vLLM reads at the top level and SGLang in ``eagle_config``.

        vLLM wants the layer a slot is read before, SGLang's Llama and Qwen targets the layer it
        comes out of (they add one): the same tensors under two numbers, each where its engine
        looks. The options stand at the top level, where both engines look for them.
        """
        written = _attention_keys(self) | {
            "num_hidden_layers": 1,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
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
            "num_aux_hidden_states": len(self.slots),
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
        if self.rope_parameters["rope_type"] != "default":  # the spelling of older readers
            scaling = {k: v for k, v in self.rope_parameters.items() if k != "rope_theta"}
            written["rope_scaling"] = scaling | {"type": scaling["rope_type"]}
        return written | {name: getattr(self, name) for name in OPTIONS}


def heads_of(c: dict[str, Any], latent: MLA | None, mla: MLA | None) -> dict[str, Any]:
    """Head counts and widths of a drafter of a target, or of the drafter whose config ``c`` is."""
    heads = c["num_attention_heads"]
    if mla:
        width, kv_heads = mla.qk_nope_head_dim + mla.qk_rope_head_dim, heads
    elif latent:
        width, kv_heads = latent.v_head_dim, heads
    else:
        kv_heads = c.get("num_key_value_heads") or heads
        width = c.get("head_dim") or _whole_head_dim(c["hidden_size"], heads)
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width,
            "mla": mla}  # fmt: skip


def _whole_head_dim(hidden_size: int, heads: int) -> int:
    if hidden_size % heads:
        raise UserError(
            f"hidden_size {hidden_size} does not divide into {heads} heads, and there is no "
            "head_dim",
            where="config.json",
            next="write head_dim, the width of one head, into the config",
        )
    return hidden_size // heads


def _attention_keys(c: DrafterConfig) -> dict[str, Any]:
    """Architecture and attention sizes in the keys of their model class."""
    shared = {"num_attention_heads": c.num_attention_heads,
              "num_key_value_heads": c.num_key_value_heads}  # fmt: skip
    if c.mla is None:
        return {"architectures": [LLAMA_ARCHITECTURE], "model_type": "llama",
                "head_dim": c.head_dim} | shared  # fmt: skip
    return {
        "architectures": [MLA_ARCHITECTURE],
        "model_type": "kimi_k2",
        "q_lora_rank": c.mla.q_lora_rank,
        "kv_lora_rank": c.mla.kv_lora_rank,
        "qk_nope_head_dim": c.mla.qk_nope_head_dim,
        "qk_rope_head_dim": c.mla.qk_rope_head_dim,
        "v_head_dim": c.mla.v_head_dim,
    } | shared
