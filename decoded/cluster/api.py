"""An OpenAI-compatible endpoint, from the client's side: completions, chat, counters."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_TIMEOUT = aiohttp.ClientTimeout(total=300, connect=5)
_LOOK_TIMEOUT = aiohttp.ClientTimeout(total=5)
_ERROR_CHARS = 500


class ApiError(Exception):
    """The endpoint answered with an error: `status` (0: no answer at all) and what it said."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status or 'no answer'}: {text[:_ERROR_CHARS]}")
        self.status = status


@dataclass
class Choice:
    """One answer: its text, its tokens, and for each the log probabilities of the likeliest.

    `gaps[i]`: how much likelier the likeliest token was than the next one, in log
    probability; empty where log probabilities were not asked for.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    finish: str = ""


@dataclass
class Streamed:
    """A streamed answer, and when each of its chunks came, in seconds since the request."""

    choice: Choice
    times: list[float]


class Api:
    """The endpoint at `url`, for one model. Use it in an `async with`."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Api:
        # As many connections as requests: the client is not what holds them up.
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, prompt: Any, max_tokens: int, **more: Any) -> list[Choice]:
        """/v1/completions, greedy unless `more` says otherwise; its choices by index.

        `prompt`: text, token ids, or a list of either. Raises ApiError.
        """
        answer = await self.post("/v1/completions", self.body(prompt, max_tokens, **more))
        return [_choice(one) for one in _by_index(answer)]

    async def stream(
        self, prompt: Any, max_tokens: int, request_id: str = "", **more: Any
    ) -> Streamed:
        """The same, streamed. Raises ApiError, also if the stream breaks off."""
        whole, times, started = Choice(), [], time.monotonic()
        async for chunk in self.chunks(prompt, max_tokens, request_id, **more):
            times.append(time.monotonic() - started)
            for one in chunk["choices"]:
                piece = _choice(one)
                whole.text += piece.text
                whole.tokens += piece.tokens
                whole.finish = piece.finish or whole.finish
        return Streamed(whole, times)

    async def chunks(
        self, prompt: Any, max_tokens: int, request_id: str = "", **more: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed completion as they come. Raises ApiError."""
        body = self.body(prompt, max_tokens, **more) | {"stream": True}
        headers = {"X-Request-Id": request_id} if request_id else {}
        url = f"{self.url}/v1/completions"
        ended = False
        try:
            async with self._open.post(url, json=body, headers=headers) as response:
                await _check(response)
                async for line in response.content:
                    text = line.decode().strip()
                    if text == "data: [DONE]":
                        ended = True
                    elif text.startswith("data:"):
                        chunk = json.loads(text.removeprefix("data:"))
                        if "error" in chunk:
                            raise ApiError(200, json.dumps(chunk["error"]))
                        yield chunk
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"{type(error).__name__}: {error}") from error
        if not ended:
            raise ApiError(200, "the stream ended without [DONE]")

    async def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Choice:
        """/v1/chat/completions, greedy. Raises ApiError."""
        body = self._common(max_tokens) | {"messages": list(messages)}
        [one] = _by_index(await self.post("/v1/chat/completions", body))
        return _choice(one)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens. Raises ApiError."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        return list((await self.post("/tokenize", body))["tokens"])

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if blocks are still held."""
        return bool((await self.post("/reset_prefix_cache", {})).get("success", True))

    async def counters(self) -> Counters:
        """Its /metrics. Raises ApiError."""
        return Counters(await self.get("/metrics"))

    async def get(self, path: str) -> str:
        """Raises ApiError unless it is answered with 200, soon."""
        try:
            async with self._open.get(self.url + path, timeout=_LOOK_TIMEOUT) as response:
                await _check(response)
                return await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"{type(error).__name__}: {error}") from error

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ApiError unless it is answered with 200."""
        try:
            async with self._open.post(self.url + path, json=body) as response:
                await _check(response)
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"{type(error).__name__}: {error}") from error
        answer: dict[str, Any] = json.loads(text) if text else {}
        return answer

    def body(self, prompt: Any, max_tokens: int, **more: Any) -> dict[str, Any]:
        """A completion's JSON."""
        return self._common(max_tokens) | {"prompt": prompt} | more

    def _common(self, max_tokens: int) -> dict[str, Any]:
        # Token ids: texts can be equal where tokens are not.
        return {
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("use Api in an `async with`")
        return self._session


class Counters:
    """An engine's Prometheus page, read."""

    def __init__(self, page: str) -> None:
        self._lines = [line for line in page.splitlines() if line and not line.startswith("#")]

    def value(self, name: str, **labels: str) -> float:
        """The sum over all series of that name with these labels. Raises KeyError if none."""
        wanted = [f'{key}="{text}"' for key, text in labels.items()]
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in self._lines
            if line.startswith((f"{name}{{", f"{name} ")) and all(one in line for one in wanted)
        ]
        if not found:
            raise KeyError(f"{name} {labels or ''} is not among the engine's metrics")
        return sum(found)

    @property
    def computed(self) -> int:
        """Prompt tokens that the engine computed itself."""
        return self._by_source("local_compute")

    @property
    def cached(self) -> int:
        """Prompt tokens that it had in its prefix cache."""
        return self._by_source("local_cache_hit")

    @property
    def received(self) -> int:
        """Prompt tokens whose KV came through its connector."""
        return self._by_source("external_kv_transfer")

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests that got as far as their first token."""
        return int(self.value("vllm:prompt_tokens_total"))

    @property
    def running(self) -> int:
        return int(self.value("vllm:num_requests_running"))

    @property
    def waiting(self) -> int:
        return int(self.value("vllm:num_requests_waiting"))

    @property
    def preemptions(self) -> int:
        return int(self.value("vllm:num_preemptions_total"))

    @property
    def blocks_used(self) -> float:
        """The share of KV blocks that requests hold, 0 to 1; cached ones count as free."""
        return self.value("vllm:kv_cache_usage_perc")

    def _by_source(self, source: str) -> int:
        return int(self.value("vllm:prompt_tokens_by_source_total", source=source))


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise ApiError(response.status, await response.text())


def _by_index(answer: Mapping[str, Any]) -> list[Any]:
    return sorted(answer["choices"], key=lambda choice: int(choice["index"]))


def _choice(one: Mapping[str, Any]) -> Choice:
    message = one.get("message") or {}
    text = one.get("text") or message.get("content") or ""
    gaps = [_gap(top) for top in (one.get("logprobs") or {}).get("top_logprobs") or ()]
    return Choice(text, list(one.get("token_ids") or ()), gaps, one.get("finish_reason") or "")


def _gap(top: Mapping[str, float]) -> float:
    best = sorted(top.values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else 0.0
