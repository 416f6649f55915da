"""What a hello must be, whoever else is there."""

from __future__ import annotations

from decoded import __version__
from decoded.wire import link as wire


def check_hello(hello: wire.Hello) -> None:
    """Raise WireError if a hello cannot be taken."""
    if hello.protocol != wire.PROTOCOL_VERSION:
        text = (
            f"this daemon ({__version__}) speaks protocol version {wire.PROTOCOL_VERSION}, "
            f"the client version {hello.protocol}; upgrade the older of the two"
        )
        raise wire.WireError("unsupported_protocol", text, "hello")
    if hello.role == "scheduler" and hello.rank != 0:
        raise wire.WireError("invalid", "hello: a scheduler's rank is 0", "hello")
    if hello.rank >= hello.world_size:
        text = f"hello: rank {hello.rank} is not below world_size {hello.world_size}"
        raise wire.WireError("invalid", text, "hello")
    tp_size = hello.tp_size or hello.world_size // hello.pcp_size
    if tp_size * hello.pcp_size != hello.world_size:
        text = f"hello: tp_size * pcp_size is not world_size {hello.world_size}"
        raise wire.WireError("invalid", text, "hello")
