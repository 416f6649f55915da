"""The client's side of an OpenAI-compatible endpoint, against a small server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from aiohttp import web

from decoded.cluster.api import Api, ApiError, Counters

T = TypeVar("T")

CHUNKS = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "b", "token_ids": [6], "finish_reason": "length"}]},
]
PAGE = """# HELP vllm:prompt_tokens_total Prompt tokens.
vllm:prompt_tokens_total{engine="0",model_name="m"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 4.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 23.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
"""


def against(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ask: Callable[[Api], Awaitable[T]],
) -> T:
    """What `ask` makes of a server whose every POST is answered by `handler`."""

    async def play() -> T:
        app = web.Application()
        app.router.add_post("/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with Api(f"http://{host}:{port}", "m") as api:
                return await ask(api)
        finally:
            await runner.cleanup()

    return asyncio.run(play())


def sse(*lines: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True
        assert body["temperature"] == 0
        return web.Response(text="".join(f"data: {line}\n\n" for line in lines))

    return handler


def test_a_stream_is_put_together() -> None:
    lines = [*(json.dumps(chunk) for chunk in CHUNKS), "[DONE]"]
    streamed = against(sse(*lines), lambda api: api.stream([1], 2))
    assert (streamed.choice.text, streamed.choice.tokens) == ("ab", [5, 6])
    assert streamed.choice.finish == "length"
    assert len(streamed.times) == 2


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([json.dumps(CHUNKS[0])], r"without \[DONE\]"),
        ([json.dumps({"error": {"message": "KV load failed"}}), "[DONE]"], "KV load failed"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(lines: list[str], said: str) -> None:
    with pytest.raises(ApiError, match=said):
        against(sse(*lines), lambda api: api.stream([1], 2))


def test_answers_come_in_order_with_their_gaps() -> None:
    choice = {"text": "", "finish_reason": "length"}
    top = [{"x": -0.5, "y": -2.0, "z": -3.0}, {"x": -1.0}]

    async def handler(request: web.Request) -> web.StreamResponse:
        choices = [
            {**choice, "index": 1, "token_ids": [8]},
            {**choice, "index": 0, "token_ids": [7], "logprobs": {"top_logprobs": top}},
        ]
        return web.json_response({"choices": choices})

    first, second = against(handler, lambda api: api.complete([[1], [2]], 1))
    assert (first.tokens, second.tokens) == ([7], [8])
    assert first.gaps == [1.5, 0.0]


def test_a_refusal_is_an_error_with_its_status() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="no P engine")

    with pytest.raises(ApiError, match="503: no P engine") as caught:
        against(handler, lambda api: api.complete([1], 1))
    assert caught.value.status == 503


def test_nobody_there_is_an_error_without_a_status() -> None:
    async def play() -> None:
        async with Api("http://127.0.0.1:9", "m") as api:
            await api.get("/health")

    with pytest.raises(ApiError, match="no answer") as caught:
        asyncio.run(play())
    assert caught.value.status == 0


def test_counters_are_summed_over_what_fits() -> None:
    counters = Counters(PAGE)
    assert (counters.computed, counters.received) == (7, 23)
    assert counters.prompt_tokens == 30
    with pytest.raises(KeyError, match="num_preemptions"):
        _ = counters.preemptions
