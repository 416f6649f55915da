"""Whatever arrives at the engine link, a good client goes on being served."""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
import zmq

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire

from .support import (
    CONFIG,
    HOST,
    advertised,
    free_port,
    memory_of,
    outcome,
    outcomes,
    register,
    submit,
    unique,
    until,
    virtual,
)

QUIET: dict[str, Any] = {**CONFIG, "log": {"level": "warning"}}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    link = {**QUIET["link"], "endpoint": f"tcp://{HOST}:{free_port()}"}
    with DaemonProcess({**QUIET, "link": link}) as daemon:
        yield daemon


@pytest.fixture
def good(daemon: DaemonProcess) -> Iterator[BareClient]:
    """A client that must be served to the end."""
    with BareClient(daemon.endpoint, timeout_s=60) as client:
        client.hello(unique("good"))
        yield client
        served(client)
        assert daemon.status()["counters"].get("internal_errors", 0) == 0
        client.send(wire.Bye())


def served(client: BareClient) -> None:
    name = unique("r")
    submit(client, virtual(name))
    assert outcome(client).request_id == name


def address_of(daemon: DaemonProcess) -> tuple[str, int]:
    host, _, port = daemon.endpoint.removeprefix("tcp://").rpartition(":")
    return host, int(port)


VALID: list[dict[str, Any]] = [
    msgspec.to_builtins(message)
    for message in (
        wire.Hello(1, "e", "s", "worker", 0, 1, True, True, 1, 1, 1, "me"),
        wire.RegisterKv(1, advertised(), 20_000),
        wire.UnregisterKv(1),
        wire.Submit([wire.Submission("r", "x", [[1]], 16, 3, 2, True, {"a": 1}, 1.0)]),
        wire.Cancel([wire.Cancellation("r", 1)]),
        wire.Acknowledge("log", 1),
        wire.Heartbeat(1),
        wire.StatusQuery(1, "e", "r", 10),
        wire.Bye(),
    )
]
WRONG: list[Any] = [None, -1, 2**63, 1.5, "", "x" * 600, b"\xff", [], [[[]]], {}, {"a": {}}, True]


def test_wrong_types_in_every_field_are_answered(daemon: DaemonProcess, good: BareClient) -> None:
    answers = 0
    with BareClient(daemon.endpoint) as client:
        client.hello(unique("e"), role="worker")
        for message in VALID:
            if message["kind"] in ("bye", "unregister_kv", "register_kv", "hello"):
                client.send_raw(msgspec.msgpack.encode({"kind": message["kind"]}))
            for field in message:
                for value in WRONG:
                    client.send_raw(msgspec.msgpack.encode({**message, field: value}))
        client.send(wire.StatusQuery(4242))
        while not (isinstance(m := client.receive(), wire.StatusReport) and m.token == 4242):
            answers += isinstance(m, wire.Error)
    assert answers > 200


def test_garbage_frames_are_answered(daemon: DaemonProcess, good: BareClient) -> None:
    chance = random.Random(7)
    frames = [chance.randbytes(chance.randrange(200)) for _ in range(300)]
    frames += [b"", b"\xc1", b"\x81\xa4kind\xa5hello", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff"]
    with BareClient(daemon.endpoint) as client:
        for frame in frames:
            client.send_raw(frame)
            error = client.expect(wire.Error)
            assert error.code in ("malformed", "unknown_kind", "invalid")
        client.send_raw(msgspec.msgpack.encode({"kind": "dance", "token": 5}))
        error = client.expect(wire.Error)
        assert (error.code, error.about) == ("unknown_kind", "dance")
        assert "submit" in error.message


def test_a_message_of_several_frames_is_answered(daemon: DaemonProcess, good: BareClient) -> None:
    hello = wire.encode(wire.Hello(1, unique("e"), "s", "scheduler"))
    with BareClient(daemon.endpoint) as client:
        for frames in ([b"", hello], [hello, hello], [b""] * 1_000):
            client.send_raw(*frames)
            error = client.expect(wire.Error)
            assert error.code == "malformed"
            assert f"this has {len(frames)}" in error.message


def test_a_frame_that_is_too_large_ends_that_connection_only(
    daemon: DaemonProcess, good: BareClient
) -> None:
    with BareClient(daemon.endpoint) as client:
        client.hello(unique("e"))
        client.send_raw(bytes(20 * 2**20))
        # It is connected again by itself, as somebody new.
        served(good)
        client.send(wire.StatusQuery(3))
        client.expect(wire.StatusReport)
        client.send(wire.Heartbeat(1))
        assert client.expect(wire.Error).code == "hello_required"


def test_what_is_not_zmq_at_all_disturbs_nobody(daemon: DaemonProcess, good: BareClient) -> None:
    chance = random.Random(11)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01NULL" + bytes(48)
    with ExitStack() as stack:
        for said in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            chance.randbytes(4096),
            greeting + chance.randbytes(4096),
            greeting + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
            greeting[:10] + b"\xff" * 4096,
        ):
            raw = stack.enter_context(socket.create_connection(address_of(daemon)))
            raw.sendall(said)
            served(good)


def test_a_thousand_connections_that_say_nothing(daemon: DaemonProcess, good: BareClient) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as stack:
            for n in range(1_000):
                raw = stack.enter_context(socket.create_connection(address_of(daemon)))
                if n % 2:
                    raw.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")  # half a greeting
            served(good)
            with BareClient(daemon.endpoint) as another:
                another.hello(unique("e"))
                served(another)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_file_descriptors_whoever_is_connected_is_served() -> None:
    link = {**QUIET["link"], "endpoint": f"tcp://{HOST}:{free_port()}"}
    with (
        DaemonProcess({**QUIET, "link": link}) as daemon,
        BareClient(daemon.endpoint) as client,
        BareClient(daemon.endpoint) as worker,
    ):
        client.hello("e")
        worker.hello("e", role="worker", session="w")
        used = len(open_descriptors(daemon.pid))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
        with ExitStack() as stack:
            for _ in range(40):
                stack.enter_context(socket.create_connection(address_of(daemon)))
            until(lambda: len(open_descriptors(daemon.pid)) >= used + 8)
            served(client)
            # A registration needs sockets: it is refused, and may be tried again.
            worker.send(wire.RegisterKv(1, advertised()))
            error = worker.expect(wire.Error)
            assert error.code == "port_taken"
            assert "open files" in error.message
        until(lambda: len(open_descriptors(daemon.pid)) < used + 4)
        register(worker, advertised(), token=2)
        served(client)


def open_descriptors(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")


def test_a_client_that_does_not_read_costs_little_and_loses_nothing(
    daemon: DaemonProcess, good: BareClient
) -> None:
    rounds, batch = 120, 250
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    deaf = context.socket(zmq.DEALER)
    deaf.setsockopt(zmq.LINGER, 0)
    deaf.setsockopt(zmq.RCVHWM, 1)
    deaf.setsockopt(zmq.RCVBUF, 4_096)
    deaf.connect(daemon.endpoint)
    engine = unique("deaf")
    deaf.send(wire.encode(wire.Hello(1, engine, "s", "scheduler")))
    status = wire.encode(wire.StatusQuery())
    for n in range(rounds):
        requests = [virtual(f"r{n}-{k}") for k in range(batch)]
        deaf.send(wire.encode(wire.Submit(requests)))
        for _ in range(60):
            deaf.send(status)
    total = rounds * batch

    def all_ended() -> bool:
        served(good)
        entry = [e for e in daemon.status()["engines"] if e["engine_id"] == engine]
        return bool(entry) and entry[0]["reported"] == total

    until(all_ended)
    assert daemon.status()["counters"]["link_unanswered"] > 0
    assert memory_of(daemon.pid) < 400 * 2**20
    seen: list[str] = []
    while len(seen) < total:
        assert deaf.poll(30_000), f"stuck after {len(seen)} of {total}"
        message = wire.decode_from_daemon(deaf.recv())
        if isinstance(message, wire.Finished):
            seen += [each.request_id for each in message.outcomes]
            last = message.first + len(message.outcomes) - 1
            deaf.send(wire.encode(wire.Acknowledge(message.log, last)))
    assert seen == [f"r{n}-{k}" for n in range(rounds) for k in range(batch)]
    deaf.send(wire.encode(wire.Bye()))
    deaf.close(linger=1_000)
    context.term()


def test_ten_thousand_virtual_requests_in_one_message(
    daemon: DaemonProcess, good: BareClient
) -> None:
    names = [f"r{n}" for n in range(10_000)]
    with BareClient(daemon.endpoint) as client:
        client.hello(unique("many"))
        submit(client, *(virtual(name) for name in names))
        got = outcomes(client, len(names))
        assert [each.request_id for each in got] == names
        assert {each.state for each in got} == {"done"}
        client.send(wire.Heartbeat(8))
        message = client.receive()
        while message == wire.Heartbeat():
            message = client.receive()
        assert message == wire.Heartbeat(8)


def test_ten_thousand_refusals_all_arrive(daemon: DaemonProcess, good: BareClient) -> None:
    names = [f"r{n}" for n in range(10_000)]
    wrong = {"do_virtual": "perhaps"}
    with BareClient(daemon.endpoint) as client:
        client.hello(unique("refused"))
        submit(client, *(virtual(name, kv_transfer_params=wrong) for name in names))
        refused: list[str] = []
        while len(refused) < len(names):
            message = client.expect(wire.Refused)
            assert {each.reason for each in message.requests} == {"invalid"}
            refused += [each.request_id for each in message.requests]
        assert refused == names


def test_many_clients_that_come_and_go_while_others_talk(
    daemon: DaemonProcess, good: BareClient
) -> None:
    failures: list[BaseException] = []

    def come_and_go() -> None:
        try:
            for _ in range(15):
                with BareClient(daemon.endpoint) as client:
                    client.hello(unique("guest"))
                    served(client)
                    client.send_raw(b"\xc1")
        except BaseException as error:  # noqa: BLE001 - told to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        served(good)
    for thread in threads:
        thread.join(60)
    assert failures == []
