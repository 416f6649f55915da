"""D and P engines as the proxy sees them: HTTP, with answers that a test decides."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

from decoded.proxy.app import Proxy
from decoded.proxy.settings import Settings

HOST = "127.0.0.1"
WAIT_S = 20.0

Handler = Callable[["Call"], Awaitable[web.StreamResponse]]


class Call:
    """One request that an engine got."""

    def __init__(self, request: web.Request, body: dict[str, Any]) -> None:
        self.request = request
        self.body = body
        self.api = request.path
        self.token = request.headers["X-Request-Id"]
        self.params: dict[str, Any] = body.get("kv_transfer_params") or {}


class Engine:
    """An engine that answers each completion with what `handler` returns."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.calls: list[Call] = []
        self.arrived: asyncio.Queue[Call] = asyncio.Queue()
        self.cancelled: asyncio.Queue[Call] = asyncio.Queue()
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> Engine:
        app = web.Application(client_max_size=1 << 30)
        for api in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(api, self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        self.url = await start(app, stack)
        return self

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        call = Call(request, await request.json())
        self.calls.append(call)
        self.arrived.put_nowait(call)
        try:
            return await self.handler(call)
        except asyncio.CancelledError:
            self.cancelled.put_nowait(call)
            raise

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()


async def start(app: web.Application, stack: AsyncExitStack, port: int = 0) -> str:
    """Serve on a port (0: a free one) until `stack` closes; the URL."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, HOST, port)
    await site.start()
    return f"http://{HOST}:{runner.addresses[0][1]}"


def answer(call: Call, text: str = "text", usage: bool = True) -> dict[str, Any]:
    """A completion of one choice, as vLLM shapes it."""
    prompt = call.body.get("prompt")
    tokens = len(prompt) if isinstance(prompt, list) else 7
    body: dict[str, Any] = {
        "id": f"cmpl-{call.token}",
        "object": "text_completion",
        "model": "model",
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
    }
    if usage:
        body["usage"] = {
            "prompt_tokens": tokens,
            "completion_tokens": 2,
            "total_tokens": tokens + 2,
        }
    return body


class Decode:
    """What a D engine and its daemon do: ask the metaserver for a prefill, then answer."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.replies: list[tuple[int, dict[str, Any]]] = []
        self.streamed = 3
        self.always_usage = False

    async def __call__(self, call: Call) -> web.StreamResponse:
        if not call.params.get("do_virtual"):
            status, _ = await self.post(call)
            if status != 200:
                return web.json_response({"error": {"message": "KV load failed"}}, status=500)
        if call.body.get("stream"):
            return await self._stream(call)
        return web.json_response(answer(call, str(call.body.get("prompt"))))

    async def post(self, call: Call) -> tuple[int, dict[str, Any]]:
        """The daemon's POST, and its answer."""
        posted = {"request_id": f"cmpl-{call.token}-0", "do_remote_decode": True}
        async with self._session.post(call.params["metaserver"], json=posted) as reply:
            self.replies.append((reply.status, await reply.json()))
        return self.replies[-1]

    async def _stream(self, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(call.request)
        for number in range(self.streamed):
            chunk = answer(call, f"{call.body.get('prompt')}/{number} ", usage=False)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        options = call.body.get("stream_options") or {}
        if options.get("include_usage") or self.always_usage:
            last = {**answer(call), "choices": []}
            await response.write(b"data: " + json.dumps(last).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


async def prefill(call: Call) -> web.StreamResponse:
    """What a P engine does that has no trouble."""
    return web.json_response(answer(call, "x"))


class Cluster:
    """A proxy in this process, engines in front of it, and a client."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self.d: list[Engine] = []
        self.p: list[Engine] = []

    async def start(
        self,
        p: list[Handler] | None = None,
        d: list[Handler] | None = None,
        dead_p: int = 0,
        dead_d: int = 0,
        **settings: Any,
    ) -> Cluster:
        """`p`, `d`: the engines' handlers; `dead_*`: so many addresses where nobody listens."""
        # Nothing is to end only because the proxy has waited for it long enough.
        settings.setdefault("late_prefill_s", 10 * WAIT_S)
        unlimited = aiohttp.TCPConnector(limit=0)
        self.session = await self._stack.enter_async_context(
            aiohttp.ClientSession(connector=unlimited)
        )
        self.decode = Decode(self.session)
        self.p = [await Engine(each).start(self._stack) for each in (p or [prefill])]
        self.d = [await Engine(each).start(self._stack) for each in (d or [self.decode])]
        dead = [f"http://{HOST}:{port}" for port in range(1, 10)]
        chosen = Settings(
            prefill=(*dead[:dead_p], *(engine.url for engine in self.p)),
            decode=(*dead[:dead_d], *(engine.url for engine in self.d)),
            **settings,
        )
        assert chosen.problems() == []
        # Its own address is part of what it sends, so the port comes first.
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self.proxy = Proxy(chosen, self.url + "/v1/metaserver")
        await start(self.proxy.app(), self._stack, port)
        self._stack.push_async_callback(self.proxy.close)
        return self

    async def close(self) -> None:
        await self._stack.aclose()

    async def ask(self, body: Any, api: str = "/v1/completions", **options: Any) -> tuple[int, Any]:
        """Status and JSON of a request."""
        async with self.session.post(self.url + api, json=body, **options) as reply:
            return reply.status, await reply.json()

    async def stream(self, body: dict[str, Any], api: str = "/v1/completions") -> list[Any]:
        """The events of a streamed request; the last is "[DONE]"."""
        async with self.session.post(self.url + api, json={**body, "stream": True}) as reply:
            assert reply.status == 200
            assert reply.content_type == "text/event-stream"
            events = (await reply.text()).strip().split("\n\n")
        texts = [event.removeprefix("data: ") for event in events]
        return [text if text == "[DONE]" else json.loads(text) for text in texts]
