"""Linear weights in INT4, as compressed-tensors stores them: W4A16, pack-quantized, groups of 32.

The form of Kimi-K2.5's routed experts. Of a weight [out, in]::

    weight_packed   int32 [out, in / 8]: eight values of -8..7, each plus 8, lowest bits first
    weight_scale    [out, in / 32], in the weight's dtype: weight = value * scale of its group
    weight_shape    [out, in]

Rounding is to the nearest, symmetric, with the group's largest magnitude at 7. Layout: compressed-
tensors 0.17 (``compressors/pack_quantized``), which reads it back in the tests.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json

GROUP = 32
_BITS, _PER_INT32 = 4, 8
# What Kimi-K2 and K2.5 leave in bf16; engines fuse gate and up, hence the name of both.
KIMI_IGNORES = ("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*vision_tower.*",
                "re:.*mm_projector.*")  # fmt: skip


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(values int8 [out, in] from -8 to 7, scale [out, in / 32]) of a weight [out, in]."""
    if weight.ndim != 2 or weight.shape[1] % GROUP:
        raise UserError(
            f"a weight of shape {tuple(weight.shape)} can't be packed",
            expected=f"two dimensions, the second a multiple of {GROUP}",
        )
    parts = weight.unflatten(1, (-1, GROUP))
    scale = (parts.abs().amax(-1) / 7).clamp(min=torch.finfo(weight.dtype).tiny)
    values = (parts.float() / scale.float()[..., None]).round().clamp(-8, 7)
    return values.flatten(1).to(torch.int8), scale


def packed_int32(values: Tensor) -> Tensor:
    """int8 [out, in] of -8..7 -> int32 [out, in / 8]."""
    nibbles = (values.to(torch.int64) + 8).unflatten(1, (-1, _PER_INT32))
    whole = (nibbles << (_BITS * torch.arange(_PER_INT32))).sum(-1)
    return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)


def quantization_config(ignore: tuple[str, ...]) -> dict[str, Any]:
    """``quantization_config`` of config.json: all linear layers but those of ``ignore``."""
    weights = {"num_bits": _BITS, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": GROUP}  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": list(ignore),
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def pack_int4(source: Path, folder: Path, of: str, ignore: tuple[str, ...]) -> Path:
    """Copy the model ``source`` to ``folder`` (may be the same) with its weights that have ``of``
    in their names in INT4; of a multimodal wrapper the text model's config says so.

    Raises ``UserError`` when no weight has that name.
    """
    if source != folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
    found = 0
    for file in sorted(folder.glob("*.safetensors")):
        out: dict[str, Tensor] = {}
        for name, weight in load_file(file).items():
            if of not in name or not name.endswith(".weight"):
                out[name] = weight
                continue
            values, scale = quantised(weight)
            out[f"{name}_packed"], out[f"{name}_scale"] = packed_int32(values), scale
            out[f"{name}_shape"] = torch.tensor(weight.shape)
            found += 1
        save_file(out, file, {"format": "pt"})
    if not found:
        raise UserError(f"no weight has {of!r} in its name", where=source)
    config = read_json(folder / "config.json")
    config.get("text_config", config)["quantization_config"] = quantization_config(ignore)
    write_json(folder / "config.json", config)
    return folder
