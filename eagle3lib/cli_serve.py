"""``eagle3 serve``, ``ps`` and ``stop``: an engine with its preflight, watchdog and end."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import Finding, by_severity, raise_errors
from eagle3lib.target.smollm2 import NAME

if TYPE_CHECKING:
    from eagle3lib.engine.config import EngineConfig
    from eagle3lib.engine.launch import EngineServer
    from eagle3lib.engine.settings import ServeParams

_LOOK_EVERY_S = 30.0


def serve(
    target: Annotated[str, typer.Argument(help="built-in name, folder or Hub id")] = NAME,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE]... [-- FLAG...]", help="settings; the engine's flags"),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="outlives this command")] = False,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="after a failed start try what its class suggests")
    ] = False,
    preflight: Annotated[
        bool, typer.Option(help="look before weights load, at the drafter too")
    ] = True,
    api_key: Annotated[
        str, typer.Option(envvar="EAGLE3_API_KEY", help="needed beyond loopback")
    ] = "",
    settings: Annotated[bool, typer.Option("--settings", help="list them, start nothing")] = False,
) -> None:
    """Start TARGET, with a drafter or without, and keep it until Ctrl-C (or --detach).

    Examples: eagle3 serve; eagle3 serve TARGET drafter=outputs/demo/05_export_drafter/drafter;
    eagle3 serve moonshotai/Kimi-K2.5 engine=sglang tensor_parallel=8 --detach --fallback
    """
    from eagle3lib.engine.launch import EngineServer
    from eagle3lib.engine.servers import servers_folder
    from eagle3lib.engine.settings import ServeParams, split_words

    if settings:
        for name, info in ServeParams.model_fields.items():
            print(f"  {name:28} {info.default!r:14} {info.description}")
        return
    values, flags = split_words(words or [])
    params = ServeParams.checked(values)
    config = params.config(_folder(target), flags)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = Path(params.log or servers_folder() / f"{params.engine}-{stamp}.log")
    if preflight:
        check_start(config, params, log)
    server = EngineServer(
        config,
        log,
        params.port,
        params.deadline_s,
        host=params.host,
        api_key=api_key,
        stall_s=params.stall_s,
        detached=detach,
        fallback=fallback,
        say=lambda text: print(text, flush=True),
    )
    _run(server)


def check_start(config: EngineConfig, params: ServeParams, log: Path) -> None:
    """What can be known before weights load. Raises ``UserError`` for errors, prints the rest."""
    from eagle3lib.engine.preflight import check_preflight

    _show(findings := check_preflight(config, params.port, params.host, log=log))
    raise_errors(findings)
    _show(findings := _check_drafter(config))
    raise_errors(findings)


def _folder(target: str) -> Path:
    from eagle3lib.target.folder import open_target

    return open_target(target).folder


def _check_drafter(config: EngineConfig) -> list[Finding]:
    """What the doctor finds in the drafter for this engine, whose own code it asks."""
    from eagle3lib.drafter.doctor import examine
    from eagle3lib.target.folder import open_target

    if config.drafter is None:
        return []
    target, engine = open_target(str(config.target)), config.engine
    found = examine(config.drafter, target, engine, max_model_len=config.max_model_len)
    if found.failed:
        print(
            f"the drafter would be misread; --no-preflight serves it all the same, and more says: "
            f"eagle3 doctor {config.drafter} --target {config.target} --engine {engine}"
        )
    return found.findings


def _run(server: EngineServer) -> None:
    """Start; then leave a detached server, or watch an attached one until Ctrl-C."""
    try:
        server.start()
    except KeyboardInterrupt:
        kept = server.detached and server.state is not None
        print(f"\n{server.state.id} goes on loading: eagle3 ps" if kept else "\nstopped")
        raise typer.Exit(0 if kept else 130) from None
    assert server.state is not None
    print(f"{server.state.id} serves {server.state.model!r} at {server.url}/v1", flush=True)
    for tried in server.attempts if len(server.attempts) > 1 else []:
        print(f"  {tried['setting']}: {'works' if tried['worked'] else tried['class']}")
    if server.detached:
        print(f"it goes on until: eagle3 stop {server.state.id}\nlog: {server.log}")
        return
    try:
        while (failure := server.look()) is None:
            time.sleep(_LOOK_EVERY_S)
        raise failure.error(expected="a server that makes tokens", where=server.log)
    except KeyboardInterrupt:
        print("\nstopping", flush=True)
    finally:
        server.stop()


def _show(findings: list[Finding]) -> None:
    for finding in by_severity(findings):
        if finding.severity != "error":  # those come as one message of their own
            print(f"{finding.severity}: {finding.title}")
            print(f"  {finding.evidence}\n  {finding.remedy}")


def ps() -> None:
    """Show the servers that eagle3 started and that still run."""
    from eagle3lib.engine.servers import age_s, running_servers

    found = running_servers()
    for state in found:
        kind = "detached" if state.detached else "attached"
        drafter = f" + {state.drafter}" if state.drafter else ""
        print(f"{state.id}  {state.address}  {kind}  {age_s(state) / 60:.0f} min  ", end="")
        print(f"{state.condition()}\n  {state.target}{drafter}\n  {state.log}")
    if not found:
        print("no server of eagle3 runs")


def stop(
    server: Annotated[str | None, typer.Argument(metavar="[ID]", help="as eagle3 ps shows")] = None,
    every: Annotated[bool, typer.Option("--all", help="all of them")] = False,
) -> None:
    """End a server that eagle3 started, and nothing else."""
    from eagle3lib.engine.servers import running_servers, stop_server

    found = running_servers()
    chosen = found if every else [s for s in found if s.id == server]
    if not chosen and not every:
        raise UserError(
            f"no server {server!r} of eagle3 runs" if server else "which server?",
            expected=", ".join(s.id for s in found) or "eagle3 ps shows none",
            next="eagle3 ps, then: eagle3 stop ID, or eagle3 stop --all",
        )
    for state in chosen:
        stop_server(state)
        print(f"{state.id} stopped", file=sys.stderr)
