"""The scheduler's half on a P engine: which requests are pushed, and how far they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from decoded.producer import ParamsError
from decoded.producer.params import decode_params

from ..caches import transfer_groups
from ..identity import engine_of
from ..settings import Settings
from .metadata import Chunk, PrefillMeta

log = structlog.get_logger(__name__)


@dataclass
class _Sending:
    """A request that D waits for. `told`: the workers know of it, and so hold its blocks."""

    params: dict[str, Any]
    prompt_tokens: int
    computed: int = 0
    told: bool = False


class PrefillScheduler:
    """Follows the requests that ask for `do_remote_decode`, until their prompt is computed."""

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        engine_of(vllm_config)
        self._groups = transfer_groups(kv_cache_config)
        self._sending: dict[str, _Sending] = {}

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """A P engine loads nothing."""
        return 0, False

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request is about to run. Parameters that cannot be used are said so, and it runs
        without a push; D's deadline ends its wait.
        """
        params = request.kv_transfer_params
        known = request.request_id in self._sending
        if known or not params or not params.get("do_remote_decode"):
            return
        try:
            decode_params(msgspec.json.encode(params))
        except (ParamsError, TypeError) as error:
            text = "kv_transfer_params cannot be used: the prompt is computed, and not pushed"
            log.error(text, request_id=request.request_id, error=str(error))
            return
        self._sending[request.request_id] = _Sending(params, request.num_prompt_tokens)

    def build_meta(self, scheduler_output: Any) -> PrefillMeta:
        """The chunks that this step computes of requests that are pushed."""
        meta = PrefillMeta()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            computed = new.num_computed_tokens + scheduled.get(new.req_id, 0)
            self._add(meta, new.req_id, computed, new.block_ids, True)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, before, block_ids in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            fresh = request_id in cached.resumed_req_ids
            self._add(meta, request_id, before + scheduled.get(request_id, 0), block_ids, fresh)
        meta.preempted = [
            request_id
            for request_id in scheduler_output.preempted_req_ids or ()
            if request_id in self._sending
        ]
        for request_id in meta.preempted:
            self._sending[request_id].computed = 0
        return meta

    def output(self, connector_output: Any) -> None:
        """What the workers have sent is of no interest here."""

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: its blocks stay until each worker says that its push is."""
        sending = self._sending.pop(request.request_id, None)
        return sending is not None and sending.told, None

    def shutdown(self) -> None:
        """Nothing is open here."""

    def _add(
        self,
        meta: PrefillMeta,
        request_id: str,
        computed: int,
        block_ids: Sequence[Sequence[int]] | None,
        fresh: bool,
    ) -> None:
        sending = self._sending.get(request_id)
        if sending is None:
            return
        if sending.computed >= sending.prompt_tokens and not fresh:
            return  # It is decoding.
        sending.computed = min(computed, sending.prompt_tokens)
        chunk = Chunk(
            request_id,
            sending.prompt_tokens,
            sending.computed,
            [list(block_ids[group]) if block_ids else [] for group in self._groups],
            fresh,
            None if sending.told else sending.params,
        )
        sending.told = True
        meta.chunks.append(chunk)
