"""One answer out of the answers to a request's parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from .body import Part
from .errors import DecodeBroken, error_body

DONE = b"data: [DONE]\n\n"
QUEUED = 16
"""Events that may wait for a client that reads slowly; then D waits."""

MAX_EVENT_BYTES = 16 << 20
MAX_ANSWERS_BYTES = 256 << 20
"""Of all parts' answers together, which are held until the last has come."""


async def merge_answers(
    parts: Sequence[Part], bodies: Sequence[AsyncIterator[bytes]], limit: int = MAX_ANSWERS_BYTES
) -> dict[str, Any]:
    """The choices of all parts, numbered through, and their usage added up.

    `bodies`: the answers' JSON, in pieces. Raises DecodeBroken.
    """
    left = limit

    async def read(body: AsyncIterator[bytes]) -> dict[str, Any]:
        nonlocal left
        content = bytearray()
        async for piece in body:
            left -= len(piece)
            if left < 0:
                raise DecodeBroken(f"the answers have more than {limit} bytes together")
            content += piece
        return _object(bytes(content))

    readers = [asyncio.create_task(read(body)) for body in bodies]
    try:
        answers = await asyncio.gather(*readers)
    finally:
        await _end(readers)
    choices = [_choices(answer) for answer in answers]
    if not all(choices):
        raise DecodeBroken("D answered without a choice")
    return {
        **answers[0],
        "choices": [{**one[0], "index": index} for index, one in enumerate(choices)],
        "usage": add_usage(parts, [answer.get("usage") for answer in answers]),
    }


def add_usage(parts: Sequence[Part], usages: Sequence[Any]) -> dict[str, Any] | None:
    """A prompt with several answers is counted once; None if nobody counted."""
    prompt_of: dict[int, Mapping[str, Any]] = {}
    known: list[Mapping[str, Any]] = []
    for part, usage in zip(parts, usages, strict=True):
        if isinstance(usage, dict):
            prompt_of.setdefault(part.prompt, usage)
            known.append(usage)
    if not known:
        return None
    prompt = sum(_count(usage, "prompt_tokens") for usage in prompt_of.values())
    completion = sum(_count(usage, "completion_tokens") for usage in known)
    merged = {
        **known[0],
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    for key, counted in (
        ("prompt_tokens_details", prompt_of.values()),
        ("completion_tokens_details", known),
    ):
        if key in merged:
            merged[key] = _add_details([usage.get(key) for usage in counted])
    return merged


def _add_details(details: Sequence[Any]) -> dict[str, int] | None:
    """Sums by name; None if nobody gave any."""
    given = [each for each in details if isinstance(each, dict)]
    names = dict.fromkeys(name for each in given for name in each)
    return {name: sum(_count(each, name) for each in given) for name in names} or None


def _count(usage: Mapping[str, Any], key: str) -> int:
    found = usage.get(key)
    return found if isinstance(found, int) else 0


async def events(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Raises DecodeBroken."""
    waiting = b""
    async for piece in stream:
        waiting += piece
        if b"\r" in waiting:
            waiting = waiting.replace(b"\r\n", b"\n")
        *whole, waiting = waiting.split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(waiting) > MAX_EVENT_BYTES:
            raise DecodeBroken(f"an event of D has more than {MAX_EVENT_BYTES} bytes")
    if waiting.strip():
        raise DecodeBroken("D's stream ended within an event")


async def merge_streams(
    parts: Sequence[Part], streams: Sequence[AsyncIterator[bytes]]
) -> AsyncIterator[bytes]:
    """The events of all streams as they come, as one stream of one answer.

    Usage is told at the end if D tells it, as it does when it is asked to. Raises DecodeBroken.
    """
    queue: asyncio.Queue[tuple[int, bytes | BaseException | None]] = asyncio.Queue(QUEUED)

    async def read(index: int, stream: AsyncIterator[bytes]) -> None:
        try:
            async for data in events(stream):
                if data != b"[DONE]":
                    await queue.put((index, data))
        except Exception as error:  # noqa: BLE001 - raised again by whoever merges
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    readers = [asyncio.create_task(read(*each)) for each in enumerate(streams)]
    usages: list[Any] = [None] * len(parts)
    first: dict[str, Any] | None = None
    counted = False
    try:
        left = len(readers)
        while left:
            index, data = await queue.get()
            if data is None:
                left -= 1
                continue
            if isinstance(data, BaseException):
                raise data
            chunk = _object(data)
            if "choices" not in chunk:
                yield b"data: " + data + b"\n\n"  # An error, as D said it.
                continue
            first = first or chunk
            usages[index] = chunk.get("usage") or usages[index]
            choices = _choices(chunk)
            if choices:
                renumbered = [{**choice, "index": index} for choice in choices]
                yield _event({**chunk, "id": first.get("id"), "choices": renumbered})
            else:
                counted = True
        if counted and first is not None:
            yield _event({**first, "choices": [], "usage": add_usage(parts, usages)})
        yield DONE
    finally:
        await _end(readers)


def broken_event(error: DecodeBroken) -> bytes:
    """The end of a stream that cannot go on: its status is sent, so only an event can say it."""
    return _event(error_body(error.status, str(error))) + DONE


async def _end(readers: Sequence[asyncio.Task[Any]]) -> None:
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DecodeBroken(f"what D answered is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DecodeBroken("what D answered is no JSON object")
    return found


def _choices(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(one, dict) for one in choices):
        raise DecodeBroken("D answered without a list of choices")
    return choices


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
