"""Opening the memory that a registration names, in each of the three arrangements."""

from __future__ import annotations

from dataclasses import dataclass

from decoded.core.events import Seat
from decoded.kv.layout import LayoutError, check_layout
from decoded.kv.regions import RegionError
from decoded.kv.transfer import TransferError
from decoded.kv.wheel import WheelError, check_wheel
from decoded.wire.layout import KvLayout, KvMemory, PoolMemory, SharedMemory, Source, TransferMemory

from .pool import Pool, PoolError, PoolRank
from .rank import RankMemory, RankThread, TransferSettings

_ADDRESS_SPACE = 2**64


class RegistrationError(Exception):
    """A registration that cannot be; `code` goes into the answer."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Opened:
    """Memory that producers can write to.

    `region_addrs` are valid in the process of the transfer engine at `te_rpc_port`;
    `memory` is that engine where it is ours, None where the worker runs it.
    """

    source: Source
    layout: KvLayout
    region_addrs: list[int]
    te_rpc_port: int
    memory: RankMemory | None = None
    pool_rank: PoolRank | None = None


class Opener:
    """Opens memory. `release_timeout_s`: how long a pool rank that still drains is waited for."""

    def __init__(self, settings: TransferSettings, pool: Pool, release_timeout_s: float) -> None:
        self._settings = settings
        self._pool = pool
        self._release_timeout_s = release_timeout_s

    async def open(self, seat: Seat, memory: KvMemory, thread: RankThread) -> Opened:
        """Open `memory` for a worker. Raises RegistrationError."""
        try:
            if isinstance(memory, TransferMemory):
                return _advertised(memory)
            await thread.run(check_wheel)  # reads many small files
            if isinstance(memory, SharedMemory):
                return await self._shared(memory, thread)
            return await self._pooled(seat, memory, thread)
        except PoolError as error:
            raise RegistrationError(error.code, str(error)) from error
        except LayoutError as error:
            raise RegistrationError("bad_layout", str(error)) from error
        except RegionError as error:
            raise RegistrationError("memory_unavailable", str(error)) from error
        except (TransferError, WheelError) as error:
            raise RegistrationError("transfer_unavailable", str(error)) from error

    async def _shared(self, memory: SharedMemory, thread: RankThread) -> Opened:
        layout, settings = memory.layout, self._settings
        check_layout(layout)
        opened = await thread.run(lambda: RankMemory.attach(layout, settings))
        return Opened("shared", layout, opened.region_addrs, opened.te_rpc_port, opened)

    async def _pooled(self, seat: Seat, memory: PoolMemory, thread: RankThread) -> Opened:
        share = await self._pool.take(seat.rank, seat.engine_id, self._release_timeout_s)
        layout, regions, settings = share.layout, share.regions, self._settings
        try:
            opened = await thread.run(lambda: RankMemory.of_pool(layout, regions, settings))
            layout = await share.shared_layout()
        except BaseException:
            Pool.give_back(share)
            raise
        return Opened("pool", layout, opened.region_addrs, opened.te_rpc_port, opened, share)


def _advertised(memory: TransferMemory) -> Opened:
    check_layout(memory.layout)
    if len(memory.region_addrs) != len(memory.layout.regions):
        raise LayoutError(
            f"{len(memory.region_addrs)} region_addrs for {len(memory.layout.regions)} regions"
        )
    for region, address in zip(memory.layout.regions, memory.region_addrs, strict=True):
        if address + region.size > _ADDRESS_SPACE:
            raise LayoutError(f"region {region.name!r} ends beyond 64 bits of address")
    return Opened("transfer", memory.layout, memory.region_addrs, memory.te_rpc_port)
