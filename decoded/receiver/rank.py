"""The memory of one registration, and the thread on which its rank does what blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from decoded.kv.layout import LayoutError
from decoded.kv.memory import KvRegion, attach_region, open_engine
from decoded.kv.npu import NpuRegion, use_device
from decoded.kv.regions import SHARED_PREFIX, unlink_stale
from decoded.kv.transfer import TransferEngine
from decoded.wire.layout import KvLayout

log = structlog.get_logger(__name__)

T = TypeVar("T")

# An engine id and a rank.
Slot = tuple[str, int]


@dataclass(frozen=True)
class TransferSettings:
    """The Mooncake engines' settings. `host`: the address that producers write to."""

    host: str
    protocol: str = "tcp"
    device: str = ""


class RankThread:
    """One worker thread per rank: device contexts belong to threads, so mapping memory,
    Mooncake and device calls of a rank all run here, one after the other.
    """

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Do `work` on the thread and give back what it returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let the thread end once it has done what it was given."""
        self._executor.shutdown(wait=False)


class RankThreads:
    """The thread of each rank, from its first use to the end of its last."""

    def __init__(self) -> None:
        self._threads: dict[Slot, RankThread] = {}
        self._uses: Counter[Slot] = Counter()

    def take(self, slot: Slot) -> RankThread:
        """The rank's thread; `give_back` each time that it was taken."""
        self._uses[slot] += 1
        thread = self._threads.get(slot)
        if thread is None:
            thread = self._threads[slot] = RankThread(f"rank-{slot[0][:64]}-{slot[1]}")
        return thread

    def give_back(self, slot: Slot) -> None:
        self._uses[slot] -= 1
        if not self._uses[slot]:
            del self._uses[slot]
            self._threads.pop(slot).close()


class RankMemory:
    """Mapped regions and the transfer engine that producers write through.

    Everything here blocks and belongs on the rank's thread.
    """

    def __init__(
        self, engine: TransferEngine, regions: Sequence[KvRegion], own_regions: bool
    ) -> None:
        self._engine: TransferEngine | None = engine
        self._regions = regions
        self._own_regions = own_regions
        self.te_rpc_port = engine.port
        self.region_addrs = [region.address for region in regions]

    @classmethod
    def attach(cls, layout: KvLayout, settings: TransferSettings) -> RankMemory:
        """Map an engine's regions and register them. Raises LayoutError, RegionError or
        TransferError.
        """
        _check_one_npu(layout)
        regions: list[KvRegion] = []
        try:
            for region in layout.regions:
                regions.append(attach_region(region))
            return cls(_open(layout, regions, settings), regions, own_regions=True)
        except BaseException:
            for each in regions:
                each.close()
            raise

    @classmethod
    def of_pool(
        cls, layout: KvLayout, regions: Sequence[KvRegion], settings: TransferSettings
    ) -> RankMemory:
        """Register regions that the daemon owns, which outlive this. Raises LayoutError or
        TransferError.
        """
        for region in regions:
            if isinstance(region, NpuRegion):
                use_device(region.device)
        return cls(_open(layout, regions, settings), regions, own_regions=False)

    def fence(self) -> None:
        """Close the transfer engine: nobody can write to the regions through it any more."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    def close(self) -> None:
        """Fence, and unmap what this has mapped. An engine that has died cannot remove its
        shared memory any more, so that is done for it.
        """
        self.fence()
        if self._own_regions:
            for region in self._regions:
                region.close()
            for name in unlink_stale(SHARED_PREFIX):
                log.info("removed shared memory that a dead process left", name=name)


def _open(
    layout: KvLayout, regions: Sequence[KvRegion], settings: TransferSettings
) -> TransferEngine:
    addresses = [region.address for region in regions]
    return open_engine(layout, addresses, settings.host, settings.protocol, settings.device)


def _check_one_npu(layout: KvLayout) -> None:
    """A rank's thread has one device, and its Mooncake engine with it."""
    places = {None if region.npu is None else region.npu.device for region in layout.regions}
    if len(places) > 1:
        names = sorted("host memory" if each is None else f"NPU {each}" for each in places)
        raise LayoutError(f"the memory of one rank is on {' and '.join(names)}, not on one device")
