"""What a step's scheduler tells each worker of a D engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class Begun(NamedTuple):
    """A load that has been submitted. `attempt` counts the engine's loads, so that two of the
    same request differ. `block_ids`: the blocks that are loaded into, of the first KV group.
    """

    request_id: str
    attempt: int
    block_ids: list[int]


class Ended(NamedTuple):
    """A load whose outcome the scheduler has. `boot`: the daemon's life that reported it; empty
    if that life is over, None for a load that no daemon has heard of.
    """

    request_id: str
    attempt: int
    ok: bool
    boot: str | None


@dataclass
class DecodeMeta(KVConnectorMetadata):
    """The same for each worker: so each can report each load exactly once."""

    begun: list[Begun] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
