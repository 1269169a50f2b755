"""docs/engines.md: who reads what, from the rules and from the answers of the installed vLLM.

    python -m eagle3lib.drafter.formats_table        write the document again (30 s)

The cases are configs of a target of 10 layers, whose default states are 2, 5, 7; nothing is loaded.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from eagle3lib.drafter.config import MLA, DrafterConfig
from eagle3lib.drafter.doctor_probe import ask_about
from eagle3lib.drafter.formats import IDS, rules_table
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import write_json, write_text
from eagle3lib.lab.machine import ROOT

DOCUMENT = ROOT / "docs/engines.md"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 10,
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def cases() -> dict[str, dict[str, Any]]:
    """config.json by what is told of it; slots 3, 5, 8, so that no default is taken for them."""
    slots = (3, 5, 8)
    plain = DrafterConfig.for_target(_TARGET, 90, slots=slots).as_hf_config("bfloat16")
    latent = _TARGET | MLA(24, 20, 12, 8, 10).__dict__
    mla = DrafterConfig.for_target(latent, 90, slots=slots).as_hf_config("bfloat16")
    flat = {k: v for k, v in plain.items() if k not in (IDS, "eagle_config")}
    unsaid = {k: v for k, v in flat.items() if k not in _NORMS}
    outputs = {"eagle_config": {IDS: [2, 4, 7]}}
    return {
        "SpecForge style, ids in both places": plain,
        "ids 3, 5, 8 at the top level alone": flat | {IDS: list(slots)},
        "output ids 2, 4, 7 in `eagle_config` alone": flat | outputs,
        "no ids": flat,
        "`use_aux_norm` (old name)": unsaid | {IDS: list(slots), "use_aux_norm": True},
        "MLA-type": mla,
        "speculators style, options unsaid": {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "draft_vocab_size": 90, IDS: list(slots), "transformer_layer_config": unsaid,
            "speculators_config": {
                "algorithm": "eagle3", "verifier": {"name_or_path": "target"},
                "proposal_methods": [{"speculative_tokens": 3}],
            },
        },
    }  # fmt: skip


def probe_table() -> tuple[str, str]:
    """(version of the installed vLLM, Markdown table of what its code reads in the cases). Raises
    ``UserError`` where there is no vLLM to ask."""
    configs = cases()
    with tempfile.TemporaryDirectory() as place:
        target = Path(place) / "target"
        write_json(target / "config.json", _TARGET)
        folders = [Path(place) / f"case{i}" for i in range(len(configs))]
        for folder, config in zip(folders, configs.values(), strict=True):
            write_json(folder / "config.json", config)
        answers = ask_about("vllm", folders, target)
    if answers[0].said is None:
        raise UserError(f"vLLM was not asked: {answers[0].why_not}", next="make setup")
    lines = ["| config.json | model class | states, V1 runner | V2 runner | norms that are on |",
             "|---|---|---|---|---|"]  # fmt: skip
    lines += [_line(name, answer.said or {}) for name, answer in zip(configs, answers, strict=True)]
    return answers[0].said["version"], "\n".join(lines)


def _line(name: str, said: dict[str, Any]) -> str:
    if said.get("refused"):
        return f"| {name} | refused: {said['refused']} | | | |"
    slots = [
        ", ".join(map(str, said["slots"][r])) if said["slots"][r] else "the target's defaults"
        for r in ("vllm-v1", "vllm-v2")
    ]
    norms = ", ".join(n for n in _NORMS if said["config"].get(n)) or "none"
    return f"| {name} | {said['class']} | {slots[0]} | {slots[1]} | {norms} |"


def write_document() -> Path:
    """Put both tables between their marks."""
    version, probed = probe_table()
    text = DOCUMENT.read_text(encoding="utf-8")
    text = _put(text, "rules", rules_table())
    text = _put(text, "probe", f"vLLM {version}, asked:\n\n{probed}")
    write_text(DOCUMENT, text)
    return DOCUMENT


def _put(text: str, mark: str, table: str) -> str:
    inside = re.compile(rf"(<!-- {mark} -->\n).*?(\n<!-- end -->)", re.DOTALL)
    return inside.sub(lambda m: f"{m[1]}{table}{m[2]}", text, count=1)


if __name__ == "__main__":
    print(write_document())
