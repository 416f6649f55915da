"""How many sockets a process may hold."""

from __future__ import annotations

import resource


def raise_descriptor_limit() -> None:
    """Use what the system allows: a request in flight holds connections, and so descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
