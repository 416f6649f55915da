"""The scheduler's half on a P engine: which requests are pushed, and how far they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from decoded.producer import ParamsError, RemoteAddress, RemoteParams, decode_params, read_address

from ..caches import transfer_groups
from ..half import SchedulerHalf
from ..identity import engine_of
from ..settings import Settings
from .metadata import Chunk, PrefillMeta
from .readers import Readers, written_blocks

log = structlog.get_logger(__name__)


@dataclass
class _Sending:
    """A request that D waits for. `told`: the workers know of it, and so read its blocks."""

    params: RemoteParams
    prompt_tokens: int
    computed: int = 0
    told: bool = False

    @property
    def at_d(self) -> tuple[str, str]:
        """Who it is to D, by external id and engine."""
        return self.params.request_id, self.params.remote_engine_id


class PrefillScheduler(SchedulerHalf[PrefillMeta]):
    """Follows the requests that ask for `do_remote_decode`, until their prompt is computed.

    Raises ValueError for a parallel configuration whose KV cannot be pushed.
    """

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        engine = engine_of(vllm_config)
        if engine.pcp_size * engine.dcp_size != 1:
            raise ValueError(
                "a P engine with context parallelism cannot push its KV: set "
                "prefill_context_parallel_size and decode_context_parallel_size to 1"
            )
        self._groups = transfer_groups(kv_cache_config)
        self._block_sizes = [
            int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups
        ]
        self._sending: dict[str, _Sending] = {}
        self._at_d: dict[tuple[str, str], str] = {}
        self._ignored: set[str] = set()
        self._refused: list[RemoteAddress] = []
        self._readers = Readers()

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request is about to run. Where its parameters cannot be used it runs without a
        push, that is logged, and D is told if it can be.
        """
        request_id, params = request.request_id, request.kv_transfer_params
        if request_id in self._sending or request_id in self._ignored:
            return  # Here again after a preemption.
        if not isinstance(params, dict) or not params.get("do_remote_decode"):
            return
        try:
            sending = _Sending(_read(params), request.num_prompt_tokens)
        except ParamsError as error:
            self._ignore(request_id, str(error))
            address = read_address(params)
            if address is not None:
                self._refused.append(address)
            return
        at_d = sending.at_d
        if at_d in self._at_d:
            # D could not tell their words apart: the first DONE would end it for both.
            self._ignore(
                request_id,
                f"request_id {at_d[0]!r} is being pushed already, for {self._at_d[at_d]}: send P "
                "one request with n=1 for each post of D",
            )
            return
        self._at_d[at_d] = request_id
        self._sending[request_id] = sending

    def build_meta(self, scheduler_output: Any) -> PrefillMeta:
        """The chunks that this step computes of requests that are pushed."""
        meta = PrefillMeta(refused=self._refused)
        self._refused = []
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._sending:
                self._sending[request_id].computed = 0
                meta.preempted.append(request_id)
        if self._readers:
            blocks = written_blocks(scheduler_output, self._block_sizes)
            meta.overwritten = sorted(self._readers.overwritten(blocks))
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
        return meta

    def output(self, connector_output: Any) -> None:
        """What every worker has sent is read by nobody any more."""
        for request_id in connector_output.finished_sending or ():
            self._readers.forget(request_id)

    def finished(self, request: Any) -> bool:
        """A request is over: its blocks stay until each worker says that its push is."""
        self._ignored.discard(request.request_id)
        sending = self._sending.pop(request.request_id, None)
        if sending is None:
            return False
        del self._at_d[sending.at_d]
        return sending.told

    def shutdown(self) -> None:
        """Nothing is open here."""

    def _ignore(self, request_id: str, error: str) -> None:
        text = "kv_transfer_params cannot be used: the prompt is computed, and not pushed"
        log.error(text, request_id=request_id, error=error)
        self._ignored.add(request_id)

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
        ids = [list(block_ids[group]) if block_ids else [] for group in self._groups]
        for group in ids:
            self._readers.add(request_id, group)
        params = None if sending.told else sending.params
        sending.told = True
        meta.chunks.append(
            Chunk(request_id, sending.prompt_tokens, sending.computed, ids, fresh, params)
        )


def _read(params: dict[str, Any]) -> RemoteParams:
    """What the parameters say. Raises ParamsError and nothing else."""
    try:
        body = msgspec.json.encode(params)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise ParamsError(f"they are no JSON: {error}") from None
    return decode_params(body)
