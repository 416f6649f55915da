"""The ROUTER socket and the intake in a loop of the test's own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import zmq

from decoded.core import events as ev
from decoded.core.events import Seat
from decoded.core.request import RequestKey
from decoded.edges.intake import SLICE, Intake
from decoded.edges.refusals import MAX_WAITING, RefusalSender
from decoded.edges.router import RouterSocket, Unreachable
from decoded.edges.sessions import Session
from decoded.edges.throttle import Throttle
from decoded.wire import link as wire

from .support import HOST, virtual


@contextmanager
def routed(
    on_message: Callable[[bytes, list[bytes]], None], counters: Counter[str], water: int = 1_000
) -> Iterator[tuple[RouterSocket, zmq.Socket[bytes]]]:
    """A router that listens, and a dealer that is connected to it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = RouterSocket(
        context, on_message, counters, max_message_bytes=1 << 20, high_water_mark=water
    )
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(router.bind(f"tcp://{HOST}:*"))
    try:
        yield router, dealer
    finally:
        router.close()
        dealer.close()
        context.term()


def test_a_handler_that_raises_takes_nothing_with_it(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        counters: Counter[str] = Counter()
        got: list[bytes] = []
        everything = asyncio.Event()

        def handle(_: bytes, frames: list[bytes]) -> None:
            if frames[0] == b"bad":
                raise RuntimeError("a bug")
            got.append(frames[0])
            if frames[0] == b"last":
                everything.set()

        with routed(handle, counters) as (_, dealer):
            for n in range(200):
                dealer.send(b"bad" if n % 2 else b"good")
            dealer.send(b"last")
            await asyncio.wait_for(everything.wait(), 30)
        assert got == [b"good"] * 100 + [b"last"]
        assert counters["internal_errors"] == 100

    with caplog.at_level(logging.ERROR):
        asyncio.run(run())


def test_while_paused_it_sends_and_takes_nothing() -> None:
    async def run() -> None:
        got: list[bytes] = []
        first, third = asyncio.Event(), asyncio.Event()

        def handle(identity: bytes, frames: list[bytes]) -> None:
            got.append(frames[0])
            if frames[0] == b"1":
                router.pause()
                router.send(identity, b"paused")
                first.set()
            elif frames[0] == b"3":
                third.set()

        with routed(handle, Counter()) as (router, dealer):
            for n in (b"1", b"2", b"3"):
                dealer.send(n)
            await asyncio.wait_for(first.wait(), 30)
            assert await asyncio.to_thread(dealer.recv) == b"paused"
            assert got == [b"1"]
            router.resume()
            await asyncio.wait_for(third.wait(), 30)
            assert got == [b"1", b"2", b"3"]

    asyncio.run(run())


def test_sending_to_a_peer_that_never_was_or_reads_nothing() -> None:
    async def run() -> None:
        heard = asyncio.Event()
        names: list[bytes] = []

        def handle(identity: bytes, _: list[bytes]) -> None:
            names.append(identity)
            heard.set()

        with routed(handle, Counter(), water=4) as (router, dealer):
            with pytest.raises(Unreachable):
                router.send(b"nobody", b"x")
            dealer.send(b"here")
            await asyncio.wait_for(heard.wait(), 30)
            piece = bytes(1 << 20)
            assert not all(router.send(names[0], piece) for _ in range(100))

    asyncio.run(run())


def test_a_long_submit_is_taken_in_slices_and_the_next_message_waits() -> None:
    async def run() -> None:
        counters: Counter[str] = Counter()
        events: list[ev.Event] = []
        flushes: list[int] = []
        with routed(lambda *_: None, counters) as (router, _):
            intake = Intake(
                router,
                lambda *batch: events.extend(batch),
                lambda *_: None,
                lambda: flushes.append(len(events)),
                counters,
            )
            hello = wire.Hello(1, "e", "s", "scheduler")
            session = Session(b"id", Seat("e", "scheduler", 0), hello, 0.0)
            names = [f"r{n}" for n in range(2 * SLICE + 1)]
            intake.submit(session, wire.Submit([virtual(name) for name in names]))
            assert (len(events), router.paused) == (SLICE, True)
            await asyncio.sleep(0)
            assert (len(events), router.paused) == (2 * SLICE, True)
            await asyncio.sleep(0)
            assert (len(events), router.paused) == (len(names), False)
            keys = [event.key for event in events if isinstance(event, ev.Submit)]
            assert keys == [RequestKey("e", name) for name in names]
            assert flushes == [2 * SLICE, len(names)]

    asyncio.run(run())


def test_a_slice_that_raises_lets_the_link_listen_again() -> None:
    async def run() -> None:
        counters: Counter[str] = Counter()
        seen: list[ev.Event] = []
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: told.append(str(c)))

        def dispatch(*events: ev.Event) -> None:
            seen.extend(events)
            if len(seen) > SLICE:
                raise RuntimeError("a bug")

        with routed(lambda *_: None, counters) as (router, _):
            intake = Intake(router, dispatch, lambda *_: None, lambda: None, counters)
            hello = wire.Hello(1, "e", "s", "scheduler")
            session = Session(b"id", Seat("e", "scheduler", 0), hello, 0.0)
            cancels = [wire.Cancellation(f"r{n}") for n in range(2 * SLICE)]
            intake.cancel(session, wire.Cancel(cancels))
            assert router.paused
            await asyncio.sleep(0)
            assert not router.paused
            assert counters["internal_errors"] == 1
            assert "a bug" in told[0]

    asyncio.run(run())


def test_refusals_for_a_client_that_is_gone_are_dropped_and_counted() -> None:
    async def run() -> None:
        counters: Counter[str] = Counter()
        with routed(lambda *_: None, counters) as (router, _):
            sender = RefusalSender(router, counters)
            hello = wire.Hello(1, "e", "s", "scheduler")
            session = Session(b"gone", Seat("e", "scheduler", 0), hello, 0.0)
            for n in range(MAX_WAITING + 5):
                sender.add(session, wire.Refusal(f"r{n}", 1, "invalid"))
            assert counters["refusals_dropped"] == 5
            sender.flush()
            assert counters["refusals_dropped"] == MAX_WAITING + 5

    asyncio.run(run())


def test_a_throttle_lets_a_burst_through_and_counts_the_rest() -> None:
    throttle = Throttle(burst=3, every_s=3600)
    assert [throttle.passes() for _ in range(10)] == [True] * 3 + [False] * 7
    quick = Throttle(burst=1, every_s=1e-9)
    assert quick.passes()
    assert quick.passes()
    assert quick.skipped == 0
