"""Bytes of a weight under the quantisation that a config names, scales and zero points counted.

    pack-quantized INT4, groups of 32, symmetric    4/8 + 2/32           = 0.5625 bytes
    FP8 in blocks of 128 x 128 (DeepSeek-V3)        1 + 4/(128*128)      = 1.00024
    GPTQ, AWQ INT4, groups of 128                   4/8 + (2 + 4/8)/128  = 0.5195
    MXFP4, blocks of 32 (gpt-oss)                   4/8 + 1/32           = 0.53125
    NVFP4, blocks of 16                             4/8 + 1/16           = 0.5625

What a scheme leaves alone (attention, the head, shared experts: its ``ignore`` list) stays in the
model's own dtype; that is why 1T parameters at 4 bits are 594 GB and not 512.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eagle3lib.lab.errors import UserError
from eagle3lib.plan.shape import Matrix, Shape

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Quantisation:
    """``name`` for people; ``bytes_of`` gives a quantised matrix's bytes, of one copy."""

    name: str
    element_bytes: int
    ignored: Callable[[Matrix], bool]
    bytes_of: Callable[[Matrix], float]

    def matrix_bytes(self, matrix: Matrix) -> float:
        """Bytes of one copy of ``matrix`` with its extras."""
        extra = matrix.extra * self.element_bytes
        if not matrix.linear or self.ignored(matrix):
            return matrix.weights * self.element_bytes + extra
        return self.bytes_of(matrix) + extra


def quantisation_of(shape: Shape) -> Quantisation:
    """The scheme of a config. Raises ``UserError`` for a method whose bytes nobody taught us."""
    found = shape.raw.get("quantization_config") or shape.config.get("quantization_config")
    dtype = str(shape.config.get("dtype") or shape.config.get("torch_dtype") or "bfloat16")
    size = _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)
    if not found:
        return Quantisation(dtype, size, lambda m: True, lambda m: 0.0)
    method = str(found.get("quant_method", "")).lower()
    reader = _READERS.get(method)
    if reader is None:
        raise UserError(
            f"the target's quantisation {method!r} is not known",
            expected=f"none, {', '.join(_READERS)}",
            next="plan for the same model in another format",
        )
    name, bytes_of, everywhere = reader(found)
    patterns = [*(found.get("ignore") or []), *(found.get("modules_to_not_convert") or [])]
    patterns += found.get("ignored_layers") or []

    def ignored(matrix: Matrix) -> bool:
        if not everywhere and matrix.group != "experts":
            return True
        # Of the methods here none but compressed-tensors and modelopt quantise the head by default.
        head = matrix.group == "head" and method in ("fp8", "gptq", "awq")
        return head or any(_matches(p, matrix.name) for p in patterns)

    return Quantisation(name, size, ignored, bytes_of)


def _matches(pattern: str, name: str) -> bool:
    """``re:`` patterns, shell patterns, and plain names of a module or of a part of its path; with
    and without a wrapper's prefix."""
    for full in (name, f"language_model.{name}"):
        if pattern.startswith("re:"):
            if re.match(pattern[3:], full):
                return True
        elif "*" in pattern:
            if fnmatch.fnmatch(full, pattern) or fnmatch.fnmatch(full, f"{pattern}.*"):
                return True
        elif full == pattern or f".{pattern}." in f".{full}.":
            return True
    return False


def _integers(bits: int, group: int, zeros: bool, scale_bytes: float = 2) -> Callable[..., float]:
    """Packed weights, a scale a group of input columns (``group`` <= 0: a row), and zero points of
    the weights' own width."""

    def bytes_of(matrix: Matrix) -> float:
        groups = matrix.rows * -(-matrix.columns // group) if group > 0 else matrix.rows
        return matrix.weights * bits / 8 + groups * (scale_bytes + (bits / 8 if zeros else 0))

    return bytes_of


def _compressed_tensors(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    groups = list((found.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    bits, group = int(weights.get("num_bits", 16)), int(weights.get("group_size") or 0)
    kind, zeros = weights.get("type", "int"), weights.get("symmetric") is False
    # NVFP4 keeps its scales in one byte (e4m3), everything else in the model's 16 bits.
    scale = 1 if kind == "float" and bits == 4 else 2
    name = f"{kind.upper()}{bits} compressed-tensors" + (f", groups of {group}" if group else "")
    return name, _integers(bits, group, zeros, scale), True


def _fp8(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    block = found.get("weight_block_size")
    if not block:
        return "FP8", lambda m: m.weights + 4.0, True
    rows, columns = block

    def bytes_of(m: Matrix) -> float:
        return m.weights + 4.0 * -(-m.rows // rows) * -(-m.columns // columns)

    return f"FP8, blocks of {rows} x {columns}", bytes_of, True


def _gptq(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    bits, group = int(found.get("bits", 4)), int(found.get("group_size", 128))
    packed = _integers(bits, group, zeros=True)
    # g_idx: the group of each input column, four bytes.
    return f"GPTQ INT{bits}, groups of {group}", lambda m: packed(m) + 4.0 * m.columns, True


def _awq(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    bits = int(found.get("bits") or found.get("w_bit") or 4)
    group = int(found.get("group_size") or found.get("q_group_size") or 128)
    return f"AWQ INT{bits}, groups of {group}", _integers(bits, group, zeros=True), True


def _mxfp4(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    return "MXFP4 experts, blocks of 32", _integers(4, 32, zeros=False, scale_bytes=1), False


def _modelopt(found: dict[str, Any]) -> tuple[str, Callable[..., float], bool]:
    algorithm = str(found.get("quant_algo", "")).upper()
    if algorithm == "NVFP4":
        return "NVFP4, blocks of 16", _integers(4, 16, zeros=False, scale_bytes=1), True
    if algorithm == "FP8":
        return "FP8", lambda m: m.weights + 4.0, True
    raise UserError(
        f"the target's quantisation modelopt {algorithm!r} is not known", expected="NVFP4 or FP8"
    )


_READERS: dict[str, Callable[[dict[str, Any]], tuple[str, Callable[..., float], bool]]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the text model's weights, in the parts that a decode step reads differently."""

    total: int
    embedding: int
    experts: int  # all routed experts of all layers
    expert: int  # one routed expert of one layer
    always: int  # what every step reads: attention, dense, shared experts, router, norms, head


def weight_bytes(shape: Shape, scheme: Quantisation) -> WeightBytes:
    """Sum over the matrices; a tied embedding is read as the head in every step."""
    total = sum(m.copies * scheme.matrix_bytes(m) for m in shape.matrices)
    embedding = sum(scheme.matrix_bytes(m) for m in shape.matrices if m.group == "embedding")
    experts = [m for m in shape.matrices if m.group == "experts"]
    routed = sum(m.copies * scheme.matrix_bytes(m) for m in experts)
    one = routed / shape.experts / len(shape.expert_layers) if experts else 0
    read = total - routed - (0 if shape.tied else embedding)
    return WeightBytes(round(total), round(embedding), round(routed), round(one), round(read))
