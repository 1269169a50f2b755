"""Numbers of hidden states as they are stored, and exactly what reading them gives back.

    full     the number itself
    fp8      e4m3(x / s) * s, s = amax / 448 of the state at that token, fp32
    compact  round(x / s) * s, s = bf16(amax / m) of each group of 32 numbers along H,
             m = 2^(bits - 1) - 1; 4 bits for slots (two in a byte, low half first), 8 for ``last``

Products are made in fp32 and rounded once, to the dtype of the capture. Bounds of the error (before
that rounding), tested: fp8 ``max(|x| / 16, amax / 2^18)``; compact ``s / 2``.

Why e4m3 needs no group: its exponent spans what outlier dimensions stretch (a first token's state
holds numbers a thousand times its median). Integers have no exponent, hence their small groups.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float, Int8, UInt8
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
    whole = (groups / scale[..., None].float()).round().clamp(-most, most).to(torch.int8)
    codes = whole.flatten(-2)
    return {part: _two_in_a_byte(codes) if _BITS[part] == 4 else codes, part + SCALE: scale}


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
    whole = _halves(codes) if _BITS[part] == 4 else codes
    return (whole.unflatten(-1, (-1, GROUP)).float() * scale).flatten(-2).to(dtype)


def _two_in_a_byte(whole: Int8[Tensor, "*n H"]) -> UInt8[Tensor, "*n H2"]:
    low, high = ((whole + 8).to(torch.uint8)[..., i::2] for i in (0, 1))
    return low | (high << 4)


def _halves(codes: UInt8[Tensor, "*n H2"]) -> Int8[Tensor, "*n H"]:
    return (torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).to(torch.int8)) - 8
