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

import aiohttp
import pytest

from .engines import WAIT_S, Decode, Engine, prefill

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

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
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
            assert await asyncio.to_thread(proxy.stop) == 0

    asyncio.run(asyncio.wait_for(life(), WAIT_S))


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
