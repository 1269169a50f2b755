"""Ports: a free one, or who holds the one that was asked for."""

from __future__ import annotations

import socket

import psutil

from eagle3lib.engine.command import LOOPBACK
from eagle3lib.lab.errors import UserError


def free_port(wanted: int = 0, host: str = LOOPBACK) -> int:
    """``wanted`` if it can be bound, any free one for 0; else ``UserError`` that names its
    holder."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, wanted))
        except (OSError, OverflowError) as error:
            holder = port_holder(wanted)
            raise UserError(
                f"port {wanted} can't be used: {error}" + (f" ({holder})" if holder else ""),
                expected=f"a free port on {host}",
                next="choose port 0 (any), or stop the process that holds it",
            ) from None
        return int(probe.getsockname()[1])


def port_holder(port: int) -> str:
    """Process and command that listen on ``port``; "" where nobody does or it is hidden."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.Error:  # some systems show all connections to their administrator alone
        return ""
    for connection in connections:
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listens and connection.pid:
            return describe_process(connection.pid)
    return ""


def describe_process(pid: int) -> str:
    try:
        return f"process {pid}: {' '.join(psutil.Process(pid).cmdline()[:6])[:120]}"
    except psutil.Error:
        return f"process {pid}"
