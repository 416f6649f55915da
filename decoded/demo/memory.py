"""The D engine's KV memory in its three arrangements, registered with the daemon."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from decoded.client import Client
from decoded.kv.regions import SHARED_PREFIX, SharedRegion
from decoded.kv.transfer import TransferEngine
from decoded.wire.layout import KvLayout, PoolMemory, SharedMemory, TransferMemory

from .cache import PagedCache
from .scenario import D_BLOCKS, Arrangement
from .shape import kv_layout

HOST = "127.0.0.1"


@contextmanager
def registered(worker: Client, arrangement: Arrangement, npu: int) -> Iterator[PagedCache]:
    """KV memory of `D_BLOCKS` blocks that the daemon receives into, until the end of the `with`.

    `npu`: the one that it is on; -1 for the host's memory.
    """
    with ExitStack() as stack:
        if npu >= 0:
            from .npu_memory import open_cache

            cache: PagedCache = open_cache(worker, stack, arrangement, npu)
        else:
            cache = PagedCache(*_OPEN[arrangement](worker, stack))
        stack.callback(cache.close)
        stack.callback(worker.unregister_kv)
        yield cache


def _engine(worker: Client, stack: ExitStack) -> tuple[KvLayout, memoryview]:
    layout = kv_layout(D_BLOCKS, f"{SHARED_PREFIX}demo-{os.getpid()}")
    region = SharedRegion.create(layout.regions[0].name, layout.regions[0].size)
    stack.callback(region.close)
    stack.callback(region.unlink)
    worker.register_kv(SharedMemory(layout))
    return layout, memoryview(region.buffer)


def _daemon(worker: Client, stack: ExitStack) -> tuple[KvLayout, memoryview]:
    layout = worker.register_kv(PoolMemory()).layout
    region = SharedRegion.attach(layout.regions[0].name, layout.regions[0].size)
    stack.callback(region.close)
    return layout, memoryview(region.buffer)


def _transfer(worker: Client, stack: ExitStack) -> tuple[KvLayout, memoryview]:
    layout = kv_layout(D_BLOCKS, "demo-worker")
    memory = stack.enter_context(mmap.mmap(-1, layout.regions[0].size))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    engine = stack.enter_context(TransferEngine.open(HOST))
    engine.register(address, layout.regions[0].size)
    worker.register_kv(TransferMemory(layout, engine.port, [address]))
    return layout, memoryview(memory)


_OPEN: dict[Arrangement, Callable[[Client, ExitStack], tuple[KvLayout, memoryview]]] = {
    "engine": _engine,
    "daemon": _daemon,
    "transfer": _transfer,
}
