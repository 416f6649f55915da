"""What clients ask, and what D and P engines are asked for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from .engines import Call, Cluster, answer, prefill

Run = Callable[..., None]


def test_a_request_goes_to_d_and_its_prompt_to_p(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        body = {
            "model": "model",
            "prompt": "hello",
            "max_tokens": 5,
            "min_tokens": 5,
            "stream_options": None,
            "temperature": 0,
        }
        status, got = await cluster.ask(body)
        assert status == 200
        [d], [p] = cluster.d[0].calls, cluster.p[0].calls
        assert got == answer(d, "hello")
        assert d.body == {**body, "kv_transfer_params": d.params}
        assert d.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": f"{cluster.url}/v1/metaserver?request={d.token}",
        }
        assert p.token == d.token
        assert p.body == {
            "model": "model",
            "prompt": "hello",
            "temperature": 0,
            "max_tokens": 1,
            "n": 1,
            "stream": False,
            "kv_transfer_params": {
                "request_id": f"cmpl-{d.token}-0",
                "do_remote_decode": True,
            },
        }
        assert cluster.decode.replies == [(200, {"status": "ok"})]

    run(story)


def test_chat(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{"a": 1}]}
        status, _ = await cluster.ask({**body, "max_completion_tokens": 9}, "/v1/chat/completions")
        assert status == 200
        [p] = cluster.p[0].calls
        assert p.api == "/v1/chat/completions"
        assert p.body["max_completion_tokens"] == 1
        assert {key: p.body[key] for key in body} == body

    run(story)


def test_chat_with_n_in_a_stream(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 7}
        events = await cluster.stream(body, "/v1/chat/completions")
        assert events.pop() == "[DONE]"
        assert sorted(event["choices"][0]["index"] for event in events) == [0, 0, 0, 1, 1, 1]
        for engine in (cluster.d[0], cluster.p[0]):
            assert {call.api for call in engine.calls} == {"/v1/chat/completions"}
            assert sorted(call.body["seed"] for call in engine.calls) == [7, 8]
            assert [call.body["n"] for call in engine.calls] == [1, 1]
            assert [call.body["messages"] for call in engine.calls] == [body["messages"]] * 2

    run(story)


def test_what_is_about_answers_is_for_d_alone(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        asked = {"logprobs": 2, "logprob_token_ids": [1], "echo": True, "stop": ["x"]}
        assert (await cluster.ask({"prompt": "a", **asked}))[0] == 200
        [d], [p] = cluster.d[0].calls, cluster.p[0].calls
        assert {key: d.body.get(key) for key in asked} == asked
        assert {key: p.body[key] for key in asked if key in p.body} == {"stop": ["x"]}

    run(story)


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"stream": True}, {"stream": True, "n": 2}])
def test_every_answer_says_where_its_time_went(run: Run, body: dict[str, Any]) -> None:
    async def story(cluster: Cluster) -> None:
        url = cluster.url + "/v1/completions"
        async with cluster.session.post(url, json={"prompt": "a", **body}) as reply:
            assert reply.status == 200
            await reply.read()
            parts = [part.split(";dur=") for part in reply.headers["Server-Timing"].split(", ")]
        names = ["decode_sent", "metaserver", "prefill_sent", "prefill_answered", "first_byte"]
        assert [name for name, _ in parts] == names
        times = [float(at) for _, at in parts]
        assert times == sorted(times)
        assert times[0] > 0

    run(story)


def test_engines_hear_who_asks(run: Run) -> None:
    """They may want an API key, each of them."""

    async def story(cluster: Cluster) -> None:
        headers = {"Authorization": "Bearer key", "traceparent": "00-1-2-01", "Cookie": "a=b"}
        await cluster.ask({"prompt": "a"}, headers=headers)
        for engine in (cluster.d[0], cluster.p[0]):
            [call] = engine.calls
            got = {key: call.request.headers.get(key) for key in headers}
            assert got == {**headers, "Cookie": None}

    run(story)


def test_a_client_s_own_id_stays_here(run: Run) -> None:
    """Engines would not tell apart two requests for which clients have chosen the same id."""

    async def story(cluster: Cluster) -> None:
        for _ in range(2):
            await cluster.ask({"prompt": "a"}, headers={"X-Request-Id": "same"})
        first, second = cluster.d[0].calls
        assert "same" not in (first.token, second.token)
        assert first.token != second.token
        assert min(len(first.token), len(second.token)) == 32

    run(story)


def test_streams_pass_through(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        events = await cluster.stream(
            {"prompt": "hello", "stream_options": {"include_usage": True}}
        )
        assert [event["choices"][0]["text"] for event in events[:3]] == [
            "hello/0 ",
            "hello/1 ",
            "hello/2 ",
        ]
        assert events[3]["usage"]["completion_tokens"] == 2
        assert events[4:] == ["[DONE]"]

    run(story)


@pytest.mark.parametrize(
    ("prompt", "n", "texts"),
    [
        (["a", "b", "c"], None, ["a", "b", "c"]),
        ([[1, 2], [3]], 2, ["[1, 2]", "[1, 2]", "[3]", "[3]"]),
        ("a", 3, ["a", "a", "a"]),
        ([1, 2, 3], 1, ["[1, 2, 3]"]),
        (["a"], None, ["a"]),
    ],
)
def test_lists_and_n_are_split_and_merged(
    run: Run, prompt: Any, n: int | None, texts: list[str]
) -> None:
    async def story(cluster: Cluster) -> None:
        body: dict[str, Any] = {"prompt": prompt, "seed": 5}
        if n is not None:
            body["n"] = n
        status, got = await cluster.ask(body)
        assert status == 200
        assert [(one["index"], one["text"]) for one in got["choices"]] == list(enumerate(texts))
        calls = cluster.d[0].calls
        assert len({call.token for call in calls}) == len(texts)
        assert all(call.body.get("n", 1) == 1 for call in calls)
        assert sorted(call.body["seed"] - 5 for call in calls) == sorted(
            number for _ in range(len(texts) // (n or 1)) for number in range(n or 1)
        )
        assert got["usage"]["completion_tokens"] == 2 * len(texts)
        prompts = (
            prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        )
        tokens = sum(len(one) if isinstance(one, list) else 7 for one in prompts)
        assert got["usage"]["prompt_tokens"] == tokens
        assert len(cluster.p[0].calls) == len(texts)
        # Each prefill is of its own leg's prompt.
        assert {c.token: c.body["prompt"] for c in cluster.p[0].calls} == {
            c.token: c.body["prompt"] for c in calls
        }

    run(story)


@pytest.mark.parametrize("with_usage", [True, False])
def test_merged_streams(run: Run, with_usage: bool) -> None:
    async def story(cluster: Cluster) -> None:
        body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2}
        if with_usage:
            body["stream_options"] = {"include_usage": True}
        events = await cluster.stream(body)
        assert events.pop() == "[DONE]"
        if with_usage:
            usage = events.pop()
            assert usage["choices"] == []
            assert usage["usage"]["prompt_tokens"] == 14
            assert usage["usage"]["completion_tokens"] == 8
        texts = dict.fromkeys(range(4), "")
        for event in events:
            [choice] = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == {
            0: "a/0 a/1 a/2 ",
            1: "a/0 a/1 a/2 ",
            2: "b/0 b/1 b/2 ",
            3: "b/0 b/1 b/2 ",
        }
        assert len({event["id"] for event in events}) == 1

    run(story)


def test_usage_that_d_tells_unasked(run: Run) -> None:
    """D engines can be started so that they always tell it."""

    async def story(cluster: Cluster) -> None:
        cluster.decode.always_usage = True
        events = await cluster.stream({"prompt": ["a", "b"]})
        assert events[-2]["usage"]["total_tokens"] == 18

    run(story)


def test_virtual_requests_need_no_p(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        status, _ = await cluster.ask({"prompt": ["a", "b"]})
        assert status == 200
        for call in cluster.d[0].calls:
            assert call.params == {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "do_virtual": True,
            }
        assert cluster.p[0].calls == []

    run(story, virtual=True)


def test_a_client_may_ask_for_a_virtual_request(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        params = {"do_remote_prefill": True, "do_virtual": True}
        status, _ = await cluster.ask({"prompt": "a", "kv_transfer_params": params})
        assert status == 200
        # Whatever else a client says of transfers is the proxy's to say.
        foreign = {"metaserver": "http://192.0.2.1/", "do_remote_prefill": False}
        status, _ = await cluster.ask({"prompt": "a", "kv_transfer_params": foreign})
        assert status == 200
        first, second = cluster.d[0].calls
        assert first.params["do_virtual"]
        assert second.params["metaserver"].startswith(cluster.url)
        assert len(cluster.p[0].calls) == 1

    run(story)


def test_a_d_that_needs_no_prefill(run: Run) -> None:
    """All but the last token were in its prefix cache: its daemon posts nothing."""

    async def knows_it(call: Call) -> web.StreamResponse:
        return web.json_response(answer(call))

    async def story(cluster: Cluster) -> None:
        assert (await cluster.ask({"prompt": "a"}))[0] == 200
        assert cluster.p[0].calls == []

    run(story, d=[knows_it])


def test_equals_take_turns(run: Run) -> None:
    async def virtual(call: Call) -> web.StreamResponse:
        return web.json_response(answer(call))

    async def story(cluster: Cluster) -> None:
        for _ in range(6):
            assert (await cluster.ask({"prompt": "a"}))[0] == 200
        assert [len(engine.calls) for engine in cluster.d] == [2, 2, 2]

    run(story, virtual=True, d=[virtual] * 3)


def test_load_is_spread(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        release = asyncio.Event()

        async def slow(call: Call) -> web.StreamResponse:
            await release.wait()
            return await prefill(call)

        for engine in cluster.p:
            engine.handler = slow
        asks = []
        for prompt in ("x" * 4000, "y" * 400, "z" * 400, "w" * 400):
            asks.append(asyncio.create_task(cluster.ask({"prompt": prompt})))
            arrivals = [asyncio.create_task(engine.arrived.get()) for engine in cluster.p]
            await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
            for arrival in arrivals:
                arrival.cancel()
        # The long prompt has one P for itself.
        assert sorted(len(engine.calls) for engine in cluster.p) == [1, 3]
        assert sorted(len(engine.calls) for engine in cluster.d) == [1, 3]
        release.set()
        assert [status for status, _ in await asyncio.gather(*asks)] == [200] * 4

    async def decode(call: Call) -> web.StreamResponse:
        raise AssertionError("set below")

    async def with_daemons(cluster: Cluster) -> None:
        for engine in cluster.d:
            engine.handler = cluster.decode
        await story(cluster)

    run(with_daemons, p=[prefill, prefill], d=[decode, decode])


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], None),
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", []]}, "prompt[1]"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": "2"}, "n"),
        ({"prompt": ["a"] * 600, "n": 2}, "n"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"prompt": "a", "n": ["x" * 100_000]}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 2, "seed": 2**63 - 1}, "seed"),
        ({"prompt": "a", "n": 2, "seed": -(2**63) - 1}, "seed"),
        ({"prompt": "a", "n": 2, "seed": int("9" * 4300)}, "seed"),
        ({"prompt": "a", "truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"prompt": "a", "kv_transfer_params": 5}, "kv_transfer_params"),
        (
            {"prompt": "a", "kv_transfer_params": {"do_virtual": "yes"}},
            "kv_transfer_params.do_virtual",
        ),
    ],
)
def test_bad_bodies(run: Run, body: Any, field: str | None) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask(body)
        assert status == 400
        assert got["error"]["param"] == field
        assert got["error"]["message"].startswith(field or "the body")
        assert len(got["error"]["message"]) < 500
        assert cluster.d[0].calls == []

    run(story)


def test_a_virtual_prompt_may_be_cut_to_fit(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        body = {"prompt": "a", "truncate_prompt_tokens": -1}
        assert (await cluster.ask(body))[0] == 200

    run(story, virtual=True)


@pytest.mark.parametrize("depth", [10, 900, 940, 960, 970, 980, 985, 990, 2000])
def test_bodies_that_are_deeply_nested(run: Run, depth: int) -> None:
    """Too deep for a JSON parser: no fault of the proxy's own."""

    async def story(cluster: Cluster) -> None:
        content = '{"prompt": "a", "x": ' + "[" * depth + "]" * depth + "}"
        async with cluster.session.post(cluster.url + "/v1/completions", data=content) as reply:
            assert reply.status in ((200,) if depth == 10 else (200, 400))
            assert reply.status == 200 or "the body" in (await reply.json())["error"]["message"]

    async def quick(call: Call) -> web.StreamResponse:
        return web.json_response(answer(call))

    run(story, d=[quick])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/metaserver"])
def test_a_body_that_is_not_what_its_header_says(run: Run, path: str) -> None:
    async def story(cluster: Cluster) -> None:
        async with cluster.session.post(
            cluster.url + path, data=b"{}", headers={"Content-Encoding": "gzip"}
        ) as reply:
            assert reply.status == 400

    run(story)


@pytest.mark.parametrize("messages", [None, [], "hi", {}])
def test_bad_chats(run: Run, messages: Any) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"messages": messages}, "/v1/chat/completions")
        assert (status, got["error"]["param"]) == (400, "messages")

    run(story)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/metaserver"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\x00", b"[" * 100_000, b"null", b"5"])
def test_garbage(run: Run, path: str, content: bytes) -> None:
    async def story(cluster: Cluster) -> None:
        async with cluster.session.post(cluster.url + path, data=content) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["message"]

    run(story)


def test_bodies_that_are_too_large(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        status, got = await cluster.ask({"prompt": "x" * 5000})
        assert status == 413
        assert "4096" in got["error"]["message"]

    run(story, max_body_bytes=4096)


def test_requests_whose_parts_are_too_large_together(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        big = {"prompt": "x" * 3000}
        assert (await cluster.ask({**big, "n": 5}))[0] == 200
        status, got = await cluster.ask({**big, "n": 6})
        assert (status, "16384" in got["error"]["message"]) == (413, True)
        # What every part repeats counts for every part; prompts do not.
        status, _ = await cluster.ask({"prompt": ["a"] * 50, "user": "x" * 3000})
        assert status == 413
        status, _ = await cluster.ask({"prompt": ["x" * 60] * 50})
        assert status == 200

    run(story, max_body_bytes=4096)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False])
def test_large_answers(run: Run, n: int, stream: bool) -> None:
    async def story(cluster: Cluster) -> None:
        prompt = "x" * 3_000_000
        body = {"prompt": prompt, "n": n}
        if stream:
            events = await cluster.stream(body)
            texts = [event["choices"][0]["text"] for event in events[:-1]]
            assert [text[:-3] for text in texts] == [prompt] * 3 * n
        else:
            status, got = await cluster.ask(body)
            assert status == 200
            assert [choice["text"] for choice in got["choices"]] == [prompt] * n

    run(story)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_a_client_that_reads_slowly_makes_d_wait(run: Run, prompt: Any) -> None:
    """Nothing but buffers of a fixed size lies between them."""
    chunks, size = 64, 1 << 20

    async def story(cluster: Cluster) -> None:
        stuck = asyncio.Event()

        async def much(call: Call) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(call.request)
            chunk = json.dumps(answer(call, "~" * size, usage=False)).encode()
            for _ in range(chunks):
                writing = asyncio.ensure_future(response.write(b"data: " + chunk + b"\n\n"))
                done, _ = await asyncio.wait([writing], timeout=1.0)
                if not done:
                    stuck.set()
                await writing
            return response

        cluster.d[0].handler = much
        url = cluster.url + "/v1/completions"
        body = {"prompt": prompt, "stream": True}
        async with cluster.session.post(url, json=body) as reply:
            await stuck.wait()
            got = 0
            async for piece in reply.content.iter_any():
                got += piece.count(b"~")
        texts = chunks * (len(prompt) if isinstance(prompt, list) else 1)
        assert got == texts * size

    run(story)


def test_other_paths_and_methods(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        async with cluster.session.get(cluster.url + "/v1/nothing") as reply:
            assert reply.status == 404
            assert "/v1/nothing" in (await reply.json())["error"]["message"]
        async with cluster.session.get(cluster.url + "/v1/completions") as reply:
            assert reply.status == 405

    run(story)


def test_models_and_health(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        async with cluster.session.get(cluster.url + "/v1/models") as reply:
            assert (await reply.json())["data"] == [{"id": "model"}]
        async with cluster.session.get(cluster.url + "/health") as reply:
            assert reply.status == 200
            body = await reply.json()
        assert [node["state"] for node in body["decode"]][1] == "ok"
        assert body["decode"][0]["state"].startswith("unreachable")

    run(story, dead_d=1)


def test_five_hundred_at_once(run: Run) -> None:
    async def story(cluster: Cluster) -> None:
        asks = (cluster.ask({"prompt": f"prompt {n}"}) for n in range(500))
        answers = await asyncio.gather(*asks)
        assert [status for status, _ in answers] == [200] * 500
        assert [got["choices"][0]["text"] for _, got in answers] == [
            f"prompt {n}" for n in range(500)
        ]

    run(story)
