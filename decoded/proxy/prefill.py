"""A leg's P side: the answer to the POST of D's daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
import structlog

from .body import Api, for_prefill
from .errors import NoNode
from .nodes import Node, Nodes
from .timing import Timing

log = structlog.get_logger(__name__)

REFUSALS = (429, 503)
"""Answers with which an engine turns a request away before it has begun."""


class Reply(NamedTuple):
    """What the daemon is answered: 200, 404 (no prefill ran), 502 (one failed)."""

    status: int
    text: str


class Prefills:
    """Runs prefills on the P nodes."""

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
    ) -> Reply:
        """Prefill on one P node. Another is tried only where the one before cannot have begun:
        what it may have begun to write, a second must not write at the same time.
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
            with node.busy(cost):
                timing.note("prefill_sent_ms")
                reply = await self._ask(node, api, for_prefill(body, posted), headers)
            timing.note("prefill_answered_ms")
            if reply is None:
                node.unreachable()
            elif reply.status not in REFUSALS:
                if reply.status != 200:
                    log.warning("prefill failed", node=node.url, why=reply.text)
                return reply
            else:
                refused = Reply(404, reply.text)

    async def _ask(
        self, node: Node, api: Api, body: dict[str, Any], headers: Mapping[str, str]
    ) -> Reply | None:
        """None if the node could not be reached."""
        try:
            async with self._session.post(
                node.url + api, json=body, headers=headers, timeout=self._timeout
            ) as answer:
                content = await answer.read()
                if answer.status != 200:
                    text = content[:500].decode(errors="replace")
                    status = answer.status if answer.status in REFUSALS else 502
                    return Reply(status, f"{node.url} answered {answer.status}: {text}")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return None
        except asyncio.TimeoutError:
            return Reply(502, f"{node.url} did not answer in {self._timeout.total:g} s")
        except aiohttp.ClientError as error:
            return Reply(502, f"{node.url}: {error or type(error).__name__}")
        return _judge(node, content)


def _judge(node: Node, content: bytes) -> Reply:
    """An aborted prefill is answered with 200, too; its choice says so."""
    try:
        reasons = {choice.get("finish_reason") for choice in json.loads(content)["choices"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return Reply(502, f"{node.url} answered 200 with something that is no completion")
    bad = reasons & {"abort", "error"}
    if bad:
        return Reply(502, f"{node.url} ended the prefill with {', '.join(sorted(bad))}")
    return Reply(200, "ok")
