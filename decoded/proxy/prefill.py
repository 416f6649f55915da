"""A leg's P side: the answer to the POST of D's daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import aiohttp
import structlog

from .body import Api, for_prefill
from .errors import NoNode
from .nodes import Node, Nodes
from .timing import Timing

log = structlog.get_logger(__name__)

REFUSALS = (404, 429, 503)
"""Answers with which an engine turns a request away before it has begun."""

MAX_ANSWER_BYTES = 4 << 20
"""P's answer is about one token."""

_MAX_DETAIL = 500


class Reply(NamedTuple):
    """What the daemon is answered: 200, 404 (no prefill ran), 502 (one failed)."""

    status: int
    text: str


class Prefills:
    """Runs prefills on the P nodes. `timeout_s`: how long a P may take for one."""

    def __init__(self, nodes: Nodes, session: aiohttp.ClientSession, timeout_s: float) -> None:
        self._nodes = nodes
        self._session = session
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0)

    async def run(
        self,
        api: Api,
        body: Mapping[str, Any],
        posted: Mapping[str, Any],
        cost: int,
        headers: Mapping[str, str],
        timing: Timing,
        chosen: Callable[[Node], None],
    ) -> Reply:
        """Prefill on one P node. Another is tried only where the one before cannot have begun:
        what it may have begun to write, a second must not write at the same time.

        `chosen` is told of each node that is asked.
        """
        tried: list[Node] = []
        refused: Reply | None = None
        while True:
            try:
                node = self._nodes.choose(tried)
            except NoNode as error:
                # Nothing was written by anybody: D need not wait for writers.
                return refused or Reply(404, str(error))
            tried.append(node)
            chosen(node)
            with node.busy(cost):
                timing.renote("prefill_sent_ms")
                timing.forget("prefill_answered_ms")
                reply = await self._ask(node, api, for_prefill(body, posted), headers)
            timing.renote("prefill_answered_ms")
            if reply is None:
                log.warning("prefill node cannot be reached", node=node.url)
                node.unreachable()
            elif reply.status in REFUSALS:
                log.warning("prefill refused", node=node.url, why=reply.text)
                refused = Reply(404, reply.text)
            else:
                if reply.status != 200:
                    log.warning("prefill failed", node=node.url, why=reply.text)
                return reply

    async def _ask(
        self, node: Node, api: Api, body: dict[str, Any], headers: Mapping[str, str]
    ) -> Reply | None:
        """None if the node could not be reached."""
        try:
            async with self._session.post(
                # Followed, a redirect would be a second request that carries the blocks' addresses.
                node.url + api,
                json=body,
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as answer:
                if answer.status != 200:
                    text = (await answer.content.read(_MAX_DETAIL)).decode(errors="replace")
                    status = answer.status if answer.status in REFUSALS else 502
                    return Reply(status, f"{node.url} answered {answer.status}: {text}")
                content = bytearray()
                async for piece in answer.content.iter_any():
                    content += piece
                    if len(content) > MAX_ANSWER_BYTES:
                        return Reply(502, f"{node.url} answered over {MAX_ANSWER_BYTES} bytes")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return None
        except asyncio.TimeoutError:
            return Reply(502, f"{node.url} did not answer in {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return Reply(502, f"{node.url}: {error or type(error).__name__}")
        return _judge(node, bytes(content))


def _judge(node: Node, content: bytes) -> Reply:
    """Only a choice that has finished tells of a prefill: an aborted one is a 200, too."""
    try:
        [reason] = {choice["finish_reason"] for choice in json.loads(content)["choices"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return Reply(502, f"{node.url} answered 200 with something that is no completion")
    if not isinstance(reason, str) or reason in ("abort", "error"):
        return Reply(502, f"{node.url} ended the prefill with finish_reason {reason!r:.100}")
    return Reply(200, "ok")
