"""What a client is answered, out of what D engines answer to its request's parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence

import aiohttp
from aiohttp import web

from .errors import DecodeBroken
from .leg import Leg
from .merge import broken_event, merge_answers, merge_streams
from .timing import earliest, server_timing

WHOLE_BYTES = 1 << 20
"""Answers up to this size are held until they are whole, so that a D that breaks off is a 502."""

# Of D's headers, those that say something to its client.
_PASSED_ON = ("Content-Type", "Retry-After", "WWW-Authenticate")


async def respond(
    request: web.Request,
    legs: Sequence[Leg],
    asked: Sequence[Awaitable[aiohttp.ClientResponse]],
    stream: bool,
) -> tuple[web.StreamResponse, str]:
    """Answer `request`; `asked` are the legs' D requests, under way.

    Returns what was answered, and what went wrong once its status was sent, or "". An error
    of one D is the answer for all. Raises NoNode and DecodeBroken.
    """
    bad = await _first_error(asked)
    if bad is not None:
        [leg] = [leg for leg in legs if leg.answer is bad]
        return await _pass_on(request, leg)
    if stream:
        return await _stream(request, legs)
    if len(legs) == 1:
        return await _pass_on(request, legs[0])
    merged = await merge_answers([leg.part for leg in legs], [leg.pieces() for leg in legs])
    return web.json_response(merged, headers=_timing(legs)), ""


async def _first_error(
    asked: Sequence[Awaitable[aiohttp.ClientResponse]],
) -> aiohttp.ClientResponse | None:
    for done in asyncio.as_completed(asked):
        answer = await done
        if answer.status != 200:
            return answer
    return None


async def _pass_on(request: web.Request, leg: Leg) -> tuple[web.StreamResponse, str]:
    """One D's answer as it is."""
    source = leg.answer
    assert source is not None
    pieces, head = leg.pieces(), bytearray()
    async for piece in pieces:
        head += piece
        if len(head) > WHOLE_BYTES:
            break
    else:
        return web.Response(status=source.status, body=bytes(head), headers=_headers(leg)), ""
    response = web.StreamResponse(status=source.status, headers=_headers(leg))
    await response.prepare(request)
    await response.write(bytes(head))
    try:
        async for piece in pieces:
            await response.write(piece)
    except DecodeBroken as error:
        # Half of a JSON text must not look like all of it.
        if request.transport is not None:
            request.transport.abort()
        return response, str(error)
    await response.write_eof()
    return response, ""


async def _stream(request: web.Request, legs: Sequence[Leg]) -> tuple[web.StreamResponse, str]:
    streams = [leg.pieces() for leg in legs]
    pieces: AsyncIterator[bytes] = streams[0]
    if len(legs) > 1:
        pieces = merge_streams([leg.part for leg in legs], streams)
    # Not before D has begun: until then a broken D can still be answered with a status.
    piece = await anext_or_none(pieces)
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_timing(legs)}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    wrong = ""
    while piece is not None:
        await response.write(piece)
        try:
            piece = await anext_or_none(pieces)
        except DecodeBroken as error:
            wrong = str(error)
            await response.write(broken_event(error))
            break
    await response.write_eof()
    return response, wrong


async def anext_or_none(pieces: AsyncIterator[bytes]) -> bytes | None:
    """The next piece; None at the end."""
    try:
        return await pieces.__anext__()
    except StopAsyncIteration:
        return None


def _headers(leg: Leg) -> dict[str, str]:
    assert leg.answer is not None
    given = leg.answer.headers
    return {key: given[key] for key in _PASSED_ON if key in given} | _timing([leg])


def _timing(legs: Sequence[Leg]) -> dict[str, str]:
    return {"Server-Timing": server_timing(earliest(leg.timing for leg in legs))}
