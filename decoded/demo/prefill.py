"""The P process: a metaserver, a model, and a producer that pushes each layer as it is computed."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from decoded.kv.layout import moved
from decoded.producer import Producer, Push, PushRequest, RemoteParams
from decoded.producer.metaserver import Metaserver, PrefillFailed, UnknownRequest
from decoded.wire.layout import Region

from .cache import BlockPool, PagedCache
from .lines import Parent
from .model import Model, prepare_torch
from .scenario import P_BLOCKS, Request, make_batch
from .shape import kv_layout

HOST = "127.0.0.1"

T = TypeVar("T")


class PrefillNode:
    """Prefills of several requests take turns, layer by layer, on the one thread that computes."""

    def __init__(
        self,
        parent: Parent,
        folder: Path,
        producer: Producer,
        cache: PagedCache,
        compute: ThreadPoolExecutor,
    ) -> None:
        self._parent = parent
        self._folder = folder
        self._producer = producer
        self._cache = cache
        self._model = Model()
        self._blocks = BlockPool(P_BLOCKS)
        self._batch = {request.external_id: request for request in make_batch()}
        self._gates = {external_id: asyncio.Event() for external_id in self._batch}
        self._compute = compute

    async def prefill(self, params: RemoteParams) -> None:
        """Compute a prompt's KV and push it to D. Raises UnknownRequest or PrefillFailed."""
        request = self._batch.get(params.request_id)
        if request is None:
            raise UnknownRequest
        blocks = self._blocks.take(request.blocks, request.scattered)
        count = len(request.prompt)
        push = await asyncio.to_thread(
            self._producer.open, PushRequest(params, count, [blocks], request.request_id)
        )
        hidden = await self._run(partial(self._model.embed, request.prompt))
        for index in range(self._model.shape.layers):
            layer = partial(self._model.prefill_layer, index, hidden, count, self._cache, blocks)
            hidden = await self._run(layer)
            await self._push(request, push, index, await self._run(self._cache.written))
            if index + 1 == request.fail_at:
                break
        failed = request.fail_at is not None
        end = push.fail(f"P broke before layer {request.fail_at}") if failed else push.seal()
        result = await asyncio.wrap_future(end)
        dump = await self._run(partial(self._cache.dump, blocks))
        self._folder.joinpath(f"{request.external_id}.p").write_bytes(dump)
        self._parent.tell("pushed", id=request.external_id, **dataclasses.asdict(result))
        if result.state == "failed":
            raise PrefillFailed(result.detail)

    def go_on(self, external_id: str) -> None:
        """Let a request that has paused go on."""
        self._gates[external_id].set()

    async def _push(
        self, request: Request, push: Push, index: int, written: Callable[[], None] | None
    ) -> None:
        """Push a layer; if the request stops after it, only return once it is being written."""
        if index + 1 not in (request.pause_at, request.fail_at):
            push.layer(index, ready=written)
            return
        loop, writing = asyncio.get_running_loop(), asyncio.Event()

        def reached() -> None:
            if written is not None:
                written()
            loop.call_soon_threadsafe(writing.set)

        push.layer(index, ready=reached)
        await writing.wait()
        if index + 1 == request.pause_at:
            self._parent.tell("paused", id=request.external_id, layers=index + 1)
            await self._gates[request.external_id].wait()

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compute, work)


async def serve(parent: Parent, node: PrefillNode) -> None:
    """Serve D until the parent closes its pipe."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        while (message := parent.hear()) is not None:
            loop.call_soon_threadsafe(obey, message)
        loop.call_soon_threadsafe(over.set)

    def obey(message: dict[str, Any]) -> None:
        if message["what"] == "go on":
            node.go_on(message["id"])

    async with Metaserver(node.prefill, HOST) as server:
        threading.Thread(target=listen, daemon=True).start()
        parent.tell("ready", url=server.url)
        await over.wait()


@contextmanager
def host_memory() -> Iterator[tuple[Producer, PagedCache]]:
    """P's KV memory on the host, and what pushes it."""
    layout = kv_layout(P_BLOCKS, "p-node")
    with mmap.mmap(-1, layout.regions[0].size) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        cache = PagedCache(layout, memoryview(memory))
        with Producer(layout, [address], host=HOST) as producer:
            yield producer, cache
        cache.close()


@contextmanager
def npu_memory(number: int, compute: ThreadPoolExecutor) -> Iterator[tuple[Producer, PagedCache]]:
    """The same on an NPU, which both the thread that computes and those that push use."""
    from decoded.kv.npu import NpuRegion, use_device

    from .npu import NpuCache

    planned = kv_layout(P_BLOCKS, "p-node")
    size = planned.regions[0].size
    region = compute.submit(NpuRegion.create, "p-node", size, number).result()
    layout = moved(planned, [Region(region.name, region.size)], [region.begin])
    cache = compute.submit(NpuCache, layout, region).result()
    with Producer(
        layout,
        [region.address],
        host=HOST,
        protocol="ascend",
        on_thread_start=partial(_use, use_device, number),
    ) as producer:
        yield producer, cache
    compute.submit(cache.close).result()
    compute.submit(region.close).result()


def _use(use_device: Callable[[int], int], number: int) -> None:
    use_device(number)


def main() -> None:
    parent, folder, npu = Parent(), Path(sys.argv[1]), int(sys.argv[2])
    prepare_torch()
    with ThreadPoolExecutor(1, "compute", prepare_torch) as compute:
        memory = host_memory() if npu < 0 else npu_memory(npu, compute)
        with memory as (producer, cache):
            asyncio.run(serve(parent, PrefillNode(parent, folder, producer, cache, compute)))


if __name__ == "__main__":
    main()
