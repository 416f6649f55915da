"""What a step's scheduler tells each worker of a P engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from decoded.producer import RemoteAddress, RemoteParams


class Chunk(NamedTuple):
    """A part of a prompt that is computed in this step.

    `computed`: tokens of the prompt that are in the cache after the step. `block_ids`: per
    transferred KV group, the request's blocks; all of them where `fresh`, else those that
    are new. `params`: what D posted, with the request's first chunk.
    """

    request_id: str
    prompt_tokens: int
    computed: int
    block_ids: list[list[int]]
    fresh: bool
    params: RemoteParams | None


@dataclass
class PrefillMeta(KVConnectorMetadata):
    """`preempted`: pushed requests that have lost their blocks. `overwritten`: those of which
    this step overwrites blocks, so that no queued write may read them any more. `refused`:
    who waits for a request whose parameters cannot be used.
    """

    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overwritten: list[str] = field(default_factory=list)
    refused: list[RemoteAddress] = field(default_factory=list)
