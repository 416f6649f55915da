"""ZMQ sockets towards the side channel of a D rank."""

from __future__ import annotations

from typing import TypeAlias

import zmq

from decoded.wire.side_channel import MAX_METADATA_BYTES

Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"
Socket: TypeAlias = "zmq.Socket[bytes]"


def endpoint(host: str, port: int) -> str:
    """ZMQ's way to write a TCP address. IPv6 hosts come without brackets on the wire."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def connect(context: Context, kind: int, host: str, port: int, queue: int = 1000) -> Socket:
    """A socket of `kind` that connects in the background and never lingers when closed.

    `queue`: messages held per direction. Raises zmq.ZMQError where ZMQ cannot read the address.
    """
    socket = context.socket(kind)
    try:
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = queue
        socket.maxmsgsize = MAX_METADATA_BYTES
        # Only for hosts that need it: with it, names resolve to IPv6 addresses first.
        socket.ipv6 = ":" in host
        socket.connect(endpoint(host, port))
    except BaseException:
        socket.close()
        raise
    return socket
