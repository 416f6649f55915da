"""The metaserver client: tells the proxy where a request's KV is to be written.

The POST is answered only when the prefill has ended, so the answer is evidence.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

log = structlog.get_logger(__name__)

_MAX_DETAIL = 300


@dataclass(frozen=True)
class MetaserverSettings:
    """Times in seconds. `retries`: further tries after a connection could not be made."""

    connect_timeout_s: float = 5.0
    total_timeout_s: float = 300.0
    retries: int = 3
    backoff_s: float = 0.2


@dataclass(frozen=True)
class PrefillReply:
    """What a call has told.

    `began` False: it is certain that no prefill ran. `over` False: the call broke off
    without an answer, which says nothing about the prefill.
    """

    ok: bool
    began: bool
    detail: str
    over: bool = True


class MetaserverClient:
    """POSTs to metaservers. One per daemon; `close` it on the loop that made it."""

    def __init__(self, settings: MetaserverSettings, tls: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        # A call stays open for as long as its prefill, so a pool would only be a limit; and a
        # reused connection that the proxy has just closed could not be told from a failed prefill.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=tls or True),
            timeout=aiohttp.ClientTimeout(
                total=settings.total_timeout_s, sock_connect=settings.connect_timeout_s
            ),
        )

    async def announce(self, url: str, body: Mapping[str, Any], request_id: str) -> PrefillReply:
        """POST `body` to `url` and wait until the prefill has ended. Never raises.

        Only a connection that was never made is tried again: whatever was sent may have
        started a prefill, and a second one would push into the same blocks.
        """
        settings = self._settings
        for attempt in range(settings.retries + 1):
            try:
                return await self._post(url, body)
            except aiohttp.ClientConnectorError as error:
                if attempt == settings.retries:
                    return PrefillReply(False, False, f"{url} cannot be reached: {error}")
                log.debug("metaserver unreachable", request_id=request_id, error=str(error))
                await asyncio.sleep(settings.backoff_s * 2**attempt)
            except aiohttp.ConnectionTimeoutError:
                if attempt == settings.retries:
                    limit = settings.connect_timeout_s
                    return PrefillReply(False, False, f"{url} took no connection in {limit} s")
                await asyncio.sleep(settings.backoff_s * 2**attempt)
            except asyncio.TimeoutError:
                limit = settings.total_timeout_s
                return PrefillReply(
                    False, True, f"{url} did not answer within {limit} s", over=False
                )
            except aiohttp.InvalidURL:
                return PrefillReply(False, False, f"metaserver is not a valid URL: {url}")
            except (aiohttp.ClientError, OSError) as error:
                return PrefillReply(
                    False, True, f"{url}: {type(error).__name__}: {error}", over=False
                )
        raise AssertionError("unreachable: the last try returns")

    async def _post(self, url: str, body: Mapping[str, Any]) -> PrefillReply:
        async with self._http.post(url, json=body) as answer:
            if answer.status == 200:
                return PrefillReply(True, True, "the prefill has ended")
            text = (await answer.content.read(_MAX_DETAIL)).decode("utf-8", "replace")
            # 404: the proxy does not know the request, so it has started nothing.
            return PrefillReply(False, answer.status != 404, f"HTTP {answer.status}: {text}")

    async def close(self) -> None:
        """Give up all calls."""
        await self._http.close()
