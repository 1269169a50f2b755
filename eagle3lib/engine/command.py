"""The command and the environment that start an engine; nothing here goes through a shell."""

from __future__ import annotations

import ipaddress

from eagle3lib.engine import sglang, vllm
from eagle3lib.engine.config import EngineConfig, check_config, interpreter, shared_environment
from eagle3lib.lab.errors import UserError
from eagle3lib.lab.finding import raise_errors

LOOPBACK = "127.0.0.1"
HIDDEN = "(hidden)"


def command(config: EngineConfig, port: int, host: str = LOOPBACK, api_key: str = "") -> list[str]:
    """argv of the server.

    Raises ``UserError`` for settings that the engine can't express, and for an address that others
    reach without a key.
    """
    raise_errors(check_config(config))
    if not is_loopback(host) and not api_key:
        raise UserError(
            f"a server on {host} without an API key",
            expected="a key, since others reach this address",
            next="--api-key KEY, or leave --host out to listen on 127.0.0.1",
        )
    engine = vllm if config.engine == "vllm" else sglang
    argv = [interpreter(config.engine), "-m", *engine.MODULE, *engine.flags(config)]
    argv += ["--host", host, "--port", str(port)]
    # vLLM reads its key from the environment, where a list of processes does not show it.
    return argv + (["--api-key", api_key] if api_key and config.engine == "sglang" else [])


def shown(argv: list[str]) -> list[str]:
    """The command for logs and state files, its key hidden."""
    before = ["", *argv[:-1]]
    return [HIDDEN if b == "--api-key" else a for a, b in zip(argv, before, strict=True)]


def environment(threads: int, config: EngineConfig, api_key: str = "") -> dict[str, str]:
    """What the engine's process gets beyond our own environment."""
    engine = vllm if config.engine == "vllm" else sglang
    env = shared_environment(config) | engine.environment(threads, config)
    return env | ({"VLLM_API_KEY": api_key} if api_key and config.engine == "vllm" else {})


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
