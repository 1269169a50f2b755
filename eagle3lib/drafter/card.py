"""The model card of an exported drafter, with what was measured of it so far.

The export writes it before anything was served; ``eagle3 card RUN`` writes it again with the
benchmark's figures. The card is no artefact of the phase, so that neither outdates the other.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from eagle3lib.drafter.card_facts import (
    NOT_STATED,
    answers_text,
    data_sets,
    data_table,
    target_facts,
)
from eagle3lib.drafter.config import DrafterConfig
from eagle3lib.drafter.read_config import read_drafter_config
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.files import read_json, write_text
from eagle3lib.lab.run import existing_run, outdated_by
from eagle3lib.lab.words import interval_text

_COLUMNS = (
    "arm", "prompts", "acceptance length", "rounds", "accepted at step 1, 2, ...", "tokens/s",
    "speed-up (95 % interval)",
)  # fmt: skip
_NOT_YET = "| own drafter | not served yet | | | | | |"


@dataclass(frozen=True)
class CardFacts:
    """``base_model``: the target's Hub id, "" where it has none that is known. ``licence``: the
    drafter's own. ``data``: Markdown. ``datasets``: Hub ids. ``repo``: where the card will lie."""

    target: str
    fingerprint: str
    trained_on: str
    base_model: str = ""
    target_licence: str = NOT_STATED
    licence: str = ""
    data: str = ""
    datasets: tuple[str, ...] = ()
    repo: str = ""


def facts_of_run(
    folder: Path,
    target: str,
    fingerprint: str,
    trained_on: str,
    base_model: str,
    licence: str,
    repo: str = "",
) -> CardFacts:
    """What the card of the run in ``folder`` says; ``target`` is its parameter."""
    about, sets = target_facts(target, base_model), data_sets(folder)
    data = "\n\n".join(filter(None, [answers_text(folder), data_table(sets)]))
    # Paths are told by their last part: the card is for strangers.
    name = about.hub or Path(target).name
    hubs = tuple(dict.fromkeys(s.hub for s in sets if s.hub))
    return CardFacts(
        name, fingerprint, trained_on, about.hub, about.licence, licence, data, hubs, repo
    )


def model_card(
    config: DrafterConfig, about: CardFacts, benchmark: dict[str, Any] | None = None
) -> str:
    """README.md of a drafter's folder. ``benchmark`` is metrics.json of 06_benchmark_serving."""
    data = ModelCardData(
        base_model=about.base_model or None,  # the Hub takes ids alone
        datasets=list(about.datasets) or None,
        license=about.licence or None,
        library_name="vllm",
        pipeline_tag="text-generation",
        tags=["eagle3", "speculative-decoding"],
    )
    kind = "MLA" if config.mla else "Llama"
    options = ", ".join(config.options) or "none"
    k = benchmark["num_speculative_tokens"] if benchmark else 3
    hub = about.base_model
    named = f"[{hub}](https://huggingface.co/{hub})" if hub else f"`{about.target}`, no Hub id told"
    told = {"method": "eagle3", "model": about.repo or "THIS_FOLDER", "num_speculative_tokens": k}
    body = f"""# EAGLE-3 drafter for {about.target}

One {kind}-type layer over the target's states before layers {list(config.slots)}, proposing
{config.draft_vocab_size:,} of {config.vocab_size:,} tokens (options: {options}). {about.trained_on}

    vllm serve {hub or "TARGET"} --speculative-config \\
      '{json.dumps(told)}'

It drafts for this very target (fingerprint {about.fingerprint}); another one will reject its
drafts.

## Measured

{_measured(benchmark)}

Acceptance length counts the target's own token of each round; accepted at step k is the share of
rounds whose first k drafts were all accepted. The speed-up is against the same engine without a
drafter, on the same prompts.

## Target, data and licences

Target: {named}. Its licence: {about.target_licence}.

{about.data or data_table([])}

Licence of this drafter: {about.licence or NOT_STATED}. The target and the prompts have licences of
their own, above; answers are the target's, under its terms.
"""
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}"))


def _measured(benchmark: dict[str, Any] | None) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    if benchmark is None:
        return "\n".join([*lines, _NOT_YET])
    for line in benchmark["arms"]:
        accepted, gain = line.get("acceptance") or {}, line.get("speedup")
        length = accepted.get("acceptance_length")
        cells = (
            line["arm"],
            line["set"],
            "" if length is None else f"{length:.2f}",
            f"{accepted['rounds']:,}" if "rounds" in accepted else "",
            ", ".join(f"{share:.2f}" for share in accepted.get("per_step", [])),
            f"{line['tokens_per_s']:.1f}",
            f"{gain['value']:.2f} ({interval_text(gain)})" if gain else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    b = benchmark
    setting = f"K = {b['num_speculative_tokens']}, concurrency {b['concurrency']}"
    heat = f"temperature {b['temperature']:g}"
    lines += ["", f"Engine {_engine(b['engine'])}, {b['dtype']}, {setting}, {heat}."]
    return "\n".join(lines)


def _engine(told: dict[str, Any] | str) -> str:
    return told if isinstance(told, str) else f"{told['engine']} {told['version']}"


def rewrite_card(run: str, repo: str = "") -> Path:
    """The card of a run's exported drafter with the figures of its benchmark, where that is done
    and of this very drafter. ``repo``: the Hub id that it will have. Raises ``UserError`` for a run
    without an export, and for a ``repo`` that can't be one."""
    if repo:
        _check_repo(repo)
    folder = existing_run(run)
    phase = folder / "05_export_drafter"
    if not (phase / "manifest.json").exists():
        raise UserError(
            f"run {run!r} has no exported drafter", where=phase, next=f"eagle3 run {run} 05"
        )
    inputs, metrics = read_json(phase / "inputs.json"), read_json(phase / "metrics.json")
    params = inputs["params"]
    about = facts_of_run(folder, params["target"], inputs["target"], metrics["trained_on"],
                         params["base_model"], params["licence"], repo)  # fmt: skip
    drafter = phase / "drafter"
    # Our own config names its slots at the top level, so the target's depth decides nothing.
    config = read_drafter_config(drafter, 0)
    card = drafter / "README.md"
    write_text(card, model_card(config, about, _benchmark(folder)))
    return card


def _check_repo(repo: str) -> None:
    try:
        validate_repo_id(repo)
        problem = "" if "/" in repo else "it names no account"
    except HFValidationError as error:
        problem = str(error).split("\n")[0]
    if problem:
        raise UserError(
            f"{repo!r} can't be a model's id on the Hub: {problem}",
            expected="ACCOUNT/NAME",
            next="eagle3 card RUN --repo YOUR_NAME/eagle3-MODEL",
        )


def suggested_repo(target: str) -> str:
    """``YOUR_NAME/eagle3-MODEL``, where the user's own account is still to be put in."""
    about = target_facts(target)
    return f"YOUR_NAME/eagle3-{Path(about.hub or target).name}"


def upload_command(repo: str, drafter: str) -> str:
    """What uploads the folder, card and all, under the user's own account."""
    return f"hf upload {repo} {shlex.quote(drafter)} . --repo-type model"


def before_publishing(run: str) -> list[str]:
    """What the card of a run lacks, each with the command that mends it."""
    params = read_json(existing_run(run) / "05_export_drafter" / "inputs.json")["params"]
    again = f"eagle3 run {existing_run(run) / 'profile.yaml'} 05"
    lacking = []
    if not params["licence"]:
        lacking.append(f"no licence of its own is stated: {again} licence=apache-2.0")
    if not target_facts(params["target"], params["base_model"]).hub:
        lacking.append(f"the target's Hub id is not known: {again} base_model=ORG/NAME")
    if _benchmark(existing_run(run)) is None:
        lacking.append(f"nothing was measured of it: eagle3 run {run} 06")
    return lacking


def _benchmark(folder: Path) -> dict[str, Any] | None:
    name = "06_benchmark_serving"
    manifest = folder / name / "manifest.json"
    if not manifest.exists() or outdated_by(folder, name):
        return None
    if "05_export_drafter" not in read_json(manifest)["inputs"]["upstream"]:
        return None  # it measured another drafter, parameter drafter
    return read_json(folder / name / "metrics.json")
