"""Who holds a TCP port, for error messages that help."""

from __future__ import annotations


def owner_of_port(port: int) -> str | None:
    """The process that listens on a TCP port of this host, as `name (pid N)`.

    None if nobody does, or the process is another user's or another container's.
    """
    # Imported here: it is needed for a failure's text only.
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.laddr
            and connection.laddr.port == port
            and connection.pid is not None
        ):
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return None
    return None
