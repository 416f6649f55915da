"""The daemon's own KV memory: allocated at start, lent to one engine's rank at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from decoded.kv.regions import SharedRegion
from decoded.wire.layout import KvLayout


class PoolError(Exception):
    """The pool cannot be had; `code` goes into the answer."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class PoolRank:
    """One rank's share of the pool.

    `engine_id`: whose it is, None when free. `retiring`: its registration is over, but
    writers may still be at it.
    """

    layout: KvLayout
    regions: list[SharedRegion]
    engine_id: str | None = None
    retiring: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Pool:
    """All ranks of kv.pool; empty when none is configured."""

    ranks: list[PoolRank] = field(default_factory=list)

    @classmethod
    def create(cls, layouts: list[KvLayout]) -> Pool:
        """Allocate every region of `layouts`, one layout per rank. Raises RegionError."""
        pool = cls()
        try:
            for layout in layouts:
                rank = PoolRank(layout, [])
                pool.ranks.append(rank)
                for region in layout.regions:
                    rank.regions.append(SharedRegion.create(region.name, region.size))
        except BaseException:
            pool.close()
            raise
        return pool

    async def take(self, rank: int, engine_id: str, timeout_s: float) -> PoolRank:
        """Lend a rank's share, once an earlier registration that is over has let go of it.

        Raises PoolError if there is none, or another registration is in force.
        """
        if not self.ranks:
            raise PoolError("no_pool", "this daemon owns no KV memory; configure kv.pool")
        if rank >= len(self.ranks):
            text = f"kv.pool has {len(self.ranks)} ranks, none for rank {rank}"
            raise PoolError("no_pool", text)
        share = self.ranks[rank]
        while share.engine_id is not None:
            text = f"rank {rank} of the pool is in use by engine {share.engine_id}"
            if not share.retiring:
                raise PoolError("pool_taken", text)
            try:
                await asyncio.wait_for(share.freed.wait(), timeout_s)
            except asyncio.TimeoutError:
                raise PoolError("pool_taken", f"{text}, which is draining") from None
        share.engine_id, share.retiring = engine_id, False
        share.freed.clear()
        return share

    @staticmethod
    def give_back(share: PoolRank) -> None:
        """Nobody writes to this share any more."""
        share.engine_id, share.retiring = None, False
        share.freed.set()

    def close(self) -> None:
        """Unmap and remove all of it."""
        for rank in self.ranks:
            for region in rank.regions:
                region.unlink()
                region.close()
        self.ranks.clear()
