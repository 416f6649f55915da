"""A P rank and a D worker with their KV memory on NPUs: `python -m tests.ascend.nodes NAME ...`."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch_npu

from decoded.client import Client
from decoded.client.memory import PoolMemory, SharedCaches, share_tensors, tensor_layout
from decoded.client.transfer import WorkerTransfer
from decoded.config.schema import PoolGroup, PoolLayer, PoolTensor
from decoded.core.events import Seat
from decoded.kv.layout import pool_layout
from decoded.kv.npu import ALIGNMENT, machine_number, use_device
from decoded.kv.transfer import TransferEngine
from decoded.producer import Producer, PushRequest, RemoteParams
from decoded.receiver.opening import Opener
from decoded.receiver.pool import Pool
from decoded.receiver.rank import RankThreads, TransferSettings
from decoded.vllm.caches import Caches as VllmCaches
from decoded.vllm.caches import read_caches
from decoded.vllm.decode.memory import arrange
from decoded.vllm.prefill.device import device_setter, recorder
from decoded.wire.layout import KvGroup, KvMemory, SharedMemory, TransferMemory

from .nodes_facts import BLOCK_SIZE, BLOCKS, LAYERS, WIDTH
from .voice import heard, say

HOST = "127.0.0.1"

npu: Any = torch_npu.npu
Caches = dict[str, tuple[torch.Tensor, torch.Tensor]]


def make_caches(index: int) -> Caches:
    """K and V per layer as an engine has them: views of storages that begin aligned somewhere."""
    caches: Caches = {}
    for layer in range(LAYERS):
        size = 2 * BLOCKS * WIDTH
        whole = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=f"npu:{index}")
        begin = -whole.data_ptr() % ALIGNMENT
        kv = whole[begin : begin + size].view(2, BLOCKS, WIDTH)
        caches[f"layer.{layer}"] = (kv[0], kv[1])
    npu.synchronize()
    return caches


def value_of(seed: int, layer: int, part: int, block: int) -> int:
    """What the made-up model caches: a byte that differs from its neighbours."""
    return (seed * 37 + layer * 11 + part * 5 + block) % 251 + 1


def producer(device: str, rank: str, size: str) -> None:
    """Push as told: {"params", "tokens", "blocks", "seed", "waits"}; says how that ended."""
    index = use_device(int(device))
    caches = make_caches(index)
    layout = tensor_layout(caches, [KvGroup(BLOCK_SIZE, BLOCKS)])
    vllm_caches = VllmCaches(dict(caches), [], {})
    addresses = [tensors[0].untyped_storage().data_ptr() for tensors in caches.values()]
    with Producer(
        layout,
        addresses,
        host=HOST,
        protocol="ascend",
        tp_rank=int(rank),
        tp_size=int(size),
        on_thread_start=device_setter(vllm_caches),
    ) as ours:
        record = recorder("npu")
        say("ready")
        while (order := heard()) != "end":
            began = time.monotonic()
            params = RemoteParams(**order["params"])
            push = ours.open(PushRequest(params, order["tokens"], [order["blocks"]]))
            for number, (name, parts) in enumerate(caches.items()):
                for part, tensor in enumerate(parts):
                    for block in order["blocks"]:
                        tensor[block] = value_of(order["seed"], number, part, block)
                push.layer(name, ready=record() if order["waits"] else None)
            result = push.seal().result(60)
            say([result.state, result.detail, time.monotonic() - began])


def worker(endpoint: str, arrangement: str, device: str, rank: str, size: str) -> None:
    """Register, and then do as told: "again" registers anew, a list compares what was received."""
    index = use_device(int(device))
    with Client(endpoint, "engine", "worker", int(rank), int(size)) as client:
        caches = make_caches(index)
        transfer: WorkerTransfer | None = None

        def memory() -> KvMemory:
            nonlocal transfer
            groups = [KvGroup(BLOCK_SIZE, BLOCKS)]
            if arrangement == "shared":
                return share_tensors(caches, groups)
            if arrangement.startswith("vllm "):
                return by_vllm(caches, arrangement.removeprefix("vllm "))
            if transfer is not None:
                transfer.close()
            transfer = WorkerTransfer.of_tensors(caches, groups, host=HOST, protocol="ascend")
            return transfer.memory

        registered = client.register_kv(PoolMemory() if arrangement == "pool" else memory())
        if arrangement == "pool":
            pool = SharedCaches.attach(registered.layout)
            caches = {
                name: (pool.tensor(name, 0, "uint8"), pool.tensor(name, 1, "uint8"))
                for name in caches
            }
        say(["registered", machine_number(npu.current_device())])
        while (order := heard()) != "end":
            if order == "again":
                client.wait_connected(60)
                while client.registration is registered:
                    client.wait(0.05)
                if client.registration is None:
                    client.register_kv(memory())
                say("registered")
            else:
                seed, ours, theirs = order
                say(different(caches, seed, ours, theirs))
        if transfer is not None:
            client.unregister_kv()
            transfer.close()


def by_vllm(caches: Caches, choice: str) -> KvMemory:
    """What the vLLM plug-in registers, given the caches as vllm-ascend has them."""
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    group = SimpleNamespace(layer_names=list(caches), kv_cache_spec=spec)
    config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[group])
    shaped = {
        name: tuple(tensor.view(BLOCKS, BLOCK_SIZE, 2, -1) for tensor in parts)
        for name, parts in caches.items()
    }
    settings: Any = SimpleNamespace(memory=choice, host=HOST, protocol="ascend", device="")
    arrangement = arrange(read_caches(shaped, config), settings)
    kept.append(arrangement)
    memory = arrangement.open()
    assert isinstance(memory, SharedMemory if choice == "shared" else TransferMemory)
    return memory


kept: list[Any] = []
"""What has to live as long as the process."""


def threads() -> None:
    """Open and close both ranks of a pool, side by side; which device each thread ever used."""
    used: dict[str, set[int]] = defaultdict(set)

    def noting(called: Callable[..., Any], device: Callable[..., int]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            used[threading.current_thread().name].add(device(*arguments))
            return called(*arguments)

        return call

    npu.set_device = noting(npu.set_device, int)
    for name in ("register", "close"):
        original = getattr(TransferEngine, name)
        setattr(TransferEngine, name, noting(original, lambda *_: npu.current_device()))

    async def main() -> None:
        layers = [PoolLayer(name="layer", tensors=(PoolTensor(block_len=WIDTH),))]
        groups = [PoolGroup(block_size=BLOCK_SIZE, num_blocks=BLOCKS)]
        pool = await Pool.create([pool_layout(groups, layers, f"rank-{n}") for n in (0, 1)], [0, 1])
        opener = Opener(TransferSettings(HOST, "ascend"), pool, 1.0)
        ours = RankThreads()

        async def once(rank: int) -> None:
            thread = ours.take(("engine", rank))
            opened = await opener.open(Seat("engine", "worker", rank), PoolMemory(), thread)
            assert opened.memory is not None
            assert opened.pool_rank is not None
            await thread.run(opened.memory.close)
            Pool.give_back(opened.pool_rank)
            ours.give_back(("engine", rank))

        for _ in range(5):
            await asyncio.gather(once(0), once(1))
        await pool.close()

    asyncio.run(main())
    say({name: sorted(devices) for name, devices in used.items()})


def different(caches: Caches, seed: int, ours: list[int], theirs: list[int]) -> list[list[int]]:
    """Layer, part and block of each block that is not what P had computed in its own."""
    return [
        [number, part, mine]
        for number, parts in enumerate(caches.values())
        for part, tensor in enumerate(parts)
        for mine, its in zip(ours, theirs, strict=True)
        if not tensor[mine].cpu().eq(value_of(seed, number, part, its)).all()
    ]


if __name__ == "__main__":
    {"producer": producer, "threads": threads, "worker": worker}[sys.argv[1]](*sys.argv[2:])
