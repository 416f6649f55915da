"""The asyncio client against a real daemon, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from decoded.client import (
    AsyncClient,
    ClientBroken,
    ClientClosed,
    ClientError,
    Limits,
    NoAnswer,
    Outcome,
    SeatTaken,
    UnsupportedProtocol,
)
from decoded.client.dealer import Dealer
from decoded.testing import DaemonProcess
from decoded.wire import link
from decoded.wire.layout import SharedMemory

from .conftest import Scripted, real, virtual

PATIENT_S = 20.0

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a test's coroutine, on a loop of its own."""

    def run(main: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.new_event_loop() if request.param == "asyncio" else uvloop.new_event_loop()
        try:
            loop.run_until_complete(asyncio.wait_for(main, 3 * PATIENT_S))
        finally:
            loop.close()

    return run


async def collect(client: AsyncClient, count: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while len(outcomes) < count:
        outcomes += await client.wait(PATIENT_S)
    assert len(outcomes) == count
    return outcomes


def test_requests_are_done(daemon: DaemonProcess, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, "engine") as client:
            assert client.poll() == []
            assert await client.wait(0.01) == []
            await client.submit(virtual("a"))
            [outcome] = await client.wait(PATIENT_S)
            assert (outcome.request_id, outcome.state) == ("a", "done")
            await client.submit(*[virtual(f"r{n}") for n in range(500)])
            ids = []
            async for one in client.outcomes():
                ids.append(one.request_id)
                if len(ids) == 500:
                    break
            assert ids == [f"r{n}" for n in range(500)]
            assert client.pending == 0
            status = await client.status()
            assert status["pid"] == daemon.pid

    run(main())


def test_requests_and_registrations_outlive_a_killed_daemon(
    daemon: DaemonProcess, run: Run, memory: SharedMemory
) -> None:
    async def main() -> None:
        async with (
            AsyncClient(daemon.endpoint, "engine", expect_workers=True) as client,
            AsyncClient(daemon.endpoint, "engine", "worker") as worker,
        ):
            first = await worker.register_kv(memory)
            await client.submit(virtual("a"))
            await collect(client, 1)
            # What only the scheduler has heard of would die with the daemon.
            assert [one.request_id for one in await collect(worker, 1)] == ["a"]
            daemon.kill()
            await client.submit(virtual("b"))
            await asyncio.to_thread(daemon.start)
            await collect(client, 1)
            assert [one.request_id for one in await collect(worker, 1)] == ["b"]
            await client.wait_connected(PATIENT_S)
            while worker.registration is first:
                await worker.wait(0.02)
            await worker.unregister_kv()
            assert worker.registration is None

    run(main())


def test_a_daemon_that_hangs_and_recovers_loses_nothing(daemon: DaemonProcess, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, "engine") as client:
            await client.wait_connected()
            os.kill(daemon.pid, signal.SIGSTOP)
            try:
                await client.submit(virtual("a"))
                while client.connected:
                    assert await client.wait(0.05) == []
                with pytest.raises(NoAnswer, match="nothing heard"):
                    await client.status(timeout_s=0.01)
            finally:
                os.kill(daemon.pid, signal.SIGCONT)
            assert [one.request_id for one in await collect(client, 1)] == ["a"]

    run(main())


def test_cancel_ends_a_request(daemon: DaemonProcess, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, "engine") as client:
            await client.submit(real("a"))
            await client.cancel("a")
            assert [one.state for one in await collect(client, 1)] == ["cancelled"]

    run(main())


def test_a_call_that_its_caller_gives_up_is_forgotten(
    tmp_path: Path, run: Run, memory: SharedMemory
) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{tmp_path}/nobody.sock", "engine", "worker") as worker:
            call = asyncio.ensure_future(worker.register_kv(memory))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            again = asyncio.ensure_future(worker.register_kv(memory))
            await asyncio.sleep(0)
            with pytest.raises(ClientError, match="in flight"):
                await worker.register_kv(memory)
            await worker.close()
            with pytest.raises(ClientClosed):
                await again

    run(main())


def test_a_taken_seat_reaches_those_who_wait(daemon: DaemonProcess, run: Run) -> None:
    async def main() -> None:
        async with AsyncClient(daemon.endpoint, "engine") as first:
            await first.wait_connected()
            impatient = Limits(patience_s=0.3)
            async with AsyncClient(daemon.endpoint, "engine", limits=impatient) as second:
                with pytest.raises(SeatTaken):
                    async for _ in second.outcomes():
                        pass
                with pytest.raises(SeatTaken):
                    second.poll()

    run(main())


def test_close_ends_what_waits(daemon: DaemonProcess, run: Run) -> None:
    async def main() -> None:
        client = AsyncClient(daemon.endpoint, "engine")
        await client.submit(virtual("a"))
        heard: list[str] = []
        came = asyncio.Event()

        async def listen() -> None:
            async for outcome in client.outcomes():
                heard.append(outcome.request_id)
                came.set()

        listener = asyncio.ensure_future(listen())
        await came.wait()
        await client.close()
        await client.close()
        await listener
        assert heard == ["a"]
        with pytest.raises(ClientClosed):
            await client.submit(virtual("b"))

    run(main())


def test_refusals_of_hello_and_defects_are_raised(
    scripted: Callable[..., Scripted], run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refusal = link.Error("unsupported_protocol", "this daemon speaks 7", "hello")
    peer = scripted(lambda message: [link.encode(refusal)])

    async def main() -> None:
        async with AsyncClient(peer.endpoint, "engine") as client:
            with pytest.raises(UnsupportedProtocol, match="speaks 7"):
                await client.wait_connected(PATIENT_S)
        async with AsyncClient(f"ipc://{tmp_path}/nobody.sock", "engine") as client:

            def fail(dealer: Dealer) -> list[bytes]:
                raise OSError("made up")

            monkeypatch.setattr(Dealer, "receive", fail)
            await client.submit(virtual("a"))
            with pytest.raises(ClientBroken, match="made up"):
                client.poll()

    run(main())
