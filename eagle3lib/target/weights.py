"""A target's weight files: which there are, whether each is whole, one tensor by its name.

safetensors where there are any, else ``pytorch_model*.bin``, which is a pickle and is only ever
read with ``weights_only``: nothing in it is run.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json

if TYPE_CHECKING:
    from torch import Tensor

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, those of an index whether they are there or not."""
    for name in _INDEXES:
        if (folder / name).exists():
            named = read_json(folder / name)["weight_map"].values()
            return sorted({folder / file for file in named})
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def file_problem(path: Path) -> str:
    """What is wrong with a weight file, "" when it is whole. Only its ends are read."""
    if not path.exists():
        return "is named by the index but missing"
    if path.suffix == ".bin":
        return "" if zipfile.is_zipfile(path) else "is cut short, or no file that torch.save wrote"
    return _safetensors_problem(path)


def _safetensors_problem(path: Path) -> str:
    """A safetensors file says in its header how long it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            return f"is cut short: {size} bytes"
        length = struct.unpack("<Q", head)[0]
        if 8 + length > size:
            return f"is cut short: {size} bytes, its header alone needs {8 + length}"
        try:
            header = json.loads(file.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError):
            return "has a broken header"
    ends = [t["data_offsets"][1] for k, t in header.items() if k != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    return "" if size >= wanted else f"is cut short: {size} of {wanted} bytes"


class TensorReader:
    """One tensor by name out of a folder's weight files (with or without a name prefix)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._bins: dict[Path, dict[str, Any]] = {}
        self._where: dict[str, Path] = {}
        for name in _INDEXES:
            if (folder / name).exists():
                self._where = {
                    k: folder / v for k, v in read_json(folder / name)["weight_map"].items()
                }
                return
        for file in weight_files(folder):
            self._where |= dict.fromkeys(self._names(file), file)

    def has(self, name: str) -> bool:
        return bool(self._full_names(name))

    def _names(self, file: Path) -> list[str]:
        if file.suffix == ".bin":
            return list(self._bin(file))
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())

    def _bin(self, file: Path) -> dict[str, Any]:
        import torch

        if file not in self._bins:
            try:
                self._bins[file] = torch.load(
                    file, map_location="cpu", mmap=True, weights_only=True
                )
            except (UnpicklingError, RuntimeError, EOFError) as error:
                raise UserError(
                    f"a weight file holds more than tensors, or is broken: {error}".split("\n")[0],
                    expected="tensors alone (it is read with weights_only)",
                    where=file,
                    next="get the model as safetensors",
                ) from None
        return self._bins[file]

    def _full_names(self, name: str) -> list[str]:
        # Multimodal wrappers keep the text model under a prefix, e.g.
        # language_model.model.norm.weight, or model.language_model.norm.weight.
        if name in self._where:
            return [name]
        inner = f"language_model.{name.removeprefix('model.')}"
        return [n for n in self._where if n.endswith((f".{name}", f".{inner}")) or n == inner]

    def __call__(self, name: str) -> Tensor:
        found = self._full_names(name)
        if not found:
            raise UserError(
                f"the target has no tensor {name}",
                where=self._folder,
                expected="a decoder with embed_tokens, norm and lm_head, these three not quantised",
            )
        file = self._where[found[0]]
        if file.suffix == ".bin":
            return self._bin(file)[found[0]]
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(found[0])
