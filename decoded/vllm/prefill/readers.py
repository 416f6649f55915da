"""Which of P's blocks queued writes may still read, and which of them a step overwrites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

NULL_BLOCK = 0
"""vLLM's stand-in where a group has no block; it holds nothing."""


class Readers:
    """The blocks of each push that has not ended.

    vLLM takes blocks back while they are read: from a request that it preempts, and from a
    group with a sliding window as the window moves on. The scheduler sees it only when it
    gives such a block to somebody else.
    """

    def __init__(self) -> None:
        self._by_block: dict[int, set[str]] = {}
        self._by_request: dict[str, set[int]] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def add(self, request_id: str, blocks: Iterable[int]) -> None:
        """A push will read these, besides those that it reads already."""
        mine = self._by_request.setdefault(request_id, set())
        for block in blocks:
            if block != NULL_BLOCK:
                mine.add(block)
                self._by_block.setdefault(block, set()).add(request_id)

    def overwritten(self, blocks: Iterable[int]) -> set[str]:
        """The requests that read any of these blocks, which they now have lost."""
        found: set[str] = set()
        for block in blocks:
            for request_id in self._by_block.pop(block, ()):
                self._by_request[request_id].discard(block)
                found.add(request_id)
        return found

    def forget(self, request_id: str) -> None:
        """A push has ended, if it was one."""
        for block in self._by_request.pop(request_id, ()):
            readers = self._by_block[block]
            readers.discard(request_id)
            if not readers:
                del self._by_block[block]


def written_blocks(scheduler_output: Any, block_sizes: Sequence[int]) -> Iterator[int]:
    """Blocks that a step gives to requests to write to: not those found in the prefix cache.

    `block_sizes`: tokens per block, per KV group.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield from _uncomputed(new.block_ids, new.num_computed_tokens, block_sizes)
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, computed, block_ids in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        if block_ids:
            resumed = request_id in cached.resumed_req_ids
            yield from _uncomputed(block_ids, computed if resumed else 0, block_sizes)


def _uncomputed(
    block_ids: Sequence[Sequence[int]], computed: int, block_sizes: Sequence[int]
) -> Iterator[int]:
    for ids, size in zip(block_ids, block_sizes, strict=True):
        yield from ids[computed // size :]
