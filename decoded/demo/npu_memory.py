"""The D engine's KV memory on an NPU, in its three arrangements."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from decoded.client import Client
from decoded.client.transfer import WorkerTransfer
from decoded.kv.layout import moved
from decoded.kv.npu import NpuRegion
from decoded.wire.layout import KvLayout, PoolMemory, Region, SharedMemory

from .npu import NpuCache
from .scenario import D_BLOCKS, Arrangement
from .shape import kv_layout

HOST = "127.0.0.1"


def open_cache(worker: Client, stack: ExitStack, arrangement: Arrangement, npu: int) -> NpuCache:
    """KV memory of `D_BLOCKS` blocks that the daemon receives into."""
    layout, region = _OPEN[arrangement](worker, stack, npu)
    return NpuCache(layout, region)


def _allocate(stack: ExitStack, npu: int) -> tuple[KvLayout, NpuRegion]:
    planned = kv_layout(D_BLOCKS, "demo-worker")
    region = NpuRegion.create("demo-worker", planned.regions[0].size, npu)
    stack.callback(region.close)
    return moved(planned, [Region(region.name, region.size)], [region.begin]), region


def _engine(worker: Client, stack: ExitStack, npu: int) -> tuple[KvLayout, NpuRegion]:
    layout, region = _allocate(stack, npu)
    worker.register_kv(SharedMemory(moved(layout, [region.share()], [0])))
    return layout, region


def _daemon(worker: Client, stack: ExitStack, npu: int) -> tuple[KvLayout, NpuRegion]:
    layout = worker.register_kv(PoolMemory()).layout
    region = NpuRegion.attach(layout.regions[0])
    stack.callback(region.close)
    return layout, region


def _transfer(worker: Client, stack: ExitStack, npu: int) -> tuple[KvLayout, NpuRegion]:
    layout, region = _allocate(stack, npu)
    transfer = WorkerTransfer(layout, [region.address], HOST, "ascend")
    stack.callback(transfer.close)
    worker.register_kv(transfer.memory)
    return layout, region


_OPEN: dict[Arrangement, Callable[[Client, ExitStack, int], tuple[KvLayout, NpuRegion]]] = {
    "engine": _engine,
    "daemon": _daemon,
    "transfer": _transfer,
}
