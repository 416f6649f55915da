"""A metaserver whose every answer the test gives by hand."""

from __future__ import annotations

import asyncio
import queue
import ssl
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from aiohttp import web

from .support import HOST, WAIT_S


class Call:
    """One POST that waits for its answer."""

    def __init__(self, body: Any, answer: asyncio.Future[web.StreamResponse | None]) -> None:
        self.body = body
        self._answer = answer
        self._loop = answer.get_loop()

    def answer(
        self, status: int = 200, text: str = '{"status": "ok"}', headers: Mapping[str, str] = {}
    ) -> None:
        self._give(web.Response(status=status, text=text, headers=headers))

    def hang_up(self) -> None:
        """Close the connection without an answer."""
        self._give(None)

    def _give(self, response: web.StreamResponse | None) -> None:
        def give() -> None:
            if not self._answer.done():
                self._answer.set_result(response)

        self._loop.call_soon_threadsafe(give)


class Proxy:
    """Serves on a port of its own, in a thread of its own."""

    def __init__(self, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        self._tls = tls
        self._port = port
        self._calls: queue.Queue[Call] = queue.Queue()
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._open: list[asyncio.Future[web.StreamResponse | None]] = []
        self.url = ""
        self.others: list[str] = []

    def next(self) -> Call:
        """The next call; blocks until there is one."""
        return self._calls.get(timeout=WAIT_S)

    @property
    def waiting(self) -> int:
        """Calls that `next` has not handed out."""
        return self._calls.qsize()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application()
        app.router.add_post("/v1/metaserver", self._post)
        app.router.add_get("/{path:.*}", self._other)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, HOST, self._port, ssl_context=self._tls, reuse_address=True)
        await site.start()
        port = runner.addresses[0][1]
        self.url = f"{'https' if self._tls else 'http'}://{HOST}:{port}/v1/metaserver"
        self._started.set()
        await self._stop.wait()
        for answer in self._open:
            answer.cancel()
        await runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        answer: asyncio.Future[web.StreamResponse | None] = self._loop.create_future()
        self._open.append(answer)
        self._calls.put(Call(await request.json(), answer))
        response = await answer
        if response is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        return response

    async def _other(self, request: web.Request) -> web.StreamResponse:
        self.others.append(request.path)
        return web.Response()

    def __enter__(self) -> Proxy:
        self._thread.start()
        assert self._started.wait(WAIT_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
