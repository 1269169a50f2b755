"""A target's shape and its parameters, matrix by matrix, from ``config.json`` alone.

Everything that a plan says of weights comes from one list of matrices: how many numbers it holds,
how many of them a token uses, and (quantisation.py) how many bytes they are. The counts equal those
of the real transformers models; tests build them without weights and compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eagle3lib.lab.errors import UserError

# Families whose parameters are counted exactly; others count like Llama, and a finding says so.
_QK_NORM = {"qwen3", "qwen3_moe"}
_MLA = {"deepseek_v2", "deepseek_v3", "kimi_k2"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
KNOWN_FAMILIES = {"llama", "mistral", "mixtral", "qwen2", "gpt_oss", *_QK_NORM, *_MLA}


@dataclass(frozen=True)
class Matrix:
    """One weight [rows, columns] (a linear layer's [out, in]), ``copies`` of it, of which one token
    uses ``active``. ``extra`` are its bias and the like: never quantised."""

    name: str
    group: str
    rows: int
    columns: int
    copies: int = 1
    active: float = 1
    extra: int = 0
    linear: bool = True

    @property
    def weights(self) -> int:
        return self.rows * self.columns

    @property
    def parameters(self) -> int:
        return self.copies * (self.weights + self.extra)


@dataclass(frozen=True)
class Shape:
    """The text model's config, read once; ``raw`` is the file as it is."""

    raw: dict[str, Any]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The text model's own keys; of a multimodal wrapper those of its ``text_config``."""
        inner = self.raw.get("text_config")
        return {**self.raw, **inner} if isinstance(inner, dict) else self.raw

    def need(self, key: str) -> int:
        """A size that the config must name. Raises ``UserError`` when it is missing."""
        value = self.config.get(key)
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"the target's config lacks {key!r}" if value is None else f"{key} is {value!r}",
                expected="a decoder-only language model's config.json",
                next="check the file; a plan needs nothing else of the target",
            )
        return value

    def get(self, *keys: str, default: int = 0) -> int:
        """The first of some spellings of a size; ``default`` where none is there."""
        return next((int(self.config[k]) for k in keys if self.config.get(k) is not None), default)

    @property
    def wrapper(self) -> str:
        """Architecture of a multimodal wrapper around the text model, "" without one."""
        return self.architecture if isinstance(self.raw.get("text_config"), dict) else ""

    @property
    def architecture(self) -> str:
        return str((self.raw.get("architectures") or ["unknown"])[0])

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @property
    def layers(self) -> int:
        return self.need("num_hidden_layers")

    @property
    def hidden(self) -> int:
        return self.need("hidden_size")

    @property
    def vocab(self) -> int:
        return self.need("vocab_size")

    @property
    def heads(self) -> int:
        return self.need("num_attention_heads")

    @property
    def is_mla(self) -> bool:
        return bool(self.get("kv_lora_rank"))

    @property
    def kv_heads(self) -> int:
        return self.get("num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        if self.is_mla:
            return self.need("v_head_dim")
        return self.get("head_dim", default=self.hidden // self.heads)

    @property
    def context(self) -> int:
        return self.get("max_position_embeddings")

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", self.raw.get("tie_word_embeddings")))

    @property
    def experts(self) -> int:
        """Routed experts in an expert layer, 0 in a dense target."""
        return self.get("n_routed_experts", "num_local_experts", "num_experts")

    @property
    def experts_per_token(self) -> int:
        return self.get("num_experts_per_tok", "experts_per_token") if self.experts else 0

    @property
    def expert_size(self) -> int:
        return self.get("moe_intermediate_size") or self.need("intermediate_size")

    @property
    def shared_experts(self) -> int:
        if self.get("shared_expert_intermediate_size"):
            return 1
        return self.get("n_shared_experts") if self.experts else 0

    @property
    def expert_layers(self) -> list[int]:
        """Layers with routed experts: all but the first dense ones, those named, and those that the
        sparse step skips."""
        if not self.experts:
            return []
        step = self.get("decoder_sparse_step", "moe_layer_freq", default=1)
        dense = set(self.config.get("mlp_only_layers") or [])
        first = self.get("first_k_dense_replace")
        qwen = "decoder_sparse_step" in self.config
        return [
            i
            for i in range(first, self.layers)
            if i not in dense and (i + 1 if qwen else i) % step == 0
        ]

    @property
    def sliding(self) -> tuple[int, int]:
        """(layers that see only a window, its tokens)."""
        window = self.get("sliding_window")
        if not window or self.config.get("use_sliding_window") is False:
            return 0, 0
        kinds = self.config.get("layer_types")
        return (kinds.count("sliding_attention") if kinds else self.layers), window

    @property
    def attention(self) -> str:
        if self.is_mla:
            return (
                f"MLA, {self.heads} heads over one latent of {self.need('kv_lora_rank')} + "
                f"{self.need('qk_rope_head_dim')}"
            )
        kind = "MHA" if self.kv_heads == self.heads else "MQA" if self.kv_heads == 1 else "GQA"
        return f"{kind}, {self.heads} heads of {self.head_dim}, {self.kv_heads} with own keys"

    def kv_bytes_per_token(self, element_bytes: float = 2) -> int:
        """Key-value cache of one token over all layers; MLA keeps the latent and the rotary key."""
        if self.is_mla:
            wide = self.need("kv_lora_rank") + self.need("qk_rope_head_dim")
        else:
            wide = 2 * self.kv_heads * self.head_dim
        return int(self.layers * wide * element_bytes)

    @cached_property
    def matrices(self) -> list[Matrix]:
        """Every weight of the text model, next-token layers beyond ``num_hidden_layers`` left
        out."""
        h, experts = self.hidden, set(self.expert_layers)
        found = [Matrix("model.embed_tokens", "embedding", self.vocab, h, linear=False)]
        for layer in range(self.layers):
            name = f"model.layers.{layer}"
            found += self._attention(f"{name}.self_attn")
            found += self._experts(f"{name}.mlp") if layer in experts else self._mlp(f"{name}.mlp")
            found.append(Matrix(f"{name}.norms", "norms", 2, h, linear=False))
        found.append(Matrix("model.norm", "norms", 1, h, linear=False))
        if not self.tied:
            found.append(Matrix("lm_head", "head", self.vocab, h))
        return found

    def _linear(self, name: str, group: str, rows: int, columns: int, bias: bool = False) -> Matrix:
        return Matrix(name, group, rows, columns, extra=rows if bias else 0)

    def _attention(self, name: str) -> list[Matrix]:
        if self.is_mla:
            return self._latent_attention(name)
        h, wide, narrow = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        # gpt-oss has biases unless its config says otherwise.
        bias = bool(self.config.get("attention_bias", self.family == "gpt_oss"))
        qkv = bias or self.family in _QKV_BIAS
        found = [
            self._linear(f"{name}.q_proj", "attention", wide, h, qkv),
            self._linear(f"{name}.k_proj", "attention", narrow, h, qkv),
            self._linear(f"{name}.v_proj", "attention", narrow, h, qkv),
            self._linear(f"{name}.o_proj", "attention", h, wide, bias),
        ]
        if self.family in _QK_NORM:
            found.append(Matrix(f"{name}.qk_norm", "norms", 2, self.head_dim, linear=False))
        if self.family == "gpt_oss":
            found.append(Matrix(f"{name}.sinks", "norms", 1, self.heads, linear=False))
        return found

    def _latent_attention(self, name: str) -> list[Matrix]:
        h, rank, rope = self.hidden, self.need("kv_lora_rank"), self.need("qk_rope_head_dim")
        queries = self.heads * (self.need("qk_nope_head_dim") + rope)
        values = self.need("qk_nope_head_dim") + self.need("v_head_dim")
        bias = bool(self.config.get("attention_bias"))
        q_rank = self.get("q_lora_rank")
        if q_rank:
            found = [
                self._linear(f"{name}.q_a_proj", "attention", q_rank, h, bias),
                self._linear(f"{name}.q_b_proj", "attention", queries, q_rank),
                Matrix(f"{name}.q_a_layernorm", "norms", 1, q_rank, linear=False),
            ]
        else:
            found = [self._linear(f"{name}.q_proj", "attention", queries, h)]
        out = self.heads * self.need("v_head_dim")
        return [
            *found,
            self._linear(f"{name}.kv_a_proj_with_mqa", "attention", rank + rope, h, bias),
            self._linear(f"{name}.kv_b_proj", "attention", self.heads * values, rank),
            self._linear(f"{name}.o_proj", "attention", h, out, bias),
            Matrix(f"{name}.kv_a_layernorm", "norms", 1, rank, linear=False),
        ]

    def _mlp(self, name: str, group: str = "dense", size: int = 0) -> list[Matrix]:
        size, bias = size or self.need("intermediate_size"), bool(self.config.get("mlp_bias"))
        return [
            self._linear(f"{name}.gate_proj", group, size, self.hidden, bias),
            self._linear(f"{name}.up_proj", group, size, self.hidden, bias),
            self._linear(f"{name}.down_proj", group, self.hidden, size, bias),
        ]

    def _experts(self, name: str) -> list[Matrix]:
        h, size, bias = self.hidden, self.expert_size, self.family == "gpt_oss"
        router = Matrix(
            f"{name}.router" if bias else f"{name}.gate", "router", self.experts, h, linear=False,
            extra=self.experts if bias else 0,
        )  # fmt: skip
        sides = {"gate_proj": (size, h), "up_proj": (size, h), "down_proj": (h, size)}
        found = [router]
        for side, (rows, columns) in sides.items():
            found.append(
                Matrix(
                    f"{name}.experts.0.{side}", "experts", rows, columns, copies=self.experts,
                    active=self.experts_per_token, extra=rows if bias else 0,
                )
            )  # fmt: skip
        shared = self.get("shared_expert_intermediate_size") or self.shared_experts * size
        if shared:
            found += self._mlp(f"{name}.shared_experts", "shared experts", shared)
        return found

    @property
    def total_parameters(self) -> int:
        return sum(m.parameters for m in self.matrices)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: the chosen experts, and everything else once.

        The embedding counts in full, as model cards count it, though one row of it is read.
        """
        return round(sum(m.active * (m.weights + m.extra) for m in self.matrices))

    @property
    def product_parameters(self) -> int:
        """Weights that take part in a token's matrix products (2 FLOPs each): no embedding, but the
        head also where it is tied."""
        products = sum(m.active * m.weights for m in self.matrices if m.group != "embedding")
        return round(products) + (self.vocab * self.hidden if self.tied else 0)
