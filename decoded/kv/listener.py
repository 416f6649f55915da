"""Mooncake's own listening sockets in this process.

Mooncake's engine listens for the handshakes of peers on its RPC port, with a thread
that waits in accept() up to 1 s at a time and then for what the peer has to say. Its
destructor waits for that thread while it holds the GIL: 1.0 s as a rule, 4.8 s with
three connected peers that said nothing (measured with 0.3.13.post1). `hasten` ends
both waits first, through duplicates of the engine's descriptors, so that the
destructor takes about 1 ms.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing

_WAKE_TIMEOUT_S = 1.0


def listening_ports() -> frozenset[int]:
    """Every TCP port on which this process listens."""
    return frozenset(_port(each) for each in _own_sockets() if _is_listening(each))


def hasten(port: int) -> None:
    """Make the thread that serves `port` return at once from whatever it waits for.

    For an engine that is about to be destroyed. Peers whose handshake is under way
    are cut off. Does nothing where the process has no such socket.
    """
    found = False
    for own in _own_sockets():
        if _port(own) == port and _is_listening(own):
            # The flag belongs to the open file, so the engine's descriptor has it too:
            # from its next accept() on, the thread does not wait.
            own.setblocking(False)
            _drop_waiting_peers(own)
            found = True
    if not found:
        return
    for own in _own_sockets():
        if _port(own) == port and not _is_listening(own):
            _shut_down(own)
    _wake(port)


def _own_sockets() -> Iterator[socket.socket]:
    """A duplicate of each internet stream socket of this process, closed after its turn."""
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue  # closed since the listing
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with closing(socket.socket(fileno=descriptor)) as own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                yield own


def _port(own: socket.socket) -> int:
    return int(own.getsockname()[1])


def _is_listening(own: socket.socket) -> bool:
    return bool(own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_waiting_peers(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:  # none left
            return
        peer.close()


def _shut_down(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # bound only, or gone by itself


def _wake(port: int) -> None:
    """End an accept() that began before the listener stopped blocking."""
    try:
        socket.create_connection(("127.0.0.1", port), _WAKE_TIMEOUT_S).close()
    except OSError:
        return  # not on this address: the accept() ends by itself within 1 s
