"""Numbers of hidden states as they are stored, and exactly what reading them gives back.

    full     the number itself
    fp8      e4m3(x / s) * s, s = amax / 448 of the state at that token, fp32
    compact  round(x / s) * s, s = bf16(amax / m) of each group of 32 numbers along H,
             m = 2^(bits - 1) - 1; 6 bits for slots, 8 for ``last``, stored with 2^(bits - 1)
             added, so many in so few bytes as come out even, the first in the lowest bits

Products are made in fp32 and rounded once, to the dtype of the capture. Bounds of the error (before
that rounding), tested: fp8 ``max(|x| / 16, amax / 2^18)``; compact ``s / 2``.

Why e4m3 needs no group: its exponent spans what outlier dimensions stretch (a first token's state
holds numbers a thousand times its median). Integers have no exponent, hence their small groups.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int32, UInt8
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.target.storage_bytes import GROUP, LAST_BITS, SLOT_BITS

StateFormat = Literal["full", "fp8", "compact"]
Part = Literal["hidden_states", "last"]
SCALE = "_scale"
_FP8_MOST = 448.0
_LEAST_AMAX = 1e-30  # of a group of zeros: any positive scale gives them back
_BITS = {"hidden_states": SLOT_BITS, "last": LAST_BITS}


def check_format(state_format: str, hidden: int) -> None:
    """Raise ``UserError`` for a format that is unknown or can't hold states of this size."""
    if state_format not in get_args(StateFormat):
        known = ", ".join(get_args(StateFormat))
        raise UserError(f"no storage format {state_format!r}", expected=known)
    if state_format == "compact" and hidden % GROUP:
        raise UserError(
            f"states of {hidden} numbers can't be stored as compact",
            expected=f"a hidden size that {GROUP} divides",
            next="set state_format: fp8",
        )


def tensor_names(state_format: str, part: Part) -> tuple[str, ...]:
    """The tensors of a shard that hold a part."""
    return (part,) if state_format == "full" else (part, part + SCALE)


def encode(states: Float[Tensor, "*n H"], state_format: str, part: Part) -> dict[str, Tensor]:
    """The tensors that store ``states``, each with the same leading axes."""
    if state_format == "full":
        return {part: states.contiguous()}
    wide = states.float()
    if state_format == "fp8":
        scale = wide.abs().amax(-1).clamp_min(_LEAST_AMAX) / _FP8_MOST
        codes = (wide / scale[..., None]).clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)
        return {part: codes, part + SCALE: scale}
    most = 2 ** (_BITS[part] - 1) - 1
    groups = wide.unflatten(-1, (-1, GROUP))
    scale = (groups.abs().amax(-1).clamp_min(_LEAST_AMAX) / most).to(torch.bfloat16)
    whole = (groups / scale[..., None].float()).round().clamp(-most, most).to(torch.int32)
    return {part: _packed(whole.flatten(-2), _BITS[part]), part + SCALE: scale}


def decode(
    stored: dict[str, Tensor], state_format: str, part: Part, dtype: torch.dtype
) -> Float[Tensor, "*n H"]:
    """What ``encode`` stored, in ``dtype``, on the device of the stored tensors; a copy."""
    codes = stored[part]
    if state_format == "full":
        return codes.to(dtype, copy=True)
    scale = stored[part + SCALE].float()[..., None]
    if state_format == "fp8":
        return (codes.float() * scale).to(dtype)
    whole = _unpacked(codes, _BITS[part])
    return (whole.unflatten(-1, (-1, GROUP)).float() * scale).flatten(-2).to(dtype)


def _word(bits: int) -> tuple[int, int]:
    """(numbers, bytes) of the shortest run that fills whole bytes: 2 in 1, 4 in 3, 1 in 1."""
    numbers = math.lcm(bits, 8) // bits
    return numbers, numbers * bits // 8


def _packed(whole: Int32[Tensor, "*n H"], bits: int) -> UInt8[Tensor, "*n B"]:
    numbers, size = _word(bits)
    fields = (whole + 2 ** (bits - 1)).unflatten(-1, (-1, numbers))
    word = fields[..., 0]
    for i in range(1, numbers):
        word = word | fields[..., i] << (bits * i)
    return torch.stack([word >> 8 * j & 255 for j in range(size)], -1).flatten(-2).to(torch.uint8)


def _unpacked(codes: UInt8[Tensor, "*n B"], bits: int) -> Int32[Tensor, "*n H"]:
    numbers, size = _word(bits)
    parts = codes.to(torch.int32).unflatten(-1, (-1, size))
    word = parts[..., 0]
    for j in range(1, size):
        word = word | parts[..., j] << 8 * j
    fields = torch.stack([word >> bits * i & 2**bits - 1 for i in range(numbers)], -1)
    return fields.flatten(-2) - 2 ** (bits - 1)
