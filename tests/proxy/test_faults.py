"""Engines that refuse, break or die, clients that leave, daemons that restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from aiohttp import web

from .engines import Call, Cluster, answer, prefill

Run = Callable[..., None]


async def never(call: Call) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def breaks(call: Call) -> web.StreamResponse:
    assert call.request.transport is not None
    call.request.transport.abort()
    return web.Response()


def says(status: int, text: str = "{}") -> Callable[[Call], web.StreamResponse]:
    async def handler(call: Call) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type="application/json")

    return handler  # type: ignore[return-value]


def test_a_p_that_cannot_be_reached_is_not_the_last(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        for _ in range(4):
            assert (await cluster.ask({"prompt": "a"}))[0] == 200
        assert len(cluster.p[0].calls) == 4

    run(story, dead_p=2)


@pytest.mark.parametrize("status", [429, 503])
def test_a_p_that_turns_it_away_is_not_the_last(run: Run, status: int) -> None:
    async def story(cluster: Cluster) -> None:
        for _ in range(4):
            assert (await cluster.ask({"prompt": "a"}))[0] == 200
        assert len(cluster.p[1].calls) == 4

    run(story, p=[says(status), prefill])


def test_no_p_at_all_is_said_at_once(run: Run) -> None:
    """404: no prefill ran, so D need not wait for writers."""

    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": "a"})
        assert (status, got["error"]["message"]) == (500, "KV load failed")
        [(reply, said)] = cluster.decode.replies
        assert reply == 404
        assert "answered 503" in said["error"]["message"]

    run(story, p=[says(503)], dead_p=1)


@pytest.mark.parametrize(
    "handler",
    [breaks, says(500), says(400), says(200, "no JSON"), says(200, "{}"), never],
    ids=["breaks", "500", "400", "no-json", "no-completion", "slow"],
)
def test_a_p_that_had_it_is_the_last(run: Run, handler: Callable[..., object]) -> None:
    """It may have begun to write: nobody else may write there at the same time."""

    async def story(cluster: Cluster) -> None:
        status, _ = await cluster.ask({"prompt": "a"})
        assert status == 500
        [(reply, said)] = cluster.decode.replies
        assert reply == 502
        assert said["error"]["message"]
        assert len(cluster.p[0].calls) + len(cluster.p[1].calls) == 1

    run(story, p=[handler, handler], prefill_timeout_s=0.5)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_prefill_that_was_aborted_has_failed(run: Run, reason: str) -> None:
    async def aborted(call: Call) -> web.StreamResponse:
        body = answer(call)
        body["choices"][0]["finish_reason"] = reason
        return web.json_response(body)

    async def story(cluster: Cluster) -> None:
        await cluster.ask({"prompt": "a"})
        assert cluster.decode.replies[0][0] == 502

    run(story, p=[aborted])


def test_a_d_that_cannot_be_reached_is_not_the_last(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        for _ in range(4):
            assert (await cluster.ask({"prompt": "a"}))[0] == 200

    run(story, dead_d=2)


def test_no_d_at_all(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        cluster.proxy._decode._nodes.pop()
        status, got = await cluster.ask({"prompt": "a"})
        assert status == 503
        assert "decode" in got["error"]["message"]
        async with cluster.session.get(cluster.url + "/v1/models") as reply:
            assert reply.status == 503
        async with cluster.session.get(cluster.url + "/health") as reply:
            assert reply.status == 503

    run(story, dead_d=1)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [True, False])
def test_what_d_says_is_passed_on(run: Run, prompt: object, stream: bool) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": prompt, "stream": stream})
        assert (status, got) == (422, {"error": "so it is"})

    run(story, d=[says(422, '{"error": "so it is"}')])


def test_a_d_that_breaks_before_its_answer(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": "a"})
        assert status == 502
        assert "broke off" in got["error"]["message"]

    run(story, d=[breaks])


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_d_that_breaks_within_a_stream(run: Run, prompt: object) -> None:
    async def story(cluster: Cluster) -> None:
        seen = asyncio.Event()

        async def breaks_off(call: Call) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(call.request)
            chunk = json.dumps(answer(call, usage=False)).encode()
            await response.write(b"data: " + chunk + b"\n\n")
            await seen.wait()
            return await breaks(call)

        cluster.d[0].handler = breaks_off
        body = {"prompt": prompt, "stream": True}
        async with cluster.session.post(cluster.url + "/v1/completions", json=body) as reply:
            text = await reply.content.readuntil(b"\n\n")
            seen.set()
            text += await reply.read()
        events = [event.removeprefix("data: ") for event in text.decode().strip().split("\n\n")]
        assert json.loads(events[0])["choices"]
        assert "broke off" in json.loads(events[-2])["error"]["message"]
        assert events[-1] == "[DONE]"

    run(story)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_both_legs(run: Run, prompt: object, stream: bool) -> None:
    async def story(cluster: Cluster) -> None:
        ask = asyncio.create_task(cluster.ask({"prompt": prompt, "stream": stream}))
        legs = len(prompt) if isinstance(prompt, list) else 1
        for _ in range(legs):
            await cluster.p[0].arrived.get()
        ask.cancel()
        for _ in range(legs):
            await cluster.p[0].cancelled.get()
            await cluster.d[0].cancelled.get()

    run(story, p=[never])


def test_a_client_that_leaves_a_stream_half_read(run: Run) -> None:
    async def endless(call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(call.request)
        while True:
            await response.write(b"data: " + json.dumps(answer(call)).encode() + b"\n\n")

    async def story(cluster: Cluster) -> None:
        body = {"prompt": "a", "stream": True}
        async with cluster.session.post(cluster.url + "/v1/completions", json=body) as reply:
            await reply.content.readany()
            reply.close()
        await cluster.d[0].cancelled.get()

    run(story, d=[endless])


def test_d_ends_while_p_still_computes(run: Run) -> None:
    """D gave up, by its own deadline: P is cancelled, and the daemon's POST gets an answer."""

    async def story(cluster: Cluster) -> None:
        posts: list[asyncio.Task[tuple[int, object]]] = []

        async def gives_up(call: Call) -> web.StreamResponse:
            posts.append(asyncio.create_task(cluster.decode.post(call)))  # type: ignore[arg-type]
            await cluster.p[0].arrived.get()
            return web.json_response({"error": {"message": "deadline"}}, status=500)

        cluster.d[0].handler = gives_up
        assert (await cluster.ask({"prompt": "a"}))[0] == 500
        await cluster.p[0].cancelled.get()
        status, _ = await posts[0]
        assert status == 502

    run(story, p=[never])


def test_p_answers_after_d(run: Run) -> None:
    """The last layer has arrived, but P's HTTP answer has not: it may come later."""

    async def story(cluster: Cluster) -> None:
        posts: list[asyncio.Task[tuple[int, object]]] = []
        go_on = asyncio.Event()

        async def slow(call: Call) -> web.StreamResponse:
            await go_on.wait()
            return await prefill(call)

        async def quick(call: Call) -> web.StreamResponse:
            posts.append(asyncio.create_task(cluster.decode.post(call)))  # type: ignore[arg-type]
            await cluster.p[0].arrived.get()
            return web.json_response(answer(call))

        cluster.p[0].handler = slow
        cluster.d[0].handler = quick
        assert (await cluster.ask({"prompt": "a"}))[0] == 200
        go_on.set()
        assert (await posts[0])[0] == 200
        await cluster.proxy.settled()

    run(story)


def test_a_daemon_that_restarts_posts_again(run: Run) -> None:
    """Its addresses are other ones: the prefill before is cancelled, and a new one runs."""

    async def story(cluster: Cluster) -> None:
        async def restarts(call: Call) -> web.StreamResponse:
            first = asyncio.create_task(cluster.decode.post(call))
            await cluster.p[0].arrived.get()
            first.cancel()
            await asyncio.wait([first])
            cluster.p[0].handler = prefill
            status, _ = await cluster.decode.post(call)
            return web.json_response(answer(call), status=status)

        cluster.d[0].handler = restarts
        assert (await cluster.ask({"prompt": "a"}))[0] == 200
        await cluster.p[0].cancelled.get()
        assert len(cluster.p[0].calls) == 2

    run(story, p=[never])


def test_a_daemon_that_hangs_up_stops_no_prefill(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        go_on = asyncio.Event()
        ended: asyncio.Queue[None] = asyncio.Queue()

        async def slow(call: Call) -> web.StreamResponse:
            await go_on.wait()
            ended.put_nowait(None)
            return await prefill(call)

        async def hangs_up(call: Call) -> web.StreamResponse:
            post = asyncio.create_task(cluster.decode.post(call))
            await cluster.p[0].arrived.get()
            post.cancel()
            await asyncio.wait([post])
            go_on.set()
            await ended.get()
            return web.json_response(answer(call))

        cluster.p[0].handler = slow
        cluster.d[0].handler = hangs_up
        assert (await cluster.ask({"prompt": "a"}))[0] == 200
        await cluster.proxy.settled()

    run(story)


def test_unknown_names_at_the_metaserver(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        for query in ("", "?request=", "?request=unknown"):
            status, _ = await cluster.ask({"request_id": "x"}, "/v1/metaserver" + query)
            assert status == 404
        status, got = await cluster.ask({"a": 1}, "/v1/metaserver")
        assert (status, got["error"]["param"]) == (400, "request_id")

    run(story)


def test_a_request_that_is_over_has_no_name(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.ask({"prompt": "a"})
        url = cluster.d[0].calls[0].params["metaserver"]
        async with cluster.session.post(url, json={"request_id": "x"}) as reply:
            assert reply.status == 404

    run(story)
