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
_TEXT_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class MetaserverSettings:
    """Times in seconds. `retries`: further tries after a connection could not be made.

    `max_connections`: calls at the same time, 0 for any number; others wait their turn.
    """

    connect_timeout_s: float = 5.0
    total_timeout_s: float = 300.0
    retries: int = 3
    backoff_s: float = 0.2
    max_connections: int = 0


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
        # A reused connection that the proxy has just closed could not be told from a failed
        # prefill, and a call stays open for as long as its prefill: keeping them gains nothing.
        connector = aiohttp.TCPConnector(
            limit=settings.max_connections, force_close=True, ssl=tls or True
        )
        self._http = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(
                total=settings.total_timeout_s, sock_connect=settings.connect_timeout_s
            ),
        )

    async def announce(self, url: str, body: Mapping[str, Any], request_id: str) -> PrefillReply:
        """POST `body` to `url` and wait until the prefill has ended. Never raises.

        Only a connection that was never made is tried again: whatever was sent may have
        started a prefill, and a second one would push into the same blocks.
        """
        settings, shown = self._settings, url[:_MAX_DETAIL]
        for attempt in range(settings.retries + 1):
            try:
                return await self._post(url, body)
            except aiohttp.ClientConnectorError as error:
                if attempt == settings.retries:
                    return PrefillReply(False, False, f"{shown} cannot be reached: {_short(error)}")
                log.debug("metaserver unreachable", request_id=request_id, error=str(error))
                await asyncio.sleep(settings.backoff_s * 2**attempt)
            except aiohttp.ConnectionTimeoutError:
                if attempt == settings.retries:
                    limit = settings.connect_timeout_s
                    return PrefillReply(False, False, f"{shown} took no connection in {limit} s")
                await asyncio.sleep(settings.backoff_s * 2**attempt)
            except asyncio.TimeoutError:
                limit = settings.total_timeout_s
                return PrefillReply(
                    False, True, f"{shown} did not answer within {limit} s", over=False
                )
            except aiohttp.InvalidURL:
                return PrefillReply(False, False, f"metaserver is not a valid URL: {shown}")
            except (aiohttp.ClientError, OSError) as error:
                return PrefillReply(
                    False, True, f"{shown}: {type(error).__name__}: {_short(error)}", over=False
                )
            except UnicodeError as error:
                # A host name that no resolver takes: nothing was sent.
                return PrefillReply(
                    False, False, f"metaserver {shown} cannot be used: {_short(error)}"
                )
        raise AssertionError("unreachable: the last try returns")

    async def _post(self, url: str, body: Mapping[str, Any]) -> PrefillReply:
        # Followed, a redirect would turn the POST into a GET, and any page into "prefill ended".
        async with self._http.post(url, json=body, allow_redirects=False) as answer:
            if answer.status == 200:
                return PrefillReply(True, True, "the prefill has ended")
            detail = f"HTTP {answer.status}"
            if where := answer.headers.get("Location"):
                detail += f" to {where[:_MAX_DETAIL]} is not followed: give the URL itself"
            elif text := await _beginning(answer.content):
                detail += f": {text}"
            # 404: the proxy does not know the request, so it has started nothing.
            return PrefillReply(False, answer.status != 404, detail)

    async def close(self) -> None:
        """Give up all calls."""
        await self._http.close()


async def _beginning(content: aiohttp.StreamReader) -> str:
    """The first piece of an error's text. The status counts, whatever becomes of its text."""
    try:
        text = await asyncio.wait_for(content.read(_MAX_DETAIL), _TEXT_TIMEOUT_S)
    except (aiohttp.ClientError, asyncio.TimeoutError):
        return ""
    return text.decode("utf-8", "replace")


def _short(error: Exception) -> str:
    return str(error)[:_MAX_DETAIL]
