"""What clients ask, and what D and P engines are asked for it."""

from __future__ import annotations

import asyncio
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
        assert cluster.d[0].calls == []

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
