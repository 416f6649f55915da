"""The path of a real request: announce its blocks to the proxy, then hear from its senders."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from decoded.core import reasons
from decoded.core.engines import Engines
from decoded.core.events import Deferred, Event, Fulfilled, PrefillEnded, Started, StartFailed
from decoded.core.request import Request, RequestKey
from decoded.edges.metaserver import MetaserverClient, PrefillReply
from decoded.kv.layout import check_blocks, nothing_to_fetch
from decoded.wire.layout import KvLayout

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Destination:
    """Where an engine's KV is to be written, as the proxy needs to know it."""

    layout: KvLayout
    host: str
    port: int
    remote_engine_id: str
    tp_size: int
    pcp_size: int
    dcp_size: int


class ReceiverPath:
    """Starts real requests. `destination(engine_id)` is None until every rank is registered."""

    def __init__(
        self,
        engines: Engines,
        metaserver: MetaserverClient,
        destination: Callable[[str], Destination | None],
        dispatch: Callable[[Event], None],
        counters: Counter[str],
    ) -> None:
        self._counters = counters
        self._engines = engines
        self._metaserver = metaserver
        self._destination = destination
        self._dispatch = dispatch
        self._waiting: dict[str, dict[RequestKey, Request]] = {}
        self._calls: dict[RequestKey, asyncio.Task[None]] = {}

    @property
    def calls(self) -> int:
        """Metaserver calls under way."""
        return len(self._calls)

    def start(self, request: Request) -> Sequence[Event]:
        if request.prompt_tokens <= request.cached_tokens or not any(request.blocks):
            return (Fulfilled(request.key, request.attempt, reasons.NOTHING_TO_FETCH),)
        destination = self._destination(request.key.engine_id)
        if destination is None:
            self._waiting.setdefault(request.key.engine_id, {})[request.key] = request
            return (Deferred(request.key, request.attempt),)
        return (self._begin(request, destination),)

    def stop(self, request: Request) -> None:
        waiting = self._waiting.get(request.key.engine_id)
        if waiting is not None and waiting.pop(request.key, request) and not waiting:
            del self._waiting[request.key.engine_id]
        call = self._calls.pop(request.key, None)
        if call is not None:
            call.cancel()

    def engine_ready(self, engine_id: str) -> None:
        """Every rank of the engine is registered: begin with what has waited for that."""
        destination = self._destination(engine_id)
        if destination is None:
            return
        for request in self._waiting.pop(engine_id, {}).values():
            self._dispatch(self._begin(request, destination))

    def _begin(self, request: Request, destination: Destination) -> Event:
        key, attempt, layout = request.key, request.attempt, destination.layout
        problem = check_blocks(layout, request.blocks, request.prompt_tokens)
        if problem is not None:
            return StartFailed(key, attempt, reasons.BAD_BLOCKS, problem)
        if nothing_to_fetch(layout, request.prompt_tokens, request.cached_tokens, request.blocks):
            return Fulfilled(key, attempt, reasons.NOTHING_TO_FETCH)
        url = request.params.get("metaserver")
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            detail = "kv_transfer_params.metaserver is the proxy's http:// or https:// URL"
            return StartFailed(key, attempt, reasons.NO_METASERVER, detail)
        engine = self._engines.by_id[key.engine_id]
        body = announcement(request, destination)
        # The task's first step runs after this turn: a request that cannot start stops it before.
        self._calls[key] = asyncio.get_running_loop().create_task(self._call(request, url, body))
        return Started(key, attempt, engine.world_size, engine.generation)

    async def _call(self, request: Request, url: str, body: dict[str, Any]) -> None:
        key, attempt = request.key, request.attempt
        try:
            reply = await self._metaserver.announce(url, body, request.external_id)
        except Exception:
            log.exception("metaserver call failed", request_id=key.request_id)
            self._counters["internal_errors"] += 1
            reply = PrefillReply(False, True, "the daemon failed at the call; see its log", False)
        if self._calls.get(key) is asyncio.current_task():
            del self._calls[key]
        self._dispatch(PrefillEnded(key, attempt, reply.ok, reply.began, reply.detail, reply.over))

    async def close(self) -> None:
        """Give up all calls."""
        calls = list(self._calls.values())
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def announcement(request: Request, destination: Destination) -> dict[str, Any]:
    """The body for the metaserver.

    The keys are those of vllm-ascend's MooncakeLayerwiseConnector (read at 182b75ea):
    the proxy hands them to the P engine as its kv_transfer_params.
    """
    return {
        "token_ids": [],
        "request_id": request.external_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(ids) for ids in request.blocks],
        "remote_block_size": [group.block_size for group in destination.layout.groups],
        "remote_engine_id": destination.remote_engine_id,
        "remote_host": destination.host,
        "remote_port": destination.port,
        "remote_tp_size": destination.tp_size,
        "remote_pcp_size": destination.pcp_size,
        "remote_dcp_size": destination.dcp_size,
        "remote_cached_tokens": request.cached_tokens,
    }
