"""The metaserver: D posts where a prompt's KV is to go and hears when its prefill has ended."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import structlog
from aiohttp import web

from .errors import ParamsError
from .params import RemoteParams, decode_params

log = structlog.get_logger(__name__)

PATH = "/v1/metaserver"
MAX_BODY_BYTES = 16 * 2**20


class UnknownRequest(Exception):
    """A handler raises this for an id that it has no prompt for: D gets 404."""


class PrefillFailed(Exception):
    """A handler raises this when the prefill failed: D gets 502 and expects no DONE."""


Prefill = Callable[[RemoteParams], Awaitable[None]]
"""Runs the prefill that D asked for and returns when it has ended; DONE may come later."""


class Metaserver:
    """An HTTP server for D's posts; of one event loop.

    Answers `POST /v1/metaserver` when the prefill has ended: 200 `{"status": "ok"}`, 404 for
    an unknown id, 502 when prefill failed, and 400 at once for a body that is unusable.
    Errors are `{"error": text}`. A D that hangs up does not stop its prefill.

    `port` 0 takes a free one; `url` tells which. `start` raises OSError if it is taken.
    """

    def __init__(
        self,
        prefill: Prefill,
        host: str,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        shutdown_s: float = 5.0,
    ) -> None:
        self._prefill = prefill
        self._host = host
        self._port = port
        self._tls = tls
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(PATH, self._post)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=shutdown_s)

    @property
    def url(self) -> str:
        """What D needs as `metaserver`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self._port}{PATH}"

    async def start(self) -> None:
        """Listen."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening, and cut off the prefills that still run after `shutdown_s`."""
        await self._runner.cleanup()

    async def __aenter__(self) -> Metaserver:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _post(self, request: web.Request) -> web.Response:
        try:
            params = decode_params(await request.read())
        except ParamsError as error:
            return _error(400, str(error))
        request_id = params.request_id
        try:
            await self._prefill(params)
        except UnknownRequest as error:
            return _error(404, str(error) or f"no prompt is known for {request_id}")
        except PrefillFailed as error:
            return _error(502, str(error) or f"the prefill of {request_id} failed")
        except Exception as error:
            log.exception("prefill handler failed", request_id=request_id)
            return _error(502, f"the prefill of {request_id} failed: {error!r}")
        return web.json_response({"status": "ok"})


def _error(status: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status)
