"""Side channel ports: neighbours, configured, chosen, taken, given back."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire import side_channel as sc
from tests.edges.proxy import Proxy
from tests.edges.support import (
    CONFIG,
    HOST,
    Producer,
    advertised,
    free_port,
    real,
    refused,
    register,
    request_of,
    submit,
    until,
)


def worker_of(
    stack: ExitStack, daemon: DaemonProcess, engine: str, rank: int = 0, world_size: int = 1
) -> BareClient:
    worker = stack.enter_context(BareClient(daemon.endpoint))
    worker.hello(
        engine, role="worker", rank=rank, world_size=world_size, session=f"{engine}-{rank}"
    )
    return worker


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((HOST, port)) == 0


def free_run(length: int) -> int:
    """The first of `length` neighbouring ports that are free just now."""
    while True:
        first = free_port()
        if first + length < 65_536 and not any(listens(first + n) for n in range(length)):
            return first


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(CONFIG) as daemon:
        yield daemon


def test_the_ranks_of_an_engine_get_neighbours(daemon: DaemonProcess) -> None:
    with ExitStack() as stack:
        workers = [worker_of(stack, daemon, "four", rank, 4) for rank in range(4)]
        [first] = {register(worker, advertised()).side_channel_port for worker in workers}
        assert all(listens(first + rank) for rank in range(4))
        assert set(range(first, first + 4)) <= set(daemon.status()["side_channel_ports"])


def test_a_wanted_port_is_taken_by_whoever_asks_first(daemon: DaemonProcess) -> None:
    wanted = free_run(2)
    with ExitStack() as stack:
        first = worker_of(stack, daemon, "first")
        assert register(first, advertised(), side_channel_port=wanted).side_channel_port == wanted
        second = worker_of(stack, daemon, "second")
        error = refused(second, advertised(), side_channel_port=wanted)
        assert error.code == "port_taken"
        assert f"port {wanted} is rank 0's of engine first" in error.message
        moved = refused(first, advertised(), token=2, side_channel_port=wanted + 1)
        assert f"at port {wanted} already" in moved.message
        first.send(wire.Bye())
        until(lambda: not any(e["engine_id"] == "first" for e in daemon.status()["engines"]))
        again = register(second, advertised(), token=3, side_channel_port=wanted)
        assert again.side_channel_port == wanted


def test_a_port_that_somebody_else_holds_is_named_with_its_holder(daemon: DaemonProcess) -> None:
    with socket.create_server((HOST, 0)) as taken, ExitStack() as stack:
        port = taken.getsockname()[1]
        worker = worker_of(stack, daemon, "taken")
        error = refused(worker, advertised(), side_channel_port=port)
        assert error.code == "port_taken"
        assert f"port {port}" in error.message
        assert f"pid {os.getpid()}" in error.message
        assert "kv_port" in error.message
        register(worker, advertised(), token=2)


def test_of_a_run_all_ports_must_be_free(daemon: DaemonProcess) -> None:
    with socket.create_server((HOST, 0)) as taken, ExitStack() as stack:
        port = taken.getsockname()[1]
        worker = worker_of(stack, daemon, "run", 0, 3)
        error = refused(worker, advertised(), side_channel_port=port - 1)
        assert error.code == "port_taken"
        assert port - 1 not in daemon.status()["side_channel_ports"]


@pytest.mark.parametrize(
    ("world_size", "port", "says"),
    [(2, 65_535, "past 65535"), (65_536, None, "65536"), (20_000, None, "20000")],
)
def test_more_ranks_than_ports(
    daemon: DaemonProcess, world_size: int, port: int | None, says: str
) -> None:
    with ExitStack() as stack:
        worker = worker_of(stack, daemon, f"huge-{world_size}", 0, world_size)
        error = refused(worker, advertised(), side_channel_port=port)
        assert error.code == "port_taken"
        assert says in error.message


def test_a_large_engine_gets_all_its_ports(daemon: DaemonProcess) -> None:
    with ExitStack() as stack:
        worker = worker_of(stack, daemon, "large", 0, 1_500)
        first = register(worker, advertised()).side_channel_port
        assert listens(first + 1_499)
        worker.send(wire.Bye())


def test_configured_ports_are_held_from_the_start_and_lent_again() -> None:
    base = free_run(3)
    config = {**CONFIG, "side_channel": {"base_port": base, "ranks": 3}}
    with DaemonProcess(config) as daemon, ExitStack() as stack:
        assert all(listens(base + n) for n in range(3))
        one = worker_of(stack, daemon, "one")
        assert register(one, advertised()).side_channel_port == base
        two = worker_of(stack, daemon, "two", 0, 2)
        assert register(two, advertised()).side_channel_port == base + 1
        three = worker_of(stack, daemon, "three")
        error = refused(three, advertised())
        assert (error.code, "side_channel.ranks" in error.message) == ("port_taken", True)
        one.send(wire.UnregisterKv(5))
        one.expect(wire.KvUnregistered)
        assert register(three, advertised(), token=2).side_channel_port == base
        assert daemon.status()["side_channel_ports"] == [base, base + 1, base + 2]


def test_an_engine_comes_back_larger_once_its_old_registration_has_drained(
    daemon: DaemonProcess,
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy())
        worker = worker_of(stack, daemon, "grows")
        scheduler = stack.enter_context(BareClient(daemon.endpoint))
        scheduler.hello("grows")
        port = register(worker, advertised()).side_channel_port
        submit(scheduler, real("r", proxy.url))
        proxy.next()
        for client in (worker, scheduler):
            client.send(wire.Bye())
        until(lambda: request_of(daemon, "grows", "r")["state"] == "draining")
        larger = worker_of(stack, daemon, "grows", 1, 2)
        error = refused(larger, advertised())
        assert error.code == "port_taken"
        assert "drains" in error.message
        producer = stack.enter_context(Producer(port))
        assert producer.ask(sc.Done("x-r", 1, "p:1")) == b"ACK"
        assert request_of(daemon, "grows", "r")["state"] in ("cancelled", "failed")
        answer = until(lambda: try_register(larger))
        assert listens(answer.side_channel_port + 1)


def try_register(worker: BareClient) -> wire.KvRegistered | None:
    worker.send(wire.RegisterKv(9, advertised()))
    while True:
        answer = worker.receive()
        if isinstance(answer, (wire.KvRegistered, wire.Error)):
            return answer if isinstance(answer, wire.KvRegistered) else None
