"""One D request and the prefill that belongs to it, under one token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import structlog

from .body import Api, Part, for_decode
from .nodes import Node, Nodes
from .prefill import Prefills, Reply
from .timing import Timing

log = structlog.get_logger(__name__)


class Leg:
    """A part of a request on its way. `token` is its name: D's daemon hands it back in the URL
    that it posts to, so nobody has to read it out of an engine's request id.
    """

    def __init__(
        self, api: Api, part: Part, headers: Mapping[str, str], timing: Timing, virtual: bool
    ) -> None:
        self.token = secrets.token_hex(16)
        self.api = api
        self.part = part
        self.timing = timing
        self.virtual = virtual
        self.node: Node | None = None
        self.prefills = 0
        self._headers = {**headers, "X-Request-Id": self.token}
        self._prefill: asyncio.Task[Reply] | None = None
        self._closed = False
        self._stack = AsyncExitStack()

    async def decode(
        self, nodes: Nodes, session: aiohttp.ClientSession, metaserver: str
    ) -> aiohttp.ClientResponse:
        """D's answer, once its status has come; `close` the leg when it has been read.

        A D node that cannot be reached is not the last. Raises NoNode, and what aiohttp
        raises for a connection that breaks later.
        """
        url = None if self.virtual else f"{metaserver}?request={self.token}"
        body = for_decode(self.part.body, url)
        tried: list[Node] = []
        while True:
            node = nodes.choose(tried)
            tried.append(node)
            self.timing.note("decode_sent_ms")
            with_node = AsyncExitStack()
            with_node.enter_context(node.busy(self.part.cost))
            try:
                answer = await with_node.enter_async_context(
                    session.post(node.url + self.api, json=body, headers=self._headers)
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                await with_node.aclose()
                node.unreachable()
            except BaseException:
                await with_node.aclose()
                raise
            else:
                self.node = node
                self._stack.push_async_exit(with_node)
                return answer

    async def prefill(self, prefills: Prefills, posted: Mapping[str, Any]) -> Reply:
        """Prefill for what D's daemon has posted, and say how that ended.

        A daemon that was restarted posts again. Then the prefill before it is of no use: its
        addresses are void. It ends before the next begins.
        """
        await self._stop_prefill()
        if self._closed:
            return Reply(404, "the request is over")
        self.prefills += 1
        self.timing.note("metaserver_ms")
        task = asyncio.create_task(
            prefills.run(
                self.api, self.part.body, posted, self.part.cost, self._headers, self.timing
            )
        )
        self._prefill = task
        # Whoever posted may hang up: that the prefill has ended it hears from P's ranks, too.
        await asyncio.wait([task])
        return Reply(502, "the request is over") if task.cancelled() else task.result()

    async def close(self, finished: bool) -> None:
        """The request is over. `finished`: D has answered to the end, so that what P may still
        have to say of its prefill harms nobody; otherwise it is cancelled.
        """
        self._closed = True
        await self._stack.aclose()
        if not finished:
            await self._stop_prefill()

    async def wait_prefill(self) -> None:
        """Until P has answered."""
        if self._prefill is not None:
            await asyncio.wait([self._prefill])

    @property
    def prefilling(self) -> bool:
        """P has not answered yet."""
        return self._prefill is not None and not self._prefill.done()

    async def _stop_prefill(self) -> None:
        task = self._prefill
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
