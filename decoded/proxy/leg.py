"""One D request and the prefill that belongs to it, under one token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import structlog

from .body import Api, Part, for_decode
from .errors import DecodeBroken
from .nodes import Node, Nodes
from .prefill import Prefills, Reply
from .timing import Timing

log = structlog.get_logger(__name__)


class Leg:
    """A part of a request on its way. `token` is its name: D's daemon hands it back in the URL
    that it posts to, so nobody has to read it out of an engine's request id.

    `node`, `prefill_node`: the D engine that answers, the P engine that was asked last.
    `prefills`: how many were asked for. `answer`: D's, of which only the status has come.
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
        self.prefill_node: Node | None = None
        self.prefills = 0
        self._headers = {**headers, "X-Request-Id": self.token}
        self.answer: aiohttp.ClientResponse | None = None
        self._answering = False
        self._answered = False
        self._prefill: asyncio.Task[Reply] | None = None
        self._turn = asyncio.Lock()
        self._why = ""
        self._closed = False
        self._stack = AsyncExitStack()

    # D's side

    async def decode(
        self, nodes: Nodes, session: aiohttp.ClientSession, metaserver: str
    ) -> aiohttp.ClientResponse:
        """D's answer, once its status has come; read it by `pieces`, and then `close` the leg.

        A D node that cannot be reached is not the last. Raises NoNode, and DecodeBroken for a
        connection that breaks later.
        """
        url = None if self.virtual else f"{metaserver}?request={self.token}"
        body = for_decode(self.part.body, url)
        tried: list[Node] = []
        while True:
            node = nodes.choose(tried)
            tried.append(node)
            self.timing.renote("decode_sent_ms")
            with_node = AsyncExitStack()
            with_node.enter_context(node.busy(self.part.cost))
            try:
                answer = await with_node.enter_async_context(
                    session.post(
                        node.url + self.api, json=body, headers=self._headers, allow_redirects=False
                    )
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                await with_node.aclose()
                log.warning("decode node cannot be reached", node=node.url)
                node.unreachable()
            except (aiohttp.ClientError, OSError) as error:
                await with_node.aclose()
                raise _broken(node, error) from error
            except BaseException:
                await with_node.aclose()
                raise
            else:
                if answer.status != 200 and not 400 <= answer.status <= 599:
                    await with_node.aclose()
                    raise DecodeBroken(
                        f"decode node {node.url} answered with status {answer.status}"
                    )
                self.node, self.answer = node, answer
                self._stack.push_async_exit(with_node)
                return answer

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body of D's answer, as it comes. Raises DecodeBroken."""
        assert self.answer is not None
        assert self.node is not None
        try:
            async for piece in self.answer.content.iter_any():
                self.timing.note("first_byte_ms")
                self._answering = True
                yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise _broken(self.node, error) from error
        self._answered = self.answer.status == 200

    # P's side

    async def prefill(self, prefills: Prefills, posted: Mapping[str, Any]) -> Reply:
        """Prefill for what D's daemon has posted, and say how that ended.

        A daemon that was restarted posts again. Then the prefill before it is of no use: its
        addresses are void. It ends before the next begins.
        """
        self.timing.note("metaserver_ms")
        async with self._turn:
            if refusal := self._refusal():
                return refusal
            await self._stop_prefill("D's daemon has posted again")
            if refusal := self._refusal():
                return refusal
            self.prefills += 1
            task = self._prefill = asyncio.create_task(
                prefills.run(
                    self.api,
                    self.part.body,
                    posted,
                    self.part.cost,
                    self._headers,
                    self.timing,
                    self._chose,
                )
            )
        # Whoever posted may hang up: that the prefill has ended it hears from P's ranks, too.
        await asyncio.wait([task])
        if task.cancelled():
            return Reply(502, f"the prefill was cancelled: {self._why}")
        return task.result()

    async def close(self) -> None:
        """The request is over. Its prefill is cancelled, if D has not answered to the end."""
        self._closed = True
        await self._stack.aclose()
        if not self._answered:
            await self._stop_prefill("the request is over")

    async def end_prefill(self, within_s: float) -> None:
        """Wait until P has answered, too, and cancel the prefill if that takes too long."""
        if self._prefill is not None:
            await asyncio.wait([self._prefill], timeout=within_s)
            await self._stop_prefill(f"D answered {within_s:g} s ago without it")

    @property
    def prefilling(self) -> bool:
        """P has not answered yet."""
        return self._prefill is not None and not self._prefill.done()

    def _chose(self, node: Node) -> None:
        self.prefill_node = node

    def _refusal(self) -> Reply | None:
        if self._closed:
            return Reply(404, "the request is over")
        if self._answering:
            # D's answers name the token: from now on it is no secret of D's daemon.
            return Reply(404, "D answers already")
        return None

    async def _stop_prefill(self, why: str) -> None:
        task = self._prefill
        if task is not None and not task.done():
            self._why = why
            task.cancel()
            await asyncio.wait([task])


def _broken(node: Node, error: Exception) -> DecodeBroken:
    return DecodeBroken(f"decode node {node.url} broke off: {error or type(error).__name__}")
