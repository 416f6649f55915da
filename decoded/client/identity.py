"""Who a client is: the hello it opens its sessions with."""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec

from decoded.wire.link import PROTOCOL_VERSION, Hello

Role = Literal["scheduler", "worker"]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello)


def make_hello(
    engine_id: str,
    role: Role,
    rank: int,
    world_size: int,
    subscribe: bool,
    expect_workers: bool,
    tp_size: int | None,
    pcp_size: int,
    dcp_size: int,
    name: str,
) -> Hello:
    """A checked hello with a new random session. Raises ValueError naming the argument."""
    if role == "scheduler" and rank != 0:
        raise ValueError(f"rank={rank}: a scheduler's rank is 0")
    if role == "worker" and rank >= world_size:
        raise ValueError(
            f"rank={rank}: with world_size={world_size} it is at most {world_size - 1}"
        )
    if role == "worker" and expect_workers:
        raise ValueError("expect_workers is for the scheduler")
    hello = Hello(
        PROTOCOL_VERSION,
        engine_id,
        uuid.uuid4().hex,
        role,
        rank,
        world_size,
        subscribe,
        expect_workers,
        tp_size,
        pcp_size,
        dcp_size,
        name,
    )
    try:
        _decoder.decode(_encoder.encode(hello))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:
        raise ValueError(f"the client's identity: {error}") from error
    return hello
