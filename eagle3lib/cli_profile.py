"""``eagle3 profile``: where a decode step and a round spend their time."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3lib.cli_serve import check_start
from eagle3lib.lab.errors import UserError
from eagle3lib.target.smollm2 import NAME

if TYPE_CHECKING:
    from rich.table import Table

    from eagle3lib.engine.config import EngineConfig
    from eagle3lib.engine.settings import ServeParams
    from eagle3lib.measure.profile import Load

_PROMPTS = Path("params/prompts/general.jsonl")


def profile(
    target: Annotated[str, typer.Argument(help="built-in name, folder or Hub id")] = NAME,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]... [-- FLAG...]", help="settings of eagle3 serve"),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help="folder of a drafter: profiles the engine with it, too")
    ] = "",
    run: Annotated[
        str, typer.Option(help="put it into this run, whose drafter it then takes")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="folder; outputs/profiles/..., if none")] = None,
    prompts: Annotated[Path, typer.Option(help="a prompt file")] = _PROMPTS,
    requests: Annotated[int, typer.Option(min=1, help="answers a load")] = 4,
    tokens: Annotated[int, typer.Option(min=8, help="longest answer")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="requests in flight")] = 1,
    stacks: Annotated[
        bool | None, typer.Option(help="record Python's calls; if left out, on a GPU")
    ] = None,
    preflight: Annotated[
        bool, typer.Option(help="look before weights load, at the drafter too")
    ] = True,
) -> None:
    """Show where a decode step and a round spend their time, from the engine's own profiler.

    Starts TARGET twice, alone and with the drafter, under a greedy load. Example:
    eagle3 profile TARGET --drafter FOLDER engine=vllm tensor_parallel=2
    """
    from dataclasses import replace

    from eagle3lib.engine.gpus import gpus
    from eagle3lib.measure.profile import profile_arms
    from eagle3lib.report.page import refresh_page
    from eagle3lib.report.profile_figures import facts, write_profile_page

    folder = _folder(target, out, run)
    config, its_drafter, params = _config(target, words or [], drafter, run)
    load = _load(prompts, requests, tokens, concurrency)
    # vLLM's runner on GPUs and SGLang's older ones tell the drafter by Python's calls alone.
    config = replace(config, trace_stacks=bool(gpus()) if stacks is None else stacks)
    if preflight:
        check_start(replace(config, drafter=its_drafter), params, folder / "logs" / "alone.log")
    found = profile_arms(
        config,
        its_drafter,
        load,
        folder,
        port=params.port,
        deadline_s=params.deadline_s,
        stall_s=params.stall_s,
        say=lambda text: print(text, flush=True),
    )
    _print(found)
    print("\n".join(facts(found)))
    print(write_profile_page(found, folder))
    if run:
        refresh_page(run)


def _folder(target: str, out: Path | None, run: str) -> Path:
    from eagle3lib.lab.run import existing_run, outputs_root
    from eagle3lib.measure.profile import FOLDER

    if out is not None and run:
        raise UserError("both --out and --run", expected="one of them: a run's has its own place")
    if run:
        return existing_run(run) / FOLDER
    name = re.sub(r"[^\w.-]+", "-", Path(target).name)
    return out or outputs_root() / "profiles" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _config(
    target: str, words: list[str], drafter: str, run: str
) -> tuple[EngineConfig, Path | None, ServeParams]:
    """The engine's settings without a drafter, the drafter, and the server's own parameters."""
    from eagle3lib.engine.settings import ServeParams, split_words
    from eagle3lib.lab.run import check_run_target, run_folder
    from eagle3lib.measure.arms import OWN, drafter_folder
    from eagle3lib.target.folder import open_target

    values, flags = split_words(words)
    named = [name for name in (drafter, str(values.pop("drafter", ""))) if name]
    if len(set(named)) > 1:
        raise UserError(f"two drafters: {' and '.join(named)}", expected="one, by --drafter")
    own = drafter_folder(run_folder(run), OWN) if run else None
    if own is not None and own.exists():
        named = named or [str(own)]
    if named and not Path(named[0]).is_dir():
        raise UserError(
            "the drafter is not there", expected="a folder of an EAGLE-3 drafter", where=named[0]
        )
    params = ServeParams.checked(values)
    for name in ("host", "log"):
        if getattr(params, name) != ServeParams.model_fields[name].default:
            raise UserError(
                f"{name} is not for a profile",
                expected="a server that only we ask, its log in the profile's folder",
            )
    opened = open_target(target)
    if run:  # its drafter beside another target, TARGET's default say, profiles neither
        check_run_target(run, opened.name, opened.fingerprint)
    config = params.config(opened.folder, flags)
    return config, Path(named[0]) if named else None, params


def _load(prompts: Path, requests: int, tokens: int, concurrency: int) -> Load:
    from eagle3lib.data.prompts import read_prompts
    from eagle3lib.lab.phase_params import resolve
    from eagle3lib.measure.profile import Load

    known, _ = read_prompts(resolve(str(prompts)), "general")
    picked = [known[i % len(known)] for i in range(requests)]
    return Load([list(p.messages) for p in picked], tokens, concurrency)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    Console().print(_table(found))


def _table(found: dict[str, Any]) -> Table:
    from rich.table import Table

    from eagle3lib.report.profile_figures import profile_rows, unit_of

    table = Table(title="milliseconds under the profiler, and their share")
    table.add_column("")
    for arm in found["arms"]:
        table.add_column(f"{unit_of(arm)}, ms", justify="right")
        table.add_column("share", justify="right")
    if len(found["arms"]) > 1:
        table.add_column("added", justify="right")
    for row in profile_rows(found):
        cells = [row["kind"]]
        for seconds, share in zip(row["seconds"], row["shares"], strict=True):
            cells += [f"{1000 * seconds:.2f}", f"{share:.1%}"]
        cells += [f"{1000 * row['added_s']:+.2f}"] if row["added_s"] is not None else []
        table.add_row(*cells, end_section=row["kind"] == "idle")
    return table
