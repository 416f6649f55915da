"""Taking a seat at the engine link: who gets it, who does not, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire

from .support import advertised, barrier, outcome, status_of, submit, unique, until, virtual


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"link": {"heartbeat_s": 0.2, "timeout_s": 60.0}}) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[BareClient]:
    with BareClient(daemon.endpoint) as client:
        yield client


def refusal(client: BareClient, **fields: Any) -> wire.Error:
    given = {"session": "s", "role": "scheduler", "engine_id": unique("e"), "protocol": 1, **fields}
    client.send_raw(msgspec.msgpack.encode({"kind": "hello", **given}))
    error = client.expect(wire.Error)
    assert error.about == "hello"
    return error


def test_welcome_says_what_a_client_needs(client: BareClient) -> None:
    welcome = client.hello(unique("e"))
    assert welcome.protocol == wire.PROTOCOL_VERSION
    assert welcome.log.startswith(welcome.boot)
    assert (welcome.heartbeat_s, welcome.timeout_s, welcome.generation) == (0.2, 60.0, None)


@pytest.mark.parametrize("version", [0, 2, 10**6])
def test_another_protocol_version_is_told_both(client: BareClient, version: int) -> None:
    error = refusal(client, protocol=version)
    assert error.code == "unsupported_protocol"
    assert f"version {wire.PROTOCOL_VERSION}" in error.message
    assert f"version {version};" in error.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"role": "worker", "rank": 2, "world_size": 2}, "rank 2"),
        ({"role": "scheduler", "rank": 1, "world_size": 2}, "rank is 0"),
        ({"world_size": 4, "tp_size": 3}, "world_size 4"),
        ({"world_size": 4, "tp_size": 2, "pcp_size": 4}, "world_size 4"),
        ({"world_size": 3, "pcp_size": 2}, "world_size 3"),
        ({"role": "boss"}, "boss"),
        ({"engine_id": ""}, "engine_id"),
        ({"engine_id": "e" * 513}, "engine_id"),
        ({"session": None}, "session"),
        ({"world_size": 0}, "world_size"),
        ({"rank": -1}, "rank"),
        ({"subscribe": "yes"}, "subscribe"),
    ],
)
def test_a_hello_that_cannot_be_is_told_why(
    client: BareClient, fields: dict[str, Any], says: str
) -> None:
    error = refusal(client, **fields)
    assert error.code == "invalid"
    assert says in error.message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (wire.Submit([]), "submit"),
        (wire.Cancel([]), "cancel"),
        (wire.RegisterKv(5, advertised()), "register_kv"),
        (wire.UnregisterKv(5), "unregister_kv"),
        (wire.Acknowledge("x", 1), "acknowledge"),
        (wire.Heartbeat(5), "heartbeat"),
        (wire.Bye(), "bye"),
    ],
)
def test_nothing_but_status_goes_before_hello(
    client: BareClient, message: wire.FromClient, kind: str
) -> None:
    client.send(message)
    error = client.expect(wire.Error)
    assert (error.code, error.about) == ("hello_required", kind)
    assert error.token == getattr(message, "token", None)
    client.send(wire.StatusQuery(9))
    assert client.expect(wire.StatusReport).token == 9


def test_a_scheduler_and_a_worker_do_what_is_theirs_only(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as worker:
        scheduler.hello(engine)
        worker.hello(engine, role="worker", session="w")
        submit(worker, virtual("r"))
        assert worker.expect(wire.Error).code == "wrong_role"
        worker.send(wire.Cancel([wire.Cancellation("r")]))
        assert worker.expect(wire.Error).code == "wrong_role"
        scheduler.send(wire.RegisterKv(3, advertised()))
        error = scheduler.expect(wire.Error)
        assert (error.code, error.token) == ("wrong_role", 3)


def test_a_seat_is_taken_while_its_client_lives(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as first, BareClient(daemon.endpoint) as second:
        first.hello(engine, session="first")
        error = refusal(second, engine_id=engine, session="second")
        assert error.code == "seat_taken"
        assert engine in error.message
        submit(first, virtual("r"))
        assert outcome(first).state == "done"


def test_a_seat_is_free_as_soon_as_its_clients_connection_is_gone(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as first:
        first.hello(engine, session="first")
    with BareClient(daemon.endpoint) as second:

        def seated() -> bool:
            hello = wire.Hello(wire.PROTOCOL_VERSION, engine, "second", "scheduler")
            second.send(hello)
            return isinstance(second.receive(), wire.Welcome)

        # The daemon's system may tell it of the closed connection a moment later.
        assert until(seated, timeout_s=10)


def test_a_connection_keeps_its_seat(client: BareClient) -> None:
    engine = unique("e")
    client.hello(engine)
    error = refusal(client, engine_id=engine, role="worker")
    assert error.code == "invalid"
    client.hello(engine)
    barrier(client)


def test_ranks_agree_on_the_world_size(daemon: DaemonProcess) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as first, BareClient(daemon.endpoint) as second:
        first.hello(engine, world_size=2)
        error = refusal(second, engine_id=engine, role="worker", world_size=4)
        assert error.code == "world_size_mismatch"
        assert "world_size 2, not 4" in error.message


def test_an_engine_that_was_killed_comes_back_with_another_world_size(
    daemon: DaemonProcess,
) -> None:
    engine = unique("e")
    with BareClient(daemon.endpoint) as scheduler, BareClient(daemon.endpoint) as worker:
        scheduler.hello(engine, world_size=2, session="before")
        worker.hello(engine, role="worker", world_size=2, session="w-before")
    with BareClient(daemon.endpoint) as again:

        def seated() -> bool:
            again.send(wire.Hello(1, engine, "after", "scheduler", world_size=4))
            return isinstance(again.receive(), wire.Welcome)

        assert until(seated, timeout_s=10)
        status = status_of(daemon, engine)
        assert status is not None
        assert status["world_size"] == 4
        assert [seat["role"] for seat in status["seats"]] == ["scheduler"]


def test_sessions_are_limited() -> None:
    with (
        DaemonProcess({"link": {"max_sessions": 2}}) as daemon,
        BareClient(daemon.endpoint) as first,
        BareClient(daemon.endpoint) as second,
        BareClient(daemon.endpoint) as third,
    ):
        first.hello("a")
        second.hello("b")
        error = refusal(third, engine_id="c")
        assert error.code == "too_many_sessions"
        assert "link.max_sessions" in error.message
        first.hello("a")
        first.send(wire.Bye())
        until(lambda: daemon.status()["sessions"] == 1)
        third.hello("c")
