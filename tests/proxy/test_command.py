"""`decoded proxy` as a process: its start, its line, its end."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from decoded.proxy.settings import Settings

from .engines import WAIT_S, Call, Decode, Engine, prefill

COMMAND = [sys.executable, "-m", "decoded", "proxy", "--log-format", "json"]


class Running:
    """A proxy process, read line by line."""

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "--port", "0", *flags], stderr=subprocess.PIPE, text=True
        )

    def expect(self, event: str) -> dict[str, Any]:
        """The next log line about `event`."""
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event:
                return found
        raise AssertionError(f"the proxy ended without a line about {event!r}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def wait(self) -> int:
        """Its exit code."""
        return self._process.wait(WAIT_S)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def test_a_whole_life() -> None:
    async def life() -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            d = await Engine(Decode(session)).start(stack)
            p = await Engine(prefill).start(stack)
            proxy = stack.enter_context(Running("--decode", d.url, "--prefill", p.url))
            ready = await asyncio.to_thread(proxy.expect, "ready")
            body = {"prompt": "hello"}
            headers = {"X-Request-Id": "mine"}
            async with session.post(
                ready["url"] + "/v1/completions", json=body, headers=headers
            ) as reply:
                assert reply.status == 200
            line = await asyncio.to_thread(proxy.expect, "request finished")
            assert line["request_id"] == "mine"
            assert (line["decode"], line["status"], line["prefills"]) == (d.url, 200, 1)
            parts = [
                "decode_sent_ms",
                "metaserver_ms",
                "prefill_sent_ms",
                "prefill_answered_ms",
                "first_byte_ms",
                "finished_ms",
            ]
            times = [line[part] for part in parts]
            assert times == sorted(times)
            assert line["prefill"] == p.url
            proxy.signal()
            assert await asyncio.to_thread(proxy.wait) == 0

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/9.9.9\r\n\r\n", b"POST / HTTP/1.1\r\n: x\r\n\r\n"]
)
def test_what_is_no_http_is_a_line_in_the_log(garbage: bytes) -> None:
    with Running("--decode", "http://127.0.0.1:9", "--virtual") as proxy:
        url = urlsplit(proxy.expect("ready")["url"])
        with socket.create_connection((url.hostname, url.port), WAIT_S) as peer:
            peer.sendall(garbage + b"\r\n\r\n")
            assert b" 400 " in peer.makefile("rb").readline()
        assert proxy.expect("no HTTP request")["level"] == "warning"
        proxy.signal()
        assert proxy.wait() == 0


def test_its_end_waits_for_requests_in_flight() -> None:
    """Even for those whose daemons have not asked for their prefills yet."""

    async def life() -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            decode, go_on = Decode(session), asyncio.Event()

            async def slow(call: Call) -> web.StreamResponse:
                await go_on.wait()
                return await decode(call)

            d = await Engine(slow).start(stack)
            p = await Engine(prefill).start(stack)
            proxy = stack.enter_context(Running("--decode", d.url, "--prefill", p.url))
            url = (await asyncio.to_thread(proxy.expect, "ready"))["url"] + "/v1/completions"
            ask = asyncio.create_task(status_of(session, url))
            await d.arrived.get()
            proxy.signal()
            stopping = await asyncio.to_thread(proxy.expect, "stopping")
            assert stopping["in_flight"] == 1
            assert await status_of(session, url) == 503
            go_on.set()
            assert await ask == 200
            assert await asyncio.to_thread(proxy.wait) == 0

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_cuts_off_what_is_in_flight(number: int) -> None:
    async def life() -> None:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())

            async def never(call: Call) -> web.StreamResponse:
                await asyncio.Event().wait()
                raise AssertionError

            d = await Engine(never).start(stack)
            proxy = stack.enter_context(Running("--decode", d.url, "--virtual"))
            url = (await asyncio.to_thread(proxy.expect, "ready"))["url"] + "/v1/completions"
            ask = asyncio.create_task(status_of(session, url))
            await d.arrived.get()
            proxy.signal(number)
            await asyncio.to_thread(proxy.expect, "stopping")
            proxy.signal(number)
            await asyncio.wait_for(d.cancelled.get(), Settings.shutdown_s - 1)
            with pytest.raises(aiohttp.ClientError):
                await ask
            assert await asyncio.to_thread(proxy.wait) == 0

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


async def status_of(session: aiohttp.ClientSession, url: str) -> int:
    async with session.post(url, json={"prompt": "a"}) as reply:
        return reply.status


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "--decode: give"),
        (["--decode", "http://127.0.0.1:1"], "--prefill: give .* or --virtual"),
        (["--decode", "127.0.0.1:1", "--virtual"], "--decode: '127.0.0.1:1' is no URL"),
        (["--decode", "http://a:99999", "--virtual"], "--decode: 'http://a:99999' is no URL"),
        (["--decode", "http://a", "--virtual", "--port", "70000"], "--port: 70000"),
        (
            ["--decode", "http://a", "--prefill", "http://b", "--host", "0.0.0.0"],
            "--advertise-url: needed",
        ),
        (["--decode", "http://a", "--virtual", "--prefill-timeout", "0"], "--prefill-timeout"),
        (["--decode", "http://a", "--virtual", "--prefill-timeout", "nan"], "--prefill-timeout"),
        (["--decode", "http://a", "--virtual", "--prefill-timeout", "inf"], "--prefill-timeout"),
        (["--decode", "http://a/v1", "--virtual"], "'http://a/v1' ends with /v1"),
        (["--decode", "http://a?b", "--virtual"], "has a query"),
        (["--decode", "http://" + "a" * 70, "--virtual"], "is no URL"),
        (["--decode", "http://a", "http://a", "--virtual"], "'http://a' is given twice"),
        (["--decode", "http://a", "--virtual", "--advertise-url", "a:1"], "--advertise-url: 'a:1'"),
    ],
)
def test_wrong_flags(flags: list[str], problem: str) -> None:
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 2
    assert re.search(problem, done.stderr), done.stderr


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--decode", "http://127.0.0.1:1", "--virtual", "--port", port]
        done = subprocess.run(
            [*COMMAND, *flags], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    assert done.returncode == 4
    assert f"127.0.0.1 port {port}" in done.stderr
