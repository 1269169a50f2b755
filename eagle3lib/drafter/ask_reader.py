"""Run by an engine's own Python: what its code reads in a drafter's folder. No library of the lab.

    python ask_reader.py vllm|sglang TARGET DRAFTER...

Prints a JSON list on the last line, one answer a drafter. ``slots`` of vLLM are what the functions
of its two model runners return for the config that its SpeculativeConfig built, None where the
target's defaults hold; those of SGLang what the target class's ``set_eagle3_layers_to_capture``
sets, left out where the class can't be asked without a model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main(engine: str, target: str, *drafters: str) -> None:
    ask = _vllm if engine == "vllm" else _sglang
    print(json.dumps([ask(drafter, target) for drafter in drafters]), flush=True)


def _vllm(drafter: str, target: str) -> dict[str, Any]:
    import vllm
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    answer: dict[str, Any] = {"version": vllm.__version__}
    served = ModelConfig(model=target, tokenizer=target, skip_tokenizer_init=True)
    try:
        made = SpeculativeConfig(
            method="eagle3",
            model=drafter,
            num_speculative_tokens=1,
            target_model_config=served,
            target_parallel_config=ParallelConfig(),
        )
    except Exception as error:  # whatever stops it here stops the server, and is the answer
        return answer | {"refused": str(error).strip().splitlines()[0][:300]}
    model = made.draft_model_config
    config = model.hf_config
    keys = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "draft_vocab_size",
            "rope_parameters", "max_position_embeddings")  # fmt: skip
    return answer | {
        "architecture": config.architectures[0],
        "class": _class_name(config.architectures[0]),
        "target_eagle3": _serves_eagle3(served.architectures[0]),
        "slots": {"vllm-v1": _ids_of_v1(made), "vllm-v2": _ids_of_v2(made)},
        "config": {key: getattr(config, key, None) for key in keys},
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
    }


def _ids_of_v1(made: Any) -> list[int] | None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    ids = GPUModelRunner._get_eagle3_aux_layers_from_config(
        SimpleNamespace(speculative_config=made)
    )
    return list(ids) if ids else None


def _ids_of_v2(made: Any) -> list[int] | None:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    ids = get_eagle3_aux_layers_from_config(made)
    return list(ids) if ids else None


def _class_name(architecture: str) -> str | None:
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.models.get(architecture)
    return known.load_model_cls().__name__ if known else None


def _serves_eagle3(architecture: str) -> bool | None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    known = ModelRegistry.models.get(architecture)
    return bool(supports_eagle3(known.load_model_cls())) if known else None


def _sglang(drafter: str, target: str) -> dict[str, Any]:
    import sglang
    from sglang.srt.models.registry import ModelRegistry

    config, served = (
        json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        for folder in (drafter, target)
    )
    architecture = (config.get("architectures") or ["none"])[0]
    answer: dict[str, Any] = {"version": sglang.__version__, "architecture": architecture}
    known = ModelRegistry.get_supported_archs()
    if architecture not in known:
        return answer | {"refused": f"no model class for architecture {architecture}"}
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    model = ModelRegistry.models.get(served["architectures"][0])
    text = served.get("text_config") or served
    captured = _captured(model, ids, text) if model else None
    return answer | {
        "class": ModelRegistry.models[architecture].__name__,
        "target_eagle3": hasattr(model, "set_eagle3_layers_to_capture"),
        "slots": {"sglang": captured} if captured else {},
    }


def _captured(model: Any, ids: list[int] | None, text: dict[str, Any]) -> list[int] | None:
    """The class's own method, called on a stand-in that has what it touches. A wrapper of a text
    model hands the call on to ``language_model``, here the text model's class."""
    from sglang.srt.models.registry import ModelRegistry

    inner = SimpleNamespace(layers_to_capture=None, capture_aux_hidden_states=False)
    stand_in = SimpleNamespace(
        model=inner,
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=text["num_hidden_layers"]),
        capture_aux_hidden_states=False,
    )
    inside = ModelRegistry.models.get((text.get("architectures") or [""])[0])
    if inside is not None and inside is not model:
        stand_in.language_model = SimpleNamespace(
            set_eagle3_layers_to_capture=lambda given=None: inside.set_eagle3_layers_to_capture(
                stand_in, given
            )
        )
    try:
        model.set_eagle3_layers_to_capture(stand_in, ids)
    except AttributeError:  # it touches more than the stand-in has
        return None
    return list(inner.layers_to_capture) if inner.layers_to_capture else None


if __name__ == "__main__":
    main(*sys.argv[1:])
