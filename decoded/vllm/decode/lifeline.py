"""Telling a daemon that is dead from one that is merely slow to answer."""

from __future__ import annotations

import errno
import socket

from decoded.client import Client, NoAnswer
from decoded.wire.link import Welcome


def greet(client: Client, timeout_s: float) -> Welcome:
    """Wait for the daemon at start. Raises ClientError."""
    try:
        return client.wait_connected(timeout_s)
    except NoAnswer as error:
        raise NoAnswer(
            f"{error}: is `decoded serve` running on this node? kv_connector_extra_config.endpoint "
            "is its link.endpoint, and connect_timeout_s how long to wait for it"
        ) from error


class Lifeline:
    """Whether the daemon at `endpoint` has been gone for `timeout_s` seconds.

    Silence alone proves nothing: a daemon that is stopped may go on later, and its Mooncake
    engines with it. That its socket refuses connections does prove it: the kernel closes a
    listening socket with its process and no sooner.
    """

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._refused_since: float | None = None
        self._look_at = 0.0
        self._looked_at = 0.0

    def is_cut(self, connected: bool, now: float) -> bool:
        """`connected`: the client has a session. Looks at the socket a few times a second."""
        if connected:
            self._refused_since = None
            return False
        if now < self._look_at:
            return False
        if now - self._looked_at > self._timeout_s:
            # Nobody has asked for so long: what was then says nothing of the time between.
            self._refused_since = None
        self._looked_at = now
        self._look_at = now + min(0.25, self._timeout_s / 4)
        if not refuses(self._endpoint):
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        return self._refused_since is not None and now - self._refused_since >= self._timeout_s


def refuses(endpoint: str) -> bool:
    """True if no process listens at a ZeroMQ endpoint: ipc:///path, tcp://host:port."""
    scheme, _, rest = endpoint.partition("://")
    try:
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(0.1)
                probe.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 0.1).close()
    except OSError as error:
        return error.errno in (errno.ECONNREFUSED, errno.ENOENT)
    return False
