"""The three arrangements of KV memory: bytes arrive by Mooncake, and what happens at their end."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from secrets import token_hex
from typing import Any

import pytest

from decoded.kv.regions import SHM, SharedRegion
from decoded.kv.transfer import TransferEngine, TransferError
from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire import side_channel as sc
from decoded.wire.layout import PoolMemory, SharedMemory
from tests.edges.proxy import Proxy
from tests.edges.support import (
    CONFIG,
    HOST,
    Producer,
    advertised,
    barrier,
    outcome,
    real,
    refused,
    register,
    request_of,
    small_layout,
    status_of,
    submit,
    unique,
    until,
)

from .worker import Worker

POOL: dict[str, Any] = {
    "ranks": 2,
    "groups": [{"block_size": 16, "num_blocks": 8}],
    "layers": [{"name": "layer.{}", "count": 2, "tensors": [{"block_len": 512}] * 2}],
}
SETTINGS: dict[str, Any] = {**CONFIG, "kv": {"pool": POOL}}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(SETTINGS) as daemon:
        yield daemon


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


class Writer:
    """A P rank's memory of random bytes and its transfer engine."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.region = SharedRegion.create(f"/decoded-p{os.getpid()}-{token_hex(3)}", size)
        self.region.buffer[:] = random.Random(size).randbytes(size)
        self.engine = TransferEngine.open(HOST)
        self.engine.register(self.region.address, size)

    def write(self, metadata: sc.Metadata, layer: str, tensor: int, block: int) -> bytes:
        """Write one block; the bytes that were written."""
        target = metadata.layer_metadata[layer]
        length = target.block_len[tensor]
        address = target.kv_caches_base_addr[tensor] + block * length
        offset = 4096 * tensor + 512 * block
        session = f"{HOST}:{metadata.te_rpc_port}"
        self.engine.write(session, [self.region.address + offset], [address], [length])
        return bytes(self.region.buffer[offset : offset + length])

    def close(self) -> None:
        self.engine.close()
        self.region.unlink()
        self.region.close()


@contextmanager
def writing() -> Iterator[Writer]:
    writer = Writer()
    try:
        yield writer
    finally:
        writer.close()


def metadata_of(port: int) -> sc.Metadata:
    with Producer(port) as producer:
        return sc.decode_metadata(producer.ask(sc.GetMeta("r")))


def done(port: int, name: str) -> None:
    with Producer(port) as producer:
        assert producer.ask(sc.Done(f"x-{name}", 1, "p:1")) == b"ACK"


def shm(prefix: str) -> list[str]:
    return [name for name in os.listdir(SHM) if name.startswith(prefix)]


@pytest.mark.parametrize("how", ["share", "map", "run"])
def test_bytes_arrive_in_the_workers_memory(daemon: DaemonProcess, proxy: Proxy, how: str) -> None:
    engine = unique("engine")
    with (
        BareClient(daemon.endpoint) as scheduler,
        Worker(daemon.endpoint, engine) as worker,
        writing() as writer,
    ):
        scheduler.hello(engine)
        registered = worker.register(how)
        submit(scheduler, real("r", proxy.url))
        body = proxy.next().body
        metadata = metadata_of(body["remote_port"])
        layout = registered.layout
        for layer in layout.layers:
            for index, tensor in enumerate(layer.tensors):
                for block in (3, 1):
                    sent = writer.write(metadata, layer.name, index, block)
                    assert worker.read(tensor.offset + block * 512, 512) == sent
                assert worker.read(tensor.offset + 2 * 512, 512) == bytes(512)
        done(body["remote_port"], "r")
        assert outcome(scheduler).state == "done"
        worker.tell("unregister")
        assert worker.answer()
        if how != "run":
            with pytest.raises(TransferError):
                writer.write(metadata, layout.layers[0].name, 0, 1)


def test_registering_again_gives_a_new_generation_and_a_new_engine_id(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    engine = unique("engine")
    with (
        BareClient(daemon.endpoint) as scheduler,
        BareClient(daemon.endpoint) as worker,
        writing() as writer,
    ):
        scheduler.hello(engine)
        worker.hello(engine, role="worker", session="w", subscribe=False)
        seen: set[str] = set()
        old: sc.Metadata | None = None
        for n in range(3):
            registered = register(worker, PoolMemory(), token=n)
            submit(scheduler, real(f"r{n}", proxy.url))
            body = proxy.next().body
            assert body["remote_engine_id"].endswith(f".{registered.generation}")
            assert body["remote_engine_id"] not in seen
            seen.add(body["remote_engine_id"])
            if old is not None:
                with pytest.raises(TransferError):
                    writer.write(old, "layer.0", 0, 1)
            old = metadata_of(body["remote_port"])
            writer.write(old, "layer.0", 0, 1)
            done(body["remote_port"], f"r{n}")
            assert outcome(scheduler).state == "done"
        again = worker.hello(engine, role="worker", session="w", subscribe=False)
        assert again.generation == registered.generation
        worker.send(wire.Bye())
        barrier(scheduler)


@pytest.mark.parametrize("how", ["share", "map"])
def test_requests_in_flight_at_a_lost_registration_end_once_it_is_fenced(
    daemon: DaemonProcess, proxy: Proxy, how: str
) -> None:
    engine = unique("engine")
    with (
        BareClient(daemon.endpoint) as scheduler,
        Worker(daemon.endpoint, engine) as worker,
        writing() as writer,
    ):
        scheduler.hello(engine)
        registered = worker.register(how)
        submit(scheduler, real("r", proxy.url))
        proxy.next()
        metadata = metadata_of(registered.side_channel_port)
        writer.write(metadata, registered.layout.layers[0].name, 0, 1)
        worker.tell("unregister")
        ended = outcome(scheduler)
        assert (ended.state, ended.reason) == ("failed", "registration_lost")
        with pytest.raises(TransferError):
            writer.write(metadata, registered.layout.layers[0].name, 0, 1)
        assert worker.answer()
        submit(scheduler, real("r2", proxy.url))
        barrier(scheduler)
        assert request_of(daemon, engine, "r2")["state"] == "accepted"


def test_unregister_is_answered_only_after_the_drain_even_if_repeated(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    engine = unique("engine")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as worker:
        scheduler.hello(engine)
        worker.hello(engine, role="worker", session="w", subscribe=False)
        port = register(worker, advertised()).side_channel_port
        submit(scheduler, real("r", proxy.url))
        proxy.next()
        for token in (5, 6):
            worker.send(wire.UnregisterKv(token))
        worker.send(wire.Heartbeat(7))
        message = worker.receive()
        while message == wire.Heartbeat():
            message = worker.receive()
        assert message == wire.Heartbeat(7), "answered while somebody may still write"
        assert request_of(daemon, engine, "r")["state"] == "draining"
        done(port, "r")
        assert outcome(scheduler).state == "failed"
        assert {worker.expect(wire.KvUnregistered).token for _ in range(2)} == {5, 6}
        worker.send(wire.UnregisterKv(8))
        assert worker.expect(wire.KvUnregistered).token == 8


def test_a_killed_workers_shared_memory_is_removed_and_the_daemon_goes_on(
    daemon: DaemonProcess, proxy: Proxy
) -> None:
    engine = unique("engine")
    with BareClient(daemon.endpoint) as scheduler:
        scheduler.hello(engine)
        with Worker(daemon.endpoint, engine) as worker:
            worker.register("share")
            prefix = f"decoded-w{worker.pid}-"
            submit(scheduler, real("r", proxy.url))
            proxy.next()
            worker.kill()
            assert shm(prefix)
        with Worker(daemon.endpoint, engine) as again:
            # The new worker is seated as soon as the old one's connection is gone.
            again.register("share")
            ended = outcome(scheduler)
            assert (ended.state, ended.reason) == ("failed", "registration_lost")
            until(lambda: not shm(prefix) and daemon.status())
            submit(scheduler, real("r2", proxy.url))
            done(proxy.next().body["remote_port"], "r2")
            assert outcome(scheduler).state == "done"


def test_a_killed_workers_pool_rank_can_be_had_by_another_engine() -> None:
    quick = {**SETTINGS, "link": {"heartbeat_s": 0.2, "timeout_s": 1.0}}
    with DaemonProcess(quick) as daemon:
        with Worker(daemon.endpoint, "first") as worker:
            first = worker.register("map")
            with BareClient(daemon.endpoint) as other:
                other.hello("second", role="worker", subscribe=False)
                error = refused(other, PoolMemory())
                assert error.code == "pool_taken"
                assert "engine first" in error.message
                other.send(wire.Bye())
            worker.kill()
            until(lambda: status_of(daemon, "first") is None)
        with BareClient(daemon.endpoint) as other:
            other.hello("second", role="worker", subscribe=False)
            second = register(other, PoolMemory())
            assert second.layout == first.layout
            assert second.generation > first.generation
            other.send(wire.Bye())


def test_a_rank_that_the_pool_does_not_have(daemon: DaemonProcess) -> None:
    with BareClient(daemon.endpoint) as worker:
        worker.hello(unique("e"), role="worker", rank=2, world_size=3)
        error = refused(worker, PoolMemory())
        assert (error.code, "rank 2" in error.message) == ("no_pool", True)
    with DaemonProcess(CONFIG) as without, BareClient(without.endpoint) as worker:
        worker.hello("e", role="worker")
        error = refused(worker, PoolMemory())
        assert error.code == "no_pool"
        assert "kv.pool" in error.message


def test_shared_memory_that_is_missing_too_small_or_no_name(daemon: DaemonProcess) -> None:
    with ExitStack() as stack:
        worker = stack.enter_context(BareClient(daemon.endpoint))
        worker.hello(unique("e"), role="worker")
        name = f"/decoded-t{os.getpid()}-{token_hex(3)}"
        error = refused(worker, SharedMemory(small_layout(name)))
        assert (error.code, name in error.message) == ("memory_unavailable", True)
        region = SharedRegion.create(name, 4096)
        stack.callback(region.close)
        stack.callback(region.unlink)
        error = refused(worker, SharedMemory(small_layout(name)), token=2)
        assert error.code == "memory_unavailable"
        assert "has 4096 bytes" in error.message
        for bad in ("/../etc/passwd", "decoded", "/", "/a/b", "/" + "x" * 300):
            error = refused(worker, SharedMemory(small_layout(bad)), token=3)
            assert error.code == "memory_unavailable"
            assert "cannot name shared memory" in error.message


def test_the_daemon_leaves_nothing_open_after_many_registrations(daemon: DaemonProcess) -> None:
    with BareClient(daemon.endpoint) as worker:
        worker.hello(unique("e"), role="worker", subscribe=False)

        def once(token: int) -> None:
            register(worker, PoolMemory(), token=token)
            worker.send(wire.UnregisterKv(token))
            worker.expect(wire.KvUnregistered)

        once(0)
        before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        for token in range(1, 12):
            once(token)
        until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before + 4)
        until(lambda: len(os.listdir(f"/proc/{daemon.pid}/task")) < 20)
