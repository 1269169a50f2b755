"""The model card of an exported drafter, with what was measured of it so far.

The export writes it before anything was served; ``eagle3 card RUN`` writes it again with the
benchmark's figures. The card is no artefact of the phase, so that neither outdates the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_text
from eagle3lib.lab.run import outdated_by, run_folder

_NOT_YET = "| own drafter | not served yet | | | |"


@dataclass(frozen=True)
class CardFacts:
    """``base_model`` is the target's Hub id, its name here where that is empty."""

    target: str
    fingerprint: str
    trained_on: str
    base_model: str = ""
    licence: str = ""
    data: str = ""


def model_card(
    config: DrafterConfig, about: CardFacts, benchmark: dict[str, Any] | None = None
) -> str:
    """README.md of a drafter's folder. ``benchmark`` is metrics.json of 06_benchmark_serving."""
    base = about.base_model or about.target
    data = ModelCardData(
        base_model=base,
        license=about.licence or None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding"],
    )
    kind = "MLA" if config.mla else "Llama"
    options = ", ".join(config.options) or "none"
    body = f"""# EAGLE-3 drafter for {base}

One {kind}-type layer over the target's states before layers {list(config.slots)}, proposing
{config.draft_vocab_size:,} of {config.vocab_size:,} tokens (options: {options}). {about.trained_on}

    vllm serve TARGET --speculative-config \\
      '{{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": 3}}'

It drafts for this very target (fingerprint {about.fingerprint}); another one will reject its
drafts.

## Data and licence

{about.data or "Its data is not told here."}
Licence of this drafter: {about.licence or "not stated"}.
The target and the prompts have licences of their own.

## Measured

{_measured(benchmark)}

Acceptance length counts the target's own token of each round. The speed-up is against the same
engine without a drafter, on the same prompts.
"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def _measured(benchmark: dict[str, Any] | None) -> str:
    head = "| arm | prompts | acceptance length | tokens/s | speed-up (95 % interval) |"
    lines = [head, "|---|---|---|---|---|"]
    if benchmark is None:
        return "\n".join([*lines, _NOT_YET])
    for line in benchmark["arms"]:
        length = (line.get("acceptance") or {}).get("acceptance_length")
        gain = line.get("speedup")
        told = f"{gain['value']:.2f} ({gain['low']} to {gain['high']})" if gain else ""
        lines.append(
            f"| {line['arm']} | {line['set']} | {'' if length is None else f'{length:.2f}'} | "
            f"{line['tokens_per_s']:.1f} | {told} |"
        )
    b = benchmark
    lines += ["", f"Engine {b['engine']}, {b['dtype']}, K = {b['num_speculative_tokens']}, "
              f"concurrency {b['concurrency']}, temperature {b['temperature']:g}."]  # fmt: skip
    return "\n".join(lines)


def rewrite_card(run: str) -> Path:
    """The card of a run's exported drafter with the figures of its benchmark, where that is done
    and of this very drafter. Raises ``UserError`` for a run without an export."""
    folder = run_folder(run)
    phase = folder / "05_export_drafter"
    if not (phase / "manifest.json").exists():
        raise UserError(
            f"run {run!r} has no exported drafter", where=phase, next=f"eagle3 run {run} 05"
        )
    inputs, metrics = read_json(phase / "inputs.json"), read_json(phase / "metrics.json")
    params = inputs["params"]
    about = CardFacts(params["target"], inputs["target"], metrics["trained_on"],
                      params["base_model"], params["licence"], _data(folder))  # fmt: skip
    drafter = phase / "drafter"
    # Our own config names its slots at the top level, so the target's depth decides nothing.
    config = read_drafter_config(drafter, 0)
    card = drafter / "README.md"
    write_text(card, model_card(config, about, _benchmark(folder)))
    return card


def _data(folder: Path) -> str:
    """Which prompts and whose answers a run trained on, their files by name; "" if not known."""
    path = folder / "01_generate_data" / "inputs.json"
    if not path.exists():
        return ""
    params = read_json(path)["params"]
    workload = Path(params["workload"]).name
    given = params.get("answers")
    who = f"given answers ({Path(given).name}) and its target's" if given else "its target's own"
    return (
        f"Trained on {who} answers to prompts of `{workload}`, sampled at temperature "
        f"{params['temperature']:g}."
    )


def _benchmark(folder: Path) -> dict[str, Any] | None:
    name = "06_benchmark_serving"
    manifest = folder / name / "manifest.json"
    if not manifest.exists() or outdated_by(folder, name):
        return None
    if "05_export_drafter" not in read_json(manifest)["inputs"]["upstream"]:
        return None  # it measured another drafter, parameter drafter
    return read_json(folder / name / "metrics.json")
