"""Answers of several engines as one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from decoded.proxy.body import Part
from decoded.proxy.errors import DecodeBroken
from decoded.proxy.merge import MAX_EVENT_BYTES, add_usage, events, merge_answers


async def pieces(*texts: bytes) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


def parts(*prompts: int) -> list[Part]:
    return [Part({}, prompt, 1) for prompt in prompts]


def read(*texts: bytes) -> list[bytes]:
    async def collect() -> list[bytes]:
        return [event async for event in events(pieces(*texts))]

    return asyncio.run(collect())


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_in_any_pieces(end: bytes) -> None:
    """Where a network cuts a stream is of no meaning."""
    lines = [b": a comment", b"", b"data: one", b"", b"event: e", b"data:two", b"data: 2", b"", b""]
    text = end.join(lines)
    for size in range(1, len(text) + 1):
        cut = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(*cut) == [b"one", b"two\n2"]


def test_streams_that_are_none() -> None:
    with pytest.raises(DecodeBroken, match="ended within an event"):
        read(b"data: one\n")
    with pytest.raises(DecodeBroken, match="more than"):
        read(*[b"x" * (1 << 20)] * (MAX_EVENT_BYTES // (1 << 20) + 1))


def usage(prompt: int, completion: int, **details: Any) -> dict[str, Any]:
    total = prompt + completion
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": total,
        **details,
    }


def test_a_prompt_is_counted_once_and_every_answer() -> None:
    merged = add_usage(parts(0, 0, 1), [usage(10, 1), usage(10, 2), usage(5, 4)])
    assert merged == usage(15, 7)


def test_details_of_usage() -> None:
    cached: list[dict[str, Any] | None] = [{"cached_tokens": 8}, {"cached_tokens": 9}, None]
    told = [usage(10, 1, prompt_tokens_details=details) for details in cached]
    for one in told:
        one["completion_tokens_details"] = {"reasoning_tokens": 3}
    assert add_usage(parts(0, 0, 1), told) == usage(
        20,
        3,
        prompt_tokens_details={"cached_tokens": 8},
        completion_tokens_details={"reasoning_tokens": 9},
    )


def test_usage_that_nobody_tells() -> None:
    assert add_usage(parts(0, 1), [None, None]) is None
    assert add_usage(parts(0, 1), [None, usage(5, 4)]) == usage(5, 4)


def test_answers_that_are_too_large_together() -> None:
    body = json.dumps({"choices": [{"text": "x" * 100}]}).encode()

    async def merge(limit: int) -> dict[str, Any]:
        return await merge_answers(parts(0, 1), [pieces(body), pieces(body)], limit)

    merged = asyncio.run(merge(2 * len(body)))
    assert [choice["index"] for choice in merged["choices"]] == [0, 1]
    with pytest.raises(DecodeBroken, match=f"more than {2 * len(body) - 1} bytes"):
        asyncio.run(merge(2 * len(body) - 1))
