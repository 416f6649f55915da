"""What a caller says about a push, and what it is told at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decoded.wire.layout import KvLayout

from .errors import PushError
from .params import RemoteParams


@dataclass(frozen=True)
class PushRequest:
    """A prompt whose KV D waits for.

    `params`: what D posted. `block_ids`: P's own blocks per KV group; with chunked prefill
    more may be added later. `request_id`: P's internal id, named in the handshake and in
    logs; empty means the external id.
    """

    params: RemoteParams
    prompt_tokens: int
    block_ids: Sequence[Sequence[int]]
    request_id: str = ""


@dataclass(frozen=True)
class PushResult:
    """How a push ended.

    `done` and `failed`: D was told DONE or FAILED, and `acknowledged` says whether it
    answered. `silent`: this rank had nothing to tell D, as D holds the prompt already or
    another P rank sends the same bytes.
    """

    state: Literal["done", "failed", "silent"]
    detail: str
    acknowledged: bool
    layers: int
    nbytes: int
    elapsed_s: float


def check_local_blocks(layout: KvLayout, block_ids: Sequence[Sequence[int]]) -> None:
    """Raise PushError unless P's layout has these blocks."""
    if len(block_ids) != len(layout.groups):
        raise PushError(f"{len(block_ids)} lists of blocks for P's {len(layout.groups)} KV groups")
    for number, (group, ids) in enumerate(zip(layout.groups, block_ids, strict=True)):
        if ids and not (min(ids) >= 0 and max(ids) < group.num_blocks):
            raise PushError(
                f"P's KV group {number} has blocks 0..{group.num_blocks - 1}, "
                f"not all of {min(ids)}..{max(ids)}"
            )
