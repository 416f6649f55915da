"""Each of the three owners of KV memory, from registration to received bytes, with a real
daemon, a real producer and real Mooncake.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from decoded.client import AsyncClient, Client, Outcome, Registration, Submission
from decoded.client.memory import PoolMemory, SharedCaches, plan_layout, share_tensors
from decoded.client.transfer import WorkerTransfer
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.kv.layout import LayoutError
from decoded.producer import Producer, PushRequest, RemoteParams
from decoded.producer.metaserver import Metaserver
from decoded.testing import DaemonProcess
from decoded.wire.layout import KvGroup, KvLayout

HOST = "127.0.0.1"
BLOCKS, BLOCK_LEN, NAMES = 16, 512, [f"layers.{index}" for index in range(3)]
GROUP = KvGroup(16, BLOCKS)
LOCAL, REMOTE = [3, 4, 9], [8, 1, 2]
CONFIG: dict[str, Any] = {
    "side_channel": {"bind_host": HOST, "advertise_host": HOST},
    "kv": {
        "pool": {
            "groups": [{"block_size": 16, "num_blocks": BLOCKS}],
            "layers": [
                {"name": "layers.{}", "count": 3, "tensors": [{"block_len": BLOCK_LEN}] * 2}
            ],
        }
    },
}

Block = Callable[[str, int, int], bytes]
"""Reads layer, tensor, block."""


def planned() -> KvLayout:
    pair = [PoolTensor(block_len=BLOCK_LEN)] * 2
    layers = [PoolLayer(name=name, tensors=pair) for name in NAMES]
    return plan_layout([PoolGroup(block_size=16, num_blocks=BLOCKS)], layers)


def reader(caches: SharedCaches) -> Block:
    return lambda layer, index, block: bytes(caches.block(layer, index, block))


def tensors() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    made = {}
    for name in NAMES:
        stacked = torch.zeros(2, BLOCKS, BLOCK_LEN, dtype=torch.uint8)
        made[name] = (stacked[0], stacked[1])
    return made


def of_tensors(caches: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Block:
    return lambda layer, index, block: bytes(caches[layer][index][block].tolist())


@contextmanager
def made_here(worker: Client) -> Iterator[Block]:
    with SharedCaches.create(planned()) as caches:
        worker.register_kv(caches.memory)
        yield reader(caches)
        worker.unregister_kv()


@contextmanager
def torch_shared(worker: Client) -> Iterator[Block]:
    caches = tensors()
    worker.register_kv(share_tensors(caches, [GROUP]))
    yield of_tensors(caches)
    worker.unregister_kv()


@contextmanager
def pooled(worker: Client) -> Iterator[Block]:
    registration = worker.register_kv(PoolMemory())
    with SharedCaches.attach(registration.layout) as caches:
        yield reader(caches)
        worker.unregister_kv()


@contextmanager
def own_engine(worker: Client) -> Iterator[Block]:
    caches = tensors()
    with WorkerTransfer.of_tensors(caches, [GROUP], host=HOST) as transfer:
        worker.register_kv(transfer.memory)
        yield of_tensors(caches)
        worker.unregister_kv()


@pytest.mark.parametrize("arrangement", [made_here, torch_shared, pooled, own_engine])
def test_bytes_arrive(arrangement: Callable[[Client], Any]) -> None:
    async def run(endpoint: str, producer: Producer) -> Outcome:
        async def prefill(params: RemoteParams) -> None:
            push = await asyncio.to_thread(producer.open, PushRequest(params, 40, [LOCAL]))
            for index in range(len(NAMES)):
                push.layer(index)
            await asyncio.wrap_future(push.seal())

        async with Metaserver(prefill, HOST) as server, AsyncClient(endpoint, "engine") as client:
            params = {"do_remote_prefill": True, "metaserver": server.url}
            await client.submit(
                Submission("r-0a1b2c3d", "r", [REMOTE], 40, kv_transfer_params=params)
            )
            [outcome] = await client.wait(60)
            return outcome

    with (
        SharedCaches.create(planned()) as source,
        DaemonProcess(CONFIG) as daemon,
        Client(daemon.endpoint, "engine", "worker") as worker,
        Producer(source.layout, [source.regions[0].address], host=HOST) as producer,
    ):
        size = source.regions[0].size
        source.regions[0].buffer[:] = random.Random(7).randbytes(size)
        with arrangement(worker) as read:
            outcome = asyncio.run(run(daemon.endpoint, producer))
            assert outcome.state == "done", outcome
            assert [one.request_id for one in worker.wait(10)] == ["r-0a1b2c3d"]
            for name in NAMES:
                for index in range(2):
                    for mine, theirs in zip(LOCAL, REMOTE, strict=True):
                        sent = bytes(source.block(name, index, mine))
                        assert read(name, index, theirs) == sent
                    assert read(name, index, 5) == bytes(BLOCK_LEN)


def test_the_pool_of_a_restarted_daemon_is_a_new_one(tmp_path: Any) -> None:
    with (
        DaemonProcess(CONFIG, tmp_path) as daemon,
        Client(daemon.endpoint, "engine", "worker") as worker,
    ):
        before: Registration = worker.register_kv(PoolMemory())
        with SharedCaches.attach(before.layout) as old:
            old.block("layers.0", 0, 1)[:] = bytes([1]) * BLOCK_LEN
        daemon.kill()
        daemon.start()
        while worker.registration is before:
            worker.wait(0.02)
        after = worker.registration
        assert after is not None
        with SharedCaches.attach(after.layout) as new:
            assert bytes(new.block("layers.0", 0, 1)) == bytes(BLOCK_LEN)


def test_a_worker_s_engine_needs_an_address_per_region() -> None:
    layout = planned()
    with pytest.raises(LayoutError, match="0 region addresses for 1"):
        WorkerTransfer(layout, [], HOST)
