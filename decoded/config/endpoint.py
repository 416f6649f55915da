"""What ZMQ takes as the address of the engine link."""

from __future__ import annotations

import os

# Linux's sockaddr_un.sun_path holds 108 bytes, the last of which is NUL.
MAX_IPC_PATH_BYTES = 107


def check_endpoint(endpoint: str) -> str:
    """`endpoint` unchanged, if ZMQ can use it. Raises ValueError that says what is wrong."""
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ValueError(f"'{endpoint}' is neither ipc:///absolute/path nor tcp://host:port")
    if scheme == "ipc":
        length = len(os.fsencode(rest))
        if not rest.startswith("/") or rest.endswith("/"):
            raise ValueError(f"'{endpoint}': ipc:// needs the absolute path of a socket file")
        if length > MAX_IPC_PATH_BYTES:
            raise ValueError(
                f"the socket's path is {length} bytes long, Linux takes {MAX_IPC_PATH_BYTES}: "
                f"choose a shorter one than {rest}"
            )
        return endpoint
    host, separator, port = rest.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() else None
    # `*` lets the system choose a port; the daemon then logs which.
    if not separator or not host or (port != "*" and (number is None or number > 65_535)):
        raise ValueError(f"'{endpoint}': tcp:// needs host:port, the port 1 to 65535 or *")
    return endpoint
