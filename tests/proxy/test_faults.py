"""Engines that refuse, break or die, clients that leave, daemons that restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from .engines import WAIT_S, Call, Cluster, answer, prefill

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


@pytest.mark.parametrize("status", [404, 429, 503])
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


def finishes(*reasons: object) -> Callable[[Call], object]:
    """A P engine that answers 200 with choices that ended so."""

    async def handler(call: Call) -> web.StreamResponse:
        [choice] = answer(call)["choices"]
        choices = [{**choice, "finish_reason": reason} for reason in reasons]
        return web.json_response({**answer(call), "choices": choices})

    return handler


async def redirects(call: Call) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect(call.request.path)


async def too_much(call: Call) -> web.StreamResponse:
    return web.json_response(answer(call, "x" * (5 << 20)))


@pytest.mark.parametrize(
    "handler",
    [
        pytest.param(breaks, id="breaks"),
        pytest.param(says(500), id="500"),
        pytest.param(says(400), id="400"),
        pytest.param(says(200, "no JSON"), id="no-json"),
        pytest.param(says(200, "[]"), id="no-object"),
        pytest.param(says(200, '{"choices": [5]}'), id="no-choice"),
        pytest.param(finishes(), id="no-choices"),
        pytest.param(finishes(None), id="unfinished"),
        pytest.param(finishes(["length"]), id="strange"),
        pytest.param(finishes(5), id="a-number"),
        pytest.param(finishes("abort"), id="aborted"),
        pytest.param(finishes("error"), id="failed"),
        pytest.param(redirects, id="redirects"),
        pytest.param(too_much, id="too-much"),
        pytest.param(never, id="slow"),
    ],
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


@pytest.mark.parametrize("status", [204, 302, 600])
def test_a_status_that_no_engine_answers_with_is_not_passed_on(run: Run, status: int) -> None:
    async def story(cluster: Cluster) -> None:
        got, said = await cluster.ask({"prompt": "a"})
        assert got == 502
        assert f"status {status}" in said["error"]["message"]

    run(story, d=[says(status, "")])


@pytest.mark.parametrize("stream", [True, False])
def test_one_part_that_fails_is_the_answer_for_all(run: Run, stream: bool) -> None:
    """At once: it does not wait for the other parts, and ends them."""

    async def fails(call: Call) -> web.StreamResponse:
        if call.body["prompt"] == "bad":
            return web.json_response({"error": "so it is"}, status=400)
        return await never(call)

    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": ["good", "bad"], "stream": stream})
        assert (status, got) == (400, {"error": "so it is"})
        assert (await cluster.d[0].cancelled.get()).body["prompt"] == "good"

    run(story, d=[fails])


def test_what_d_says_of_trying_again_is_passed_on(run: Run) -> None:
    async def busy(call: Call) -> web.StreamResponse:
        return web.Response(status=503, text="busy", headers={"Retry-After": "7"})

    async def story(cluster: Cluster) -> None:
        url = cluster.url + "/v1/completions"
        async with cluster.session.post(url, json={"prompt": "a"}) as reply:
            assert (reply.status, await reply.text()) == (503, "busy")
            assert reply.headers["Retry-After"] == "7"
        assert len(cluster.d[0].calls) == 1

    run(story, d=[busy])


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}])
@pytest.mark.parametrize("with_status", [True, False])
def test_a_d_that_breaks_before_its_answer(
    run: Run, body: dict[str, object], with_status: bool
) -> None:
    """A status of D is no answer yet. What P still computes for it is cancelled."""

    async def story(cluster: Cluster) -> None:
        posts: list[asyncio.Task[tuple[int, object]]] = []

        async def breaks_off(call: Call) -> web.StreamResponse:
            posts.append(asyncio.create_task(cluster.decode.post(call)))  # type: ignore[arg-type]
            await cluster.p[0].arrived.get()
            if with_status:
                response = web.StreamResponse()
                await response.prepare(call.request)
            return await breaks(call)

        cluster.d[0].handler = breaks_off
        status, got = await cluster.ask({"prompt": "a", **body})
        assert status == 502
        assert "broke off" in got["error"]["message"]
        for post in posts:
            await cluster.p[0].cancelled.get()
            assert (await post)[0] in (404, 502)

    run(story, p=[never])


@pytest.mark.parametrize(
    "said", ["no JSON", "[]", "{}", '{"choices": 5}', '{"choices": []}', '{"choices": [5]}']
)
def test_answers_of_d_that_cannot_be_merged(run: Run, said: str) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": ["a", "b"]})
        assert (status, got["error"]["code"]) == (502, 502)
        assert "D answered" in got["error"]["message"]

    run(story, d=[says(200, said)])


def test_a_d_that_breaks_within_a_large_answer(run: Run) -> None:
    """Half an answer must not look like a whole one."""

    async def half(call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(call.request)
        await response.write(b"x" * (3 << 20))
        assert call.request.transport is not None
        call.request.transport.close()
        return response

    async def story(cluster: Cluster) -> None:
        url = cluster.url + "/v1/completions"
        async with cluster.session.post(url, json={"prompt": "a"}) as reply:
            assert reply.status == 200
            with pytest.raises(aiohttp.ClientError):
                await reply.read()

    run(story, d=[half])


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

    run(story, virtual=True, d=[endless])


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


def test_p_that_answers_long_after_d_is_cancelled(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        posts: list[asyncio.Task[tuple[int, dict[str, Any]]]] = []

        async def quick(call: Call) -> web.StreamResponse:
            posts.append(asyncio.create_task(cluster.decode.post(call)))
            await cluster.p[0].arrived.get()
            return web.json_response(answer(call))

        cluster.d[0].handler = quick
        assert (await cluster.ask({"prompt": "a"}))[0] == 200
        await cluster.p[0].cancelled.get()
        status, said = await posts[0]
        assert status == 502
        assert "D answered" in said["error"]["message"]
        await cluster.proxy.settled()

    run(story, p=[never], late_prefill_s=0.1)


def test_who_posts_when_d_answers_already_is_not_believed(run: Run) -> None:
    """D's answer names the token. A client that reads it there must not have P write anywhere."""

    async def story(cluster: Cluster) -> None:
        seen = asyncio.Event()

        async def answers(call: Call) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(call.request)
            await response.write(b"data: " + json.dumps(answer(call)).encode() + b"\n\n")
            await seen.wait()
            return response

        cluster.d[0].handler = answers
        url = cluster.url + "/v1/completions"
        async with cluster.session.post(url, json={"prompt": "a", "stream": True}) as reply:
            event = await reply.content.readuntil(b"\n\n")
            token = json.loads(event.removeprefix(b"data: "))["id"].removeprefix("cmpl-")
            status, got = await cluster.ask({"request_id": "x"}, f"/v1/metaserver?request={token}")
            assert (status, "answers already" in got["error"]["message"]) == (404, True)
            seen.set()
            await reply.read()
        assert cluster.p[0].calls == []

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


def test_posts_for_the_same_name_take_turns(run: Run) -> None:
    """However many come at once: never do two prefills of it run, and the last one counts."""
    posts = 8

    async def story(cluster: Cluster) -> None:
        [node] = cluster.proxy._prefill
        running: set[int] = set()
        go_on = asyncio.Event()

        async def slow(call: Call) -> web.StreamResponse:
            running.add(node.legs)
            await go_on.wait()
            return await prefill(call)

        async def posts_often(call: Call) -> web.StreamResponse:
            calls = [asyncio.create_task(cluster.decode.post(call)) for _ in range(posts)]
            statuses = []
            for done in asyncio.as_completed(calls):
                statuses.append((await done)[0])
                if len(statuses) == posts - 1:
                    await cluster.p[0].arrived.get()
                    go_on.set()
            return web.json_response(statuses)

        cluster.p[0].handler = slow
        cluster.d[0].handler = posts_often
        _, statuses = await cluster.ask({"prompt": "a"})
        assert statuses == [502] * (posts - 1) + [200]
        assert max(running) == 1

    run(story)


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


def test_a_virtual_request_has_no_name_for_the_metaserver(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        async def tries(call: Call) -> web.StreamResponse:
            url = f"/v1/metaserver?request={call.token}"
            status, _ = await cluster.ask({"request_id": "x"}, url)
            return web.json_response({"status": status})

        cluster.d[0].handler = tries
        params = {"do_remote_prefill": True, "do_virtual": True}
        _, got = await cluster.ask({"prompt": "a", "kv_transfer_params": params})
        assert got == {"status": 404}
        assert cluster.p[0].calls == []

    run(story)


def test_no_new_requests_at_the_end_but_those_in_flight_may_end(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        go_on = asyncio.Event()

        async def slow(call: Call) -> web.StreamResponse:
            await go_on.wait()
            return await cluster.decode(call)

        cluster.d[0].handler = slow
        ask = asyncio.create_task(cluster.ask({"prompt": "a"}))
        await cluster.d[0].arrived.get()
        draining = asyncio.create_task(cluster.proxy.drain(WAIT_S))
        async with cluster.session.get(cluster.url + "/health") as reply:
            assert (reply.status, (await reply.json())["status"]) == (503, "shutting down")
        status, got = await cluster.ask({"prompt": "b"})
        assert (status, got["error"]["message"]) == (503, "the proxy is shutting down")
        go_on.set()
        # Its daemon has asked for the prefill only now.
        assert (await ask)[0] == 200
        assert await draining
        assert len(cluster.p[0].calls) == 1

    run(story)


def test_the_end_does_not_wait_for_ever(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        ask = asyncio.create_task(cluster.ask({"prompt": "a"}))
        await cluster.d[0].arrived.get()
        assert not await cluster.proxy.drain(0.05)
        ask.cancel()
        await cluster.d[0].cancelled.get()
        assert await cluster.proxy.drain(WAIT_S)

    run(story, d=[never])


def test_a_request_that_is_over_has_no_name(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        await cluster.ask({"prompt": "a"})
        url = cluster.d[0].calls[0].params["metaserver"]
        async with cluster.session.post(url, json={"request_id": "x"}) as reply:
            assert reply.status == 404

    run(story)
