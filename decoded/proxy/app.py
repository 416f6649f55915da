"""The proxy's HTTP side: its routes, and a request's way through them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import structlog
from aiohttp import web

from . import operators
from .answers import respond
from .body import Api, check_prefill, check_volume, split, wants_virtual
from .errors import BadRequest, NoNode, ProxyError, answer, openai_errors
from .leg import Leg
from .nodes import Nodes
from .prefill import Prefills
from .settings import Settings
from .timing import Timing, earliest

log = structlog.get_logger(__name__)

_MAX_ID = 256
_SPLIT_TIMES = 4
"""A request's parts together may have this many times the bytes that a body may have."""

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
        self._stopping = False
        self._idle = asyncio.Event()
        self._session = aiohttp.ClientSession(
            # A kept connection that an engine has just closed could not be told from a request
            # that has reached it, and that one must not be sent again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            headers={"Accept-Encoding": "identity"},
            read_bufsize=1 << 18,
        )
        self._prefills = Prefills(self._prefill, self._session, settings.prefill_timeout_s)

    def app(self) -> web.Application:
        """The application that serves this proxy."""
        app = web.Application(
            client_max_size=self.settings.max_body_bytes, middlewares=[openai_errors]
        )
        for api in ("/v1/completions", "/v1/chat/completions"):
            app.router.add_post(api, self._completions)
        app.router.add_post("/v1/metaserver", self._metaserver_called)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    # Life

    @property
    def legs_open(self) -> int:
        """Legs whose token still means something."""
        return len(self._legs)

    async def settled(self) -> None:
        """Wait for prefills whose requests are over."""
        await asyncio.gather(*self._late, return_exceptions=True)

    async def drain(self, within_s: float) -> bool:
        """Take no new requests and wait for those in flight; False if some are left.

        D's daemons must still be able to POST meanwhile.
        """
        self._stopping = True
        if not self._legs:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), within_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Stop what is still under way."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        for leg in list(self._legs.values()):
            await leg.close()
        await self._session.close()

    # Requests of clients

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        timing = Timing()
        if self._stopping:
            raise NoNode("the proxy is shutting down")
        api: Api = "/v1/chat/completions" if "chat" in request.path else "/v1/completions"
        content = await request.read()
        body = _json_of(content)
        parts = split(api, body)
        check_volume(body, parts, len(content), _SPLIT_TIMES * self.settings.max_body_bytes)
        virtual = wants_virtual(body) or self.settings.virtual
        if not virtual:
            check_prefill(body)
            if not len(self._prefill):
                raise NoNode("this proxy has no prefill nodes: only virtual requests can be served")
        headers = _headers(request)
        legs = [Leg(api, part, headers, Timing(timing.began), virtual) for part in parts]
        self._legs.update((leg.token, leg) for leg in legs)
        status: int | str = "cancelled"
        wrong = ""
        try:
            response, wrong = await self._serve(request, legs, bool(body.get("stream")))
            status = response.status
            return response
        except ProxyError as error:
            status, wrong = error.status, str(error)
            raise
        finally:
            await self._over(legs)
            timing.note("finished_ms")
            log.info(
                "request finished",
                request_id=request.headers.get("X-Request-Id", legs[0].token)[:_MAX_ID],
                token=legs[0].token,
                legs=len(legs),
                api=api,
                status=status,
                virtual=virtual,
                stream=bool(body.get("stream")),
                decode=legs[0].node.url if legs[0].node else None,
                prefill=legs[0].prefill_node.url if legs[0].prefill_node else None,
                prefills=sum(leg.prefills for leg in legs),
                **({"error": wrong} if wrong else {}),
                **earliest([*(leg.timing for leg in legs), timing]),
            )

    async def _serve(
        self, request: web.Request, legs: Sequence[Leg], stream: bool
    ) -> tuple[web.StreamResponse, str]:
        asked = [
            asyncio.create_task(leg.decode(self._decode, self._session, self._metaserver))
            for leg in legs
        ]
        try:
            return await respond(request, legs, asked, stream)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _over(self, legs: Sequence[Leg]) -> None:
        for leg in legs:
            await leg.close()
            if leg.prefilling:
                # D has what it needs, and P is about to say the same.
                task = asyncio.create_task(self._late_prefill(leg))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            else:
                self._forget(leg)

    async def _late_prefill(self, leg: Leg) -> None:
        try:
            await leg.end_prefill(self.settings.late_prefill_s)
        finally:
            self._forget(leg)

    def _forget(self, leg: Leg) -> None:
        self._legs.pop(leg.token, None)
        if self._stopping and not self._legs:
            self._idle.set()

    # What D's daemon posts

    async def _metaserver_called(self, request: web.Request) -> web.Response:
        posted = _json_of(await request.read())
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

    async def _models(self, request: web.Request) -> web.Response:
        return await operators.models(self._decode, self._session, _headers(request))

    async def _health(self, _: web.Request) -> web.Response:
        good, body = await operators.health(
            self._decode, self._prefill, self._session, not self.settings.virtual
        )
        if self._stopping:
            good, body["status"] = False, "shutting down"
        return web.json_response(body, status=200 if good else 503)


def _headers(request: web.Request) -> Mapping[str, str]:
    return {key: request.headers[key] for key in _PASSED_ON if key in request.headers}


def _json_of(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest("", f"the body is not JSON: {error}") from error
