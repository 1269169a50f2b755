"""Run by an engine's own Python: does its installed version serve EAGLE-3 with this architecture?

    PYTHON ask_engine.py vllm LlamaForCausalLM

Prints one JSON object on its last line. It imports nothing of the lab: SGLang lives in an
environment of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def ask_vllm(architecture: str) -> dict[str, Any]:
    """The class that vLLM's registry has for the architecture, and its own word for EAGLE-3."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    entry = ModelRegistry.models.get(architecture)
    if entry is None:
        return {"known": False, "eagle3": False}
    return {"known": True, "eagle3": bool(supports_eagle3(entry.load_model_cls()))}


def ask_sglang(architecture: str) -> dict[str, Any]:
    """SGLang asks a target's class by duck typing whether it can hand out its states."""
    from sglang.srt.models.registry import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        return {"known": False, "eagle3": False}
    model, _ = ModelRegistry.resolve_model_cls([architecture])
    return {"known": True, "eagle3": hasattr(model, "set_eagle3_layers_to_capture")}


def installed_version(engine: str) -> str | None:
    from importlib import metadata

    for package in (engine, f"{engine}-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


if __name__ == "__main__":
    name, wanted = sys.argv[1:]
    version = installed_version(name)
    answer = {"known": None, "eagle3": None}
    if version is not None:
        answer = {"vllm": ask_vllm, "sglang": ask_sglang}[name](wanted)
    print("\n" + json.dumps({"engine": name, "version": version, **answer}))
