"""The tensors of anybody's drafter folder, under the names of the SGLang/SpecForge style.

Read are ``model.safetensors``, its shards, and ``pytorch_model.bin`` with its shards (as plain
tensors, nothing in the pickle is run). The one layer is called ``midlayer`` or ``layers.0``; both
engines read either.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_json

WEIGHTS = "model.safetensors"
_NAMES = (WEIGHTS, "pytorch_model.bin")
# Old names that SGLang still reads (its Llama drafters), beside the layer's second name.
_RENAME = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
_DERIVED = "rotary_emb.inv_freq"  # some exports keep it; it follows from the config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights. Raises ``UserError`` when there are none, or when an
    index names one that is missing."""
    for name in _NAMES:
        index = folder / f"{name}.index.json"
        if index.exists():
            files = sorted({folder / shard for shard in read_json(index)["weight_map"].values()})
            missing = [f.name for f in files if not f.exists()]
            if missing:
                raise UserError(
                    f"the index names {missing[0]}, which is not there",
                    expected=f"{len(files)} shards",
                    where=index,
                    next="copy the folder again, it is not whole",
                )
            return files
        if (folder / name).exists():
            return [folder / name]
    raise UserError(
        "the drafter has no weights", expected=f"{' or '.join(_NAMES)}, or an index", where=folder
    )


def read_weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """(tensors by their SGLang/SpecForge name, the file or index that they came from)."""
    files = weight_files(folder)
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, value in _load(file).items():
            if name.endswith(_DERIVED):
                continue
            tensors[_renamed(name)] = value
    where = files[0] if len(files) == 1 else folder / f"{_base_name(files[0])}.index.json"
    return tensors, str(where)


def stored_names(folder: Path) -> set[str]:
    """Names as they stand in the files."""
    return {name for file in weight_files(folder) for name in _load(file)}


def write_weights(folder: Path, tensors: dict[str, Tensor], max_shard_mib: int | None) -> None:
    """``model.safetensors``, or shards of at most so many MiB with their index (a larger tensor
    has a shard to itself)."""
    if not max_shard_mib:
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_mib * 2**20)
    for file, names in split.filename_to_tensors.items():
        save_file(_picked(tensors, names), folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{WEIGHTS}.index.json", index)


def _picked(tensors: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names}


def _base_name(shard: Path) -> str:
    return _NAMES[0] if shard.suffix == ".safetensors" else _NAMES[1]


def _renamed(name: str) -> str:
    for old, new in _RENAME.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _load(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(
            f"the weights can't be read: {str(error).splitlines()[0] if str(error) else error!r}",
            where=path,
            next="copy the file again, it is cut short or no plain file of tensors",
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(v, Tensor) for v in tensors.values()):
        raise UserError("the file holds no dict of tensors", where=path)
    return tensors
