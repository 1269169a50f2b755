"""``eagle3 convert``, ``doctor``, ``card``: a drafter's folder rewritten, examined, described."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3lib.lab.errors import UserError

if TYPE_CHECKING:
    from eagle3lib.drafter.doctor import Diagnosis


def convert(
    source: Annotated[Path, typer.Argument(help="a drafter's folder, of any style")],
    destination: Annotated[Path, typer.Argument(help="a folder that is not there yet")],
    to: Annotated[str, typer.Option(help="both, vllm, sglang or speculators")] = "both",
    target: Annotated[
        str | None, typer.Option(help="built-in name, folder or Hub id of its target")
    ] = None,
    max_shard_mib: Annotated[
        int | None, typer.Option(min=1, help="largest weights file, in MiB; one file if left out")
    ] = None,
) -> None:
    """Write SOURCE in another style: the same tensors bit for bit, or a message that says what the
    goal can't express (exit code 1) and nothing written.

    Examples: eagle3 convert drafter/ served/ --target TARGET; eagle3 convert a/ b/ --to speculators
    """
    from eagle3lib.drafter.convert import GOALS, convert_drafter
    from eagle3lib.target.folder import open_target

    goal = next((g for g in GOALS if g == to), None)
    if goal is None:
        raise UserError(f"no goal {to!r}", expected=", ".join(GOALS), next="--to both")
    opened = open_target(target) if target else None
    try:
        print(convert_drafter(source, destination, goal, opened, max_shard_mib=max_shard_mib))
    except UserError as error:
        print(f"eagle3: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def doctor(
    drafter: Annotated[Path, typer.Argument(help="a drafter's folder, of any style")],
    target: Annotated[str, typer.Option(help="built-in name, folder or Hub id of its target")],
    engine: Annotated[str, typer.Option(help="vllm, sglang or all")] = "all",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document")] = False,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="longest conversation of the server, in tokens")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="a text file to count coverage on")] = None,
    own_embeddings: Annotated[
        bool, typer.Option("--own-embeddings", help="its embeddings were trained")
    ] = False,
    ask: Annotated[bool, typer.Option(help="ask the installed engines' own code")] = True,
) -> None:
    """Say what each engine will read in DRAFTER and what is wrong with it; exit code 1 on errors.
    Needs no GPU.

    Example: eagle3 doctor drafter/ --target TARGET --engine vllm --max-model-len 8192
    """
    from eagle3lib.drafter.doctor import examine
    from eagle3lib.drafter.doctor_probe import ask_engine
    from eagle3lib.target.folder import open_target

    if engine not in ("vllm", "sglang", "all"):
        raise UserError(f"no engine {engine!r}", expected="vllm, sglang or all")
    found = examine(
        drafter,
        open_target(target),
        engine,
        max_model_len=max_model_len,
        text=text,
        own_embeddings=own_embeddings,
        ask=ask_engine if ask else None,
    )
    print(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) if as_json else _shown(found))
    if found.failed:
        raise typer.Exit(1)


def card(
    run: Annotated[str, typer.Argument(help="name of a run")],
    repo: Annotated[
        str, typer.Option(help="the id that it will have on the Hub, such as me/eagle3-model")
    ] = "",
) -> None:
    """Write the model card of a run's drafter again, with what its benchmark measured, and print
    the command that uploads both under your own account.

    Example: eagle3 card demo --repo YOUR_NAME/eagle3-SmolLM2-135M-Instruct
    """
    from eagle3lib.drafter.card import (
        before_publishing,
        rewrite_card,
        suggested_repo,
        upload_command,
    )
    from eagle3lib.lab.files import read_json

    path = rewrite_card(run, repo)
    target = read_json(path.parents[1] / "inputs.json")["params"]["target"]
    print(path)
    for lacking in before_publishing(run):
        print(f"before you publish: {lacking}")
    print(f"upload it: {upload_command(repo or suggested_repo(target), str(path.parent))}")


def _shown(found: Diagnosis) -> str:
    lines = []
    for reader, facts in found.facts.items():
        lines += [reader, *(f"  {name:18} {value}" for name, value in facts.items()), ""]
    for f in found.findings:
        lines += [f"{f.severity:8} {f.title}"]
        told = (("evidence", f.evidence), ("remedy", f.remedy), ("in", f.where))
        lines += [f"         {name:8} {value}" for name, value in told if value]
    errors = sum(f.severity == "error" for f in found.findings)
    lines += [f"{len(found.findings)} findings, {errors} of them errors"]
    return "\n".join(lines)
