"""What is asked about the cluster: its models, and whether it is well."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from .errors import NoNode
from .nodes import Node, Nodes

HEALTH_TIMEOUT_S = 2.0
MODELS_TIMEOUT_S = 10.0
MAX_MODELS_BYTES = 4 << 20


async def models(
    nodes: Nodes, session: aiohttp.ClientSession, headers: Mapping[str, str]
) -> web.Response:
    """What one D engine says of its models. Raises NoNode."""
    timeout = aiohttp.ClientTimeout(total=MODELS_TIMEOUT_S, sock_connect=HEALTH_TIMEOUT_S)
    tried: list[Node] = []
    why = ""
    while True:
        try:
            node = nodes.choose(tried)
        except NoNode as error:
            raise NoNode(f"{error}{why}") from None
        tried.append(node)
        try:
            async with session.get(
                node.url + "/v1/models", headers=headers, timeout=timeout
            ) as answer:
                content = await answer.content.read(MAX_MODELS_BYTES)
                while not answer.content.at_eof() and len(content) < MAX_MODELS_BYTES:
                    content += await answer.content.read(MAX_MODELS_BYTES - len(content))
                return web.Response(
                    status=answer.status,
                    body=content,
                    headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")},
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            node.unreachable()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            why = f"; {node.url}: {error or type(error).__name__}"


async def health(
    decode: Nodes, prefill: Nodes, session: aiohttp.ClientSession, prefill_needed: bool
) -> tuple[bool, dict[str, Any]]:
    """Whether each side that is needed has a node that answers; state and load of all nodes."""
    body: dict[str, Any] = {"status": ""}
    lacking: list[str] = []
    for nodes, needed in ((decode, True), (prefill, prefill_needed)):
        states = await asyncio.gather(*(_state(node, session) for node in nodes))
        body[nodes.side] = [
            {"url": node.url, "state": state, "legs": node.legs, "load": node.load}
            for node, state in zip(nodes, states, strict=True)
        ]
        if needed and "ok" not in states:
            lacking.append(f"no {nodes.side} node answers")
    body["status"] = ", ".join(lacking) or "ok"
    return not lacking, body


async def _state(node: Node, session: aiohttp.ClientSession) -> str:
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    try:
        async with session.get(node.url + "/health", timeout=timeout) as answer:
            return "ok" if answer.status == 200 else f"answered {answer.status}"
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        return f"unreachable: {error or type(error).__name__}"
