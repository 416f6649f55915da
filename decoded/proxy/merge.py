"""One answer out of the answers to a request's parts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from .body import Part

DONE = b"data: [DONE]\n\n"
QUEUED = 16
"""Events that may wait for a client that reads slowly; then D waits."""

MAX_EVENT_BYTES = 16 << 20


class StreamBroken(Exception):
    """D's stream is no stream of events."""


def merge_answers(parts: Sequence[Part], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The choices of all parts, numbered through, and their usage added up."""
    merged = dict(answers[0])
    merged["choices"] = [
        {**choice, "index": index}
        for index, answer in enumerate(answers)
        for choice in answer.get("choices", ())[:1]
    ]
    merged["usage"] = add_usage(parts, [answer.get("usage") for answer in answers])
    return merged


def add_usage(
    parts: Sequence[Part], usages: Sequence[Mapping[str, Any] | None]
) -> dict[str, Any] | None:
    """A prompt with several answers is counted once; None if nobody counted."""
    known = [(part, usage) for part, usage in zip(parts, usages, strict=True) if usage]
    if not known:
        return None
    by_prompt: dict[int, int] = {}
    for part, usage in known:
        by_prompt.setdefault(part.prompt, int(usage.get("prompt_tokens") or 0))
    prompt = sum(by_prompt.values())
    completion = sum(int(usage.get("completion_tokens") or 0) for _, usage in known)
    return {
        **known[0][1],
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None,
    }


async def events(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Raises StreamBroken."""
    waiting = b""
    async for piece in stream:
        waiting += piece.replace(b"\r\n", b"\n")
        *whole, waiting = waiting.split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield b"\n".join(lines)
        if len(waiting) > MAX_EVENT_BYTES:
            raise StreamBroken(f"an event of D has more than {MAX_EVENT_BYTES} bytes")
    if waiting.strip():
        raise StreamBroken("D's stream ended within an event")


async def merge_streams(
    parts: Sequence[Part], streams: Sequence[AsyncIterator[bytes]], with_usage: bool
) -> AsyncIterator[bytes]:
    """The events of all streams as they come, as one stream of one answer."""
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
    usages: list[Mapping[str, Any] | None] = [None] * len(parts)
    first: dict[str, Any] | None = None
    try:
        left = len(readers)
        while left:
            index, data = await queue.get()
            if data is None:
                left -= 1
                continue
            if isinstance(data, BaseException):
                raise data
            try:
                chunk = json.loads(data)
            except ValueError as error:
                raise StreamBroken(f"an event of D is not JSON: {error}") from error
            if not isinstance(chunk, dict) or "choices" not in chunk:
                yield b"data: " + data + b"\n\n"  # An error, as D said it.
                continue
            first = first or chunk
            usages[index] = chunk.get("usage") or usages[index]
            if not chunk["choices"]:
                continue
            chunk["id"] = first.get("id")
            chunk["choices"] = [{**choice, "index": index} for choice in chunk["choices"]]
            yield _event(chunk)
        if with_usage and first is not None:
            usage = add_usage(parts, usages)
            yield _event({**first, "choices": [], "usage": usage})
        yield DONE
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
