"""Addresses that the daemon is to listen on."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decoded.config import endpoint_of, runtime_dir
from decoded.edges.ports import owner_of_port

from .report import Findings

if TYPE_CHECKING:
    from decoded.config import Config

Running = Mapping[str, Any] | None
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")


def look_at_daemon(findings: Findings, running: Running) -> None:
    """Whether one runs already."""
    if running is None:
        findings.ok("daemon", "none runs with this configuration")
        return
    findings.ok("daemon", f"version {running['version']} runs, pid {running['pid']}")


def look_at_link(
    findings: Findings, config: Config, environ: Mapping[str, str], running: Running
) -> None:
    """The socket that engines connect to."""
    endpoint = endpoint_of(config, environ)
    scheme, _, rest = endpoint.partition("://")
    if running is not None:
        findings.ok("engine link", f"{endpoint}, the running daemon's")
    elif scheme == "ipc":
        _look_at_folder(findings, endpoint, Path(rest).parent, environ)
    else:
        host, _, port = rest.rpartition(":")
        if problem := _problem(host, 0 if port == "*" else int(port)):
            findings.bad("engine link", problem, "change link.endpoint, or stop who holds it")
        else:
            findings.ok("engine link", f"{endpoint} is free")


def _look_at_folder(
    findings: Findings, endpoint: str, folder: Path, environ: Mapping[str, str]
) -> None:
    made = folder == runtime_dir(environ)
    there = folder
    while made and not there.exists():
        there = there.parent
    if not there.is_dir():
        findings.bad("engine link", f"{there} is not a folder", "make it, or set link.endpoint")
    elif not os.access(there, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write to {there}, where {endpoint} is to be"
        findings.bad("engine link", text, "run as another user, or set link.endpoint")
    elif there == folder and made and there.stat().st_uid != os.geteuid():
        owner = there.stat().st_uid
        text = f"{folder} belongs to user {owner}; the daemon will not use it"
        findings.bad("engine link", text, f"run as user {owner}, or set link.endpoint")
    else:
        findings.ok("engine link", endpoint)


def look_at_side_channels(findings: Findings, config: Config, running: Running) -> None:
    """Ports that producers connect to: free, or the running daemon's own."""
    side = config.side_channel
    what = "side channels"
    if problem := _problem(side.bind_host, 0):
        findings.bad(what, problem, "set side_channel.bind_host to an address of this machine")
        return
    if not side.base_port:
        findings.ok(what, f"free ports on {side.bind_host}, chosen for each engine")
        return
    ports = range(side.base_port, side.base_port + side.ranks)
    mine = set(running["side_channel_ports"]) if running is not None else set()
    text = f"ports {ports[0]} to {ports[-1]} on {side.bind_host}"
    taken = [
        problem for port in ports if port not in mine if (problem := _problem(side.bind_host, port))
    ]
    if taken:
        found = taken[0] + (f"; and {len(taken) - 1} more" if len(taken) > 1 else "")
        findings.bad(what, found, "choose another side_channel.base_port, or stop who holds it")
    elif clash := _ephemeral(ports):
        findings.note(
            what,
            f"{text}: {len(clash)} of them are in {_range_text()}, from which Linux gives ports "
            "to outgoing connections: one may be taken at the next start",
            f"sysctl net.ipv4.ip_local_reserved_ports={clash[0]}-{clash[-1]}, or another base_port",
        )
    else:
        findings.ok(what, f"{text} are {'the running daemon' + chr(39) + 's' if mine else 'free'}")


def _problem(host: str, port: int) -> str:
    """Why the daemon could not listen there; empty if it could."""
    plain = None if host in ("*", "") else host.strip("[]")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            plain, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As libzmq does: what a connection has left behind holds nobody up.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            whose = owner_of_port(port)
            return f"port {port} on {host} is taken" + (f" by {whose}" if whose else "")
        return f"this machine cannot listen on {host}, port {port}: {error.strerror or error}"
    return ""


def _ephemeral(ports: Iterable[int]) -> list[int]:
    """Those that Linux may give to an outgoing connection."""
    low, high = map(int, _range_text().split(" to "))
    reserved: set[int] = set()
    for part in _RESERVED.read_text().strip().split(","):
        first, _, last = part.partition("-")
        if first:
            reserved.update(range(int(first), int(last or first) + 1))
    return [port for port in ports if low <= port <= high and port not in reserved]


def _range_text() -> str:
    return " to ".join(_EPHEMERAL.read_text().split())
