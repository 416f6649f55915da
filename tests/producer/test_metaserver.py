"""The metaserver over real HTTP: when it answers, and what."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from decoded.producer.metaserver import Metaserver, Prefill, PrefillFailed, UnknownRequest
from decoded.producer.params import RemoteParams

HOST = "127.0.0.1"
BODY: dict[str, Any] = {
    "token_ids": [],
    "request_id": "cmpl-1",
    "do_remote_prefill": False,
    "do_remote_decode": True,
    "remote_block_ids": [[3, 4]],
    "remote_block_size": [16],
    "remote_engine_id": "engine-d",
    "remote_host": "fd00::7",
    "remote_port": 36000,
    "remote_tp_size": 1,
    "remote_pcp_size": 1,
    "remote_dcp_size": 1,
    "remote_cached_tokens": 16,
}


async def _nothing(params: RemoteParams) -> None:
    pass


def _post(prefill: Prefill, body: object, raw: bytes | None = None) -> tuple[int, dict[str, Any]]:
    async def run() -> tuple[int, dict[str, Any]]:
        async with Metaserver(prefill, HOST) as server, aiohttp.ClientSession() as http:
            data = json.dumps(body).encode() if raw is None else raw
            async with http.post(server.url, data=data) as response:
                return response.status, await response.json()

    return asyncio.run(run())


def test_the_handler_gets_the_parameters() -> None:
    seen: list[RemoteParams] = []

    async def prefill(params: RemoteParams) -> None:
        seen.append(params)

    assert _post(prefill, BODY | {"of_another_version": {"a": 1}}) == (200, {"status": "ok"})
    [params] = seen
    assert params.remote_block_ids == [[3, 4]]
    assert (params.remote_host, params.remote_port) == ("fd00::7", 36000)
    assert (params.request_id, params.remote_cached_tokens) == ("cmpl-1", 16)


def test_it_answers_only_when_the_prefill_has_ended() -> None:
    async def run() -> None:
        began, end = asyncio.Event(), asyncio.Event()

        async def prefill(params: RemoteParams) -> None:
            began.set()
            await end.wait()

        async with Metaserver(prefill, HOST) as server, aiohttp.ClientSession() as http:
            answer = asyncio.ensure_future(http.post(server.url, json=BODY))
            await began.wait()
            assert not answer.done()
            end.set()
            async with await answer as response:
                assert response.status == 200

    asyncio.run(run())


def test_a_d_node_that_hangs_up_does_not_stop_its_prefill() -> None:
    async def run() -> None:
        began, end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def prefill(params: RemoteParams) -> None:
            began.set()
            await end.wait()
            ended.set()

        async with Metaserver(prefill, HOST) as server:
            async with aiohttp.ClientSession() as http:
                answer = asyncio.ensure_future(http.post(server.url, json=BODY))
                await began.wait()
                answer.cancel()
            end.set()
            await asyncio.wait_for(ended.wait(), 30)

    asyncio.run(run())


def _raising(error: Exception) -> Callable[[RemoteParams], Awaitable[None]]:
    async def prefill(params: RemoteParams) -> None:
        raise error

    return prefill


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (UnknownRequest(), 404, "no prompt is known for cmpl-1"),
        (UnknownRequest("it is over"), 404, "it is over"),
        (PrefillFailed(), 502, "the prefill of cmpl-1 failed"),
        (PrefillFailed("out of memory"), 502, "out of memory"),
        (KeyError("x"), 502, "the prefill of cmpl-1 failed: KeyError('x')"),
    ],
)
def test_how_a_prefill_can_end(error: Exception, status: int, text: str) -> None:
    assert _post(_raising(error), BODY) == (status, {"error": text})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"remote_cached_tokens": None}, "got `null` - at `$.remote_cached_tokens`"),
        ({"remote_block_ids": [["3"]]}, "$.remote_block_ids[0][0]"),
        ({"remote_block_ids": [[-1]]}, ">= 0"),
        ({"remote_block_ids": [[1], [2]]}, "2 KV groups, remote_block_size has 1"),
        ({"remote_block_size": [0]}, ">= 1"),
        ({"remote_port": 0}, "$.remote_port"),
        ({"remote_port": "36000"}, "$.remote_port"),
        ({"remote_host": ""}, "$.remote_host"),
        ({"remote_tp_size": 0}, "$.remote_tp_size"),
        ({"request_id": ""}, "$.request_id"),
        ({"do_virtual": True}, "a virtual request has no prefill"),
        ({"do_remote_decode": False}, "do_remote_decode true"),
        ({"do_remote_prefill": True}, "do_remote_prefill false"),
    ],
)
def test_bodies_that_are_unusable(change: dict[str, Any], text: str) -> None:
    status, answer = _post(_nothing, BODY | change)
    assert status == 400
    assert text in answer["error"]


@pytest.mark.parametrize("key", [key for key in BODY if key.startswith("remote_")])
def test_missing_keys_are_named(key: str) -> None:
    status, answer = _post(_nothing, {k: v for k, v in BODY.items() if k != key})
    if key in ("remote_pcp_size", "remote_dcp_size"):
        assert status == 200
    else:
        assert (status, f"`{key}`" in answer["error"]) == (400, True)


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"null"])
def test_bodies_that_are_no_object(raw: bytes) -> None:
    status, answer = _post(_nothing, None, raw)
    assert status == 400
    assert answer["error"]


def test_a_taken_port_is_an_error() -> None:
    async def run() -> None:
        async with Metaserver(_nothing, HOST) as server:
            port = int(server.url.split(":")[2].split("/")[0])
            with pytest.raises(OSError, match="in use"):
                await Metaserver(_nothing, HOST, port).start()

    asyncio.run(run())


def test_ipv6_urls_have_brackets() -> None:
    assert Metaserver(_nothing, "fd00::7", 9000).url == "http://[fd00::7]:9000/v1/metaserver"
