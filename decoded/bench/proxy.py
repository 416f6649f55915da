"""The proxy of the benches: a P node that is always done."""

from __future__ import annotations

import asyncio
import queue
import threading

from decoded.producer import RemoteParams
from decoded.producer.metaserver import Metaserver

from .workload import HOST

_TIMEOUT_S = 30


class InstantProxy:
    """A metaserver in a thread of its own, whose prefills end at once: `take` what was asked."""

    def __init__(self) -> None:
        self._asked: queue.Queue[RemoteParams] = queue.Queue()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="bench-metaserver", daemon=True)
        self.url = ""

    def take(self) -> RemoteParams:
        """The next call's parameters; it has been answered. Raises TimeoutError."""
        try:
            return self._asked.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            text = f"the daemon called no metaserver within {_TIMEOUT_S} s"
            raise TimeoutError(text) from None

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with Metaserver(self._prefill, HOST, shutdown_s=1.0) as server:
            self.url = server.url
            self._ready.set()
            await self._over.wait()

    async def _prefill(self, params: RemoteParams) -> None:
        self._asked.put(params)

    def __enter__(self) -> InstantProxy:
        self._thread.start()
        if not self._ready.wait(_TIMEOUT_S) or not self.url:
            raise RuntimeError("the bench's metaserver did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_TIMEOUT_S)
