"""The proxy's HTTP side: its routes, and a request's way through them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from .body import Api, split, wants_virtual
from .errors import BadRequest, NoNode, answer
from .leg import Leg
from .merge import DONE, StreamBroken, merge_answers, merge_streams
from .nodes import Node, Nodes
from .prefill import Prefills
from .settings import Settings
from .timing import Timing

log = structlog.get_logger(__name__)

HEALTH_TIMEOUT_S = 2.0

# Of the client's headers, those that engines may need.
_PASSED_ON = ("Authorization", "traceparent", "tracestate")


class Proxy:
    """All requests on their way. `metaserver`: this proxy's address for D's daemons."""

    def __init__(self, settings: Settings, metaserver: str) -> None:
        self.settings = settings
        self._metaserver = metaserver
        self._decode = Nodes("decode", settings.decode)
        self._prefill = Nodes("prefill", settings.prefill)
        self._legs: dict[str, Leg] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._session = aiohttp.ClientSession(
            # Engines close a connection that has been idle for 5 s; it must not be used just then.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            read_bufsize=1 << 18,
        )
        self._prefills = Prefills(self._prefill, self._session, settings.prefill_timeout_s)

    def app(self) -> web.Application:
        """The application that serves this proxy."""
        app = web.Application(
            client_max_size=self.settings.max_body_bytes, middlewares=[_openai_errors]
        )
        for api in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(api, self._completions)
        app.router.add_post("/v1/metaserver", self._metaserver_called)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    @property
    def legs_open(self) -> int:
        """Legs whose token still means something."""
        return len(self._legs)

    async def settled(self) -> None:
        """Wait for prefills whose requests are over."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def close(self) -> None:
        """Stop what is still under way."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for leg in list(self._legs.values()):
            await leg.close(finished=False)
        await self._session.close()

    # Requests of clients

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        timing = Timing()
        api: Api = "/v1/chat/completions" if "chat" in request.path else "/v1/completions"
        body = await _json_of(request)
        parts = split(api, body)
        virtual = self.settings.virtual or wants_virtual(body)
        if not virtual and not len(self._prefill):
            raise NoNode("this proxy has no prefill nodes: only virtual requests can be served")
        headers = {key: request.headers[key] for key in _PASSED_ON if key in request.headers}
        legs = [Leg(api, part, headers, timing, virtual) for part in parts]
        self._legs.update((leg.token, leg) for leg in legs)
        status: int | str = "cancelled"
        finished = False
        try:
            response = await self._serve(request, legs, body)
            status = response.status
            finished = status == 200
            return response
        except NoNode:
            status = 503
            raise
        finally:
            await self._over(legs, finished)
            timing.note("finished_ms")
            log.info(
                "request finished",
                request_id=request.headers.get("X-Request-Id", legs[0].token),
                token=legs[0].token,
                legs=len(legs),
                api=api,
                status=status,
                virtual=virtual,
                stream=bool(body.get("stream")),
                decode=legs[0].node.url if legs[0].node else None,
                prefills=sum(leg.prefills for leg in legs),
                **timing.events,
            )

    async def _serve(
        self, request: web.Request, legs: Sequence[Leg], body: Mapping[str, Any]
    ) -> web.StreamResponse:
        asked = [
            asyncio.create_task(leg.decode(self._decode, self._session, self._metaserver))
            for leg in legs
        ]
        try:
            answers = await asyncio.gather(*asked)
            bad = next((each for each in answers if each.status != 200), None)
            if bad is not None:
                return await _passed_on(bad)
            if body.get("stream"):
                return await self._stream(request, legs, answers, body)
            if len(legs) == 1:
                legs[0].timing.note("first_byte_ms")
                return await _passed_on(answers[0])
            contents = await asyncio.gather(*(each.json() for each in answers))
            legs[0].timing.note("first_byte_ms")
            return web.json_response(merge_answers([leg.part for leg in legs], contents))
        except (aiohttp.ClientError, ValueError) as error:
            return answer(502, f"a decode node broke off: {error or type(error).__name__}")
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _stream(
        self,
        request: web.Request,
        legs: Sequence[Leg],
        answers: Sequence[aiohttp.ClientResponse],
        body: Mapping[str, Any],
    ) -> web.StreamResponse:
        pieces: AsyncIterator[bytes]
        if len(legs) == 1:
            pieces = answers[0].content.iter_any()
        else:
            options = body.get("stream_options")
            with_usage = isinstance(options, dict) and bool(options.get("include_usage"))
            streams = [each.content.iter_any() for each in answers]
            pieces = merge_streams([leg.part for leg in legs], streams, with_usage)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        await response.prepare(request)
        try:
            async for piece in pieces:
                legs[0].timing.note("first_byte_ms")
                await response.write(piece)
        except (aiohttp.ClientError, StreamBroken) as error:
            # The status is sent: only the stream can say it.
            text = f"a decode node broke off: {error or type(error).__name__}"
            said = {"error": {"message": text, "type": "server_error", "code": 502}}
            await response.write(b"data: " + json.dumps(said).encode() + b"\n\n" + DONE)
        await response.write_eof()
        return response

    async def _over(self, legs: Sequence[Leg], finished: bool) -> None:
        for leg in legs:
            await leg.close(finished)
            if finished and leg.prefilling:
                # D has what it needs; P is about to say the same.
                task = asyncio.create_task(self._late_prefill(leg))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            else:
                self._legs.pop(leg.token, None)

    async def _late_prefill(self, leg: Leg) -> None:
        try:
            await leg.wait_prefill()
        finally:
            await leg.close(finished=False)
            self._legs.pop(leg.token, None)

    # What D's daemon posts

    async def _metaserver_called(self, request: web.Request) -> web.Response:
        posted = await _json_of(request)
        if not isinstance(posted, dict) or not isinstance(posted.get("request_id"), str):
            raise BadRequest("request_id", "the body has to be an object with a request_id")
        leg = self._legs.get(request.query.get("request", ""))
        if leg is None or leg.virtual:
            return answer(404, "no request of this name waits for a prefill")
        reply = await leg.prefill(self._prefills, posted)
        if reply.status == 200:
            return web.json_response({"status": "ok"})
        return answer(reply.status, reply.text)

    # What operators ask

    async def _models(self, request: web.Request) -> web.StreamResponse:
        tried: list[Node] = []
        while True:
            node = self._decode.choose(tried)
            tried.append(node)
            try:
                async with self._session.get(node.url + "/v1/models") as models:
                    return await _passed_on(models)
            except aiohttp.ClientError:
                node.unreachable()

    async def _health(self, request: web.Request) -> web.Response:
        sides = {"decode": self._decode, "prefill": self._prefill}
        body: dict[str, Any] = {}
        good = True
        for side, nodes in sides.items():
            states = await asyncio.gather(*(self._state(node) for node in nodes))
            body[side] = [
                {"url": node.url, "state": state, "legs": node.legs, "load": node.load}
                for node, state in zip(nodes, states, strict=True)
            ]
            needed = side == "decode" or not self.settings.virtual
            good = good and ("ok" in states or not needed)
        body["status"] = "ok" if good else "a side has no node that answers"
        return web.json_response(body, status=200 if good else 503)

    async def _state(self, node: Node) -> str:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._session.get(node.url + "/health", timeout=timeout) as health:
                return "ok" if health.status == 200 else f"answered {health.status}"
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return f"unreachable: {error or type(error).__name__}"


async def _json_of(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise BadRequest("", f"the body is not JSON: {error}") from error


async def _passed_on(source: aiohttp.ClientResponse) -> web.Response:
    """An engine's answer as it is."""
    content = await source.read()
    return web.Response(
        status=source.status, body=content, headers={"Content-Type": source.content_type}
    )


@web.middleware
async def _openai_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except BadRequest as error:
        return answer(400, str(error), error.field)
    except NoNode as error:
        return answer(503, str(error))
    except web.HTTPRequestEntityTooLarge as error:
        return answer(413, error.text or error.reason)
    except web.HTTPException as error:
        return answer(error.status, f"{request.method} {request.path}: {error.reason}")
