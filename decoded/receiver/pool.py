"""The daemon's own KV memory: allocated at start, lent to one engine's rank at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from decoded.kv.layout import moved
from decoded.kv.memory import KvRegion
from decoded.kv.npu import NpuRegion
from decoded.kv.regions import SharedRegion
from decoded.wire.layout import KvLayout, Region

from .rank import RankThread


class PoolError(Exception):
    """The pool cannot be had; `code` goes into the answer."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class PoolRank:
    """One rank's share of the pool.

    `engine_id`: whose it is, None when free. `retiring`: its registration is over, but
    writers may still be at it. `thread`: where its memory is allocated, shared and let go.
    """

    layout: KvLayout
    regions: list[KvRegion]
    thread: RankThread
    engine_id: str | None = None
    retiring: bool = False
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    async def shared_layout(self) -> KvLayout:
        """The layout as one more client may map it. Raises RegionError."""
        npus = [region for region in self.regions if isinstance(region, NpuRegion)]
        if not npus:
            return self.layout
        shared = await self.thread.run(lambda: [region.share() for region in npus])
        return msgspec.structs.replace(self.layout, regions=shared)


@dataclass
class Pool:
    """All ranks of kv.pool; empty when none is configured."""

    ranks: list[PoolRank] = field(default_factory=list)

    @classmethod
    async def create(cls, layouts: Sequence[KvLayout], npus: Sequence[int] = ()) -> Pool:
        """Allocate every region of `layouts`, one layout per rank, each on its NPU if `npus`
        has their numbers, else in shared memory. Raises RegionError.
        """
        pool = cls()
        try:
            for number, layout in enumerate(layouts):
                rank = PoolRank(layout, [], RankThread(f"pool-{number}"))
                pool.ranks.append(rank)
                for region in layout.regions:
                    create = partial(_create, region, npus[number] if npus else None)
                    rank.regions.append(await rank.thread.run(create))
                begins = [getattr(region, "begin", 0) for region in rank.regions]
                placed = [Region(region.name, region.size) for region in rank.regions]
                rank.layout = moved(layout, placed, begins)
        except BaseException:
            await pool.close()
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

    async def close(self) -> None:
        """Unmap and remove all of it."""
        for rank in self.ranks:
            for region in rank.regions:
                await rank.thread.run(partial(_remove, region))
            rank.thread.close()
        self.ranks.clear()


def _create(region: Region, npu: int | None) -> KvRegion:
    if npu is None:
        return SharedRegion.create(region.name, region.size)
    return NpuRegion.create(region.name, region.size, npu)


def _remove(region: KvRegion) -> None:
    region.unlink()
    region.close()
