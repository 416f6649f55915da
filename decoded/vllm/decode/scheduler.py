"""The scheduler's half on a D engine: it submits loads, cancels them, and knows how each ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import structlog

from decoded.client import Client, ClientOverloaded, InvalidSubmission, Outcome, Submission

from ..caches import transfer_groups
from ..half import SchedulerHalf
from ..identity import engine_of, external_id
from ..settings import Settings
from ..stats import ConnectorStats
from .lifeline import Lifeline, greet
from .metadata import Begun, DecodeMeta, Ended

log = structlog.get_logger(__name__)


def transfer_params(request: Any) -> dict[str, Any]:
    """Its `kv_transfer_params`; vLLM 0.27 lets through whatever a client gave by that name."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def is_virtual(request: Any) -> bool:
    """Nobody will write this request's KV."""
    return bool(transfer_params(request).get("do_virtual"))


def keep_out_of_prefix_cache(request: Any) -> None:
    """Have the blocks of a virtual request cached under hashes that no other request has.

    They hold whatever was there. Under their tokens' own hashes they would be found by a
    real request with the same prompt, and its answer would be garbage.
    """
    request.cache_salt = f"{request.cache_salt or ''}decoded-virtual-{request.request_id}"
    request.block_hashes.clear()
    request.update_block_hashes()


@dataclass
class _Load:
    """A request that was parked in WAITING_FOR_REMOTE_KVS.

    `settled`: the scheduler knows how it ended. `reported`: so does vLLM, from its workers.
    """

    submission: Submission
    settled: bool = False
    reported: bool = False


class DecodeScheduler(SchedulerHalf[DecodeMeta]):
    """Submits each request once, when its blocks are allocated.

    A load that ends otherwise than done is not tried again: P has computed the prompt for
    this one attempt, so vLLM's `kv_load_failure_policy` decides. Workers hear of outcomes
    from the daemon; the scheduler passes on what it has heard, too, so that no worker
    depends on its own connection. Raises ClientError at start if there is no daemon, and
    later only when another engine has taken this one's id.
    """

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._engine = engine_of(vllm_config)
        self._groups = transfer_groups(kv_cache_config)
        self._block_size = int(
            kv_cache_config.kv_cache_groups[self._groups[0]].kv_cache_spec.block_size
        )
        self._loads: dict[int, _Load] = {}
        self._parked: dict[str, int] = {}
        self._tried: set[str] = set()
        self._new: list[_Load] = []
        self._failed: list[_Load] = []
        self._lost: list[_Load] = []
        self._attempt = 0
        self._stats = ConnectorStats()
        self._client = self._connect()
        try:
            greet(self._client, settings.connect_timeout_s)
        except BaseException:
            self._client.close(0)
            raise
        self._lifeline = Lifeline(settings.daemon_endpoint, settings.daemon_timeout_s)

    # vLLM's questions, in the order in which it asks them

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens of the prompt to be loaded, whether asynchronously).

        The last token of a prompt is computed in any case, for its logits: a request that
        lacks nothing else is not loaded. Nor is one that asks for its prompt's log
        probabilities, which come from computing it.
        """
        wanted = transfer_params(request).get("do_remote_prefill")
        if not wanted or request.request_id in self._tried:
            return 0, False
        if request.skip_reading_prefix_cache:
            return 0, False
        missing = request.num_prompt_tokens - num_computed_tokens
        return (missing, True) if missing > 1 else (0, False)

    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated; with external tokens, the load begins with this step."""
        if num_external_tokens <= 0:
            return
        self._attempt += 1
        block_ids = blocks.get_block_ids()
        submission = Submission(
            request.request_id,
            external_id(request.request_id),
            [list(block_ids[group]) for group in self._groups],
            request.num_prompt_tokens,
            request.num_prompt_tokens - num_external_tokens,
            self._attempt,
            kv_transfer_params=request.kv_transfer_params,
            timeout_s=self._settings.request_timeout_s,
        )
        if is_virtual(request):
            keep_out_of_prefix_cache(request)
        load = _Load(submission)
        self._tried.add(request.request_id)
        self._loads[self._attempt] = load
        self._parked[request.request_id] = self._attempt
        self._new.append(load)

    def build_meta(self, scheduler_output: Any) -> DecodeMeta:
        """Once per step: submit what is new, and pass on what has ended."""
        new, self._new = self._new, []
        meta = DecodeMeta(begun=[self._begun(load.submission) for load in new])
        self._submit(new)
        boot = self._client.boot
        for outcome in self._client.poll():
            self._settle(meta, outcome, boot)
        if self._loads and self._lifeline.is_cut(self._client.connected, time.monotonic()):
            self._give_up()
        failed, self._failed = self._failed, []
        for load in failed:
            self._end(meta, load, False, None)
        lost, self._lost = self._lost, []
        for load in lost:
            self._end(meta, load, False, "")
        return meta

    def output(self, connector_output: Any) -> None:
        """Every worker has reported these: vLLM goes on with them, or frees their blocks."""
        for request_id in connector_output.finished_recving or ():
            load = self._loads[self._parked.pop(request_id)]
            load.reported = True
            self._forget(load)

    def finished(self, request: Any) -> bool:
        """A request is over. If it was parked its blocks stay until its outcome has come."""
        self._tried.discard(request.request_id)
        attempt = self._parked.get(request.request_id)
        if attempt is not None and not self._loads[attempt].settled:
            self._client.cancel(request.request_id, attempt)
        return False

    def take_stats(self) -> ConnectorStats:
        """What ended since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def shutdown(self) -> None:
        """Leave; the daemon gives up what is in flight."""
        self._client.close()

    # The daemon's side

    def _connect(self) -> Client:
        engine = self._engine
        return Client(
            self._settings.daemon_endpoint,
            engine.engine_id,
            world_size=engine.world_size,
            expect_workers=True,
            tp_size=engine.tp_size,
            pcp_size=engine.pcp_size,
            dcp_size=engine.dcp_size,
            name="vllm scheduler",
        )

    def _begun(self, submission: Submission) -> Begun:
        cached = submission.cached_tokens // self._block_size
        return Begun(submission.request_id, submission.attempt, submission.block_ids[0][cached:])

    def _submit(self, loads: list[_Load]) -> None:
        """One batch; if something in it is wrong, one by one, so that only that fails."""
        if not loads:
            return
        try:
            self._client.submit(*(load.submission for load in loads))
        except (InvalidSubmission, ClientOverloaded) as error:
            if len(loads) > 1:
                for load in loads:
                    self._submit([load])
                return
            request_id = loads[0].submission.request_id
            log.error("request not submitted", request_id=request_id, error=str(error))
            self._failed.append(loads[0])

    def _settle(self, meta: DecodeMeta, outcome: Outcome, boot: str) -> None:
        load = self._loads.get(outcome.attempt)
        self._stats.add(f"loads_{outcome.state}")
        self._stats.observe("load_seconds", outcome.elapsed_s)
        if not outcome.ok and outcome.state != "cancelled":
            log.error(
                "KV load failed",
                request_id=outcome.request_id,
                state=outcome.state,
                reason=outcome.reason,
                detail=outcome.detail,
            )
        if load is not None:
            if outcome.ok:
                submission = load.submission
                self._stats.add("load_tokens", submission.prompt_tokens - submission.cached_tokens)
            self._end(meta, load, outcome.ok, boot)

    def _end(self, meta: DecodeMeta, load: _Load, ok: bool, boot: str | None) -> None:
        load.settled = True
        submission = load.submission
        meta.ended.append(Ended(submission.request_id, submission.attempt, ok, boot))
        self._forget(load)

    def _forget(self, load: _Load) -> None:
        if load.settled and load.reported:
            del self._loads[load.submission.attempt]

    def _give_up(self) -> None:
        """The daemon is dead, and nobody has started it again. Its Mooncake engines died with
        it, so nobody writes any more; workers that run Mooncake themselves fence it first.
        """
        waiting = [load for load in self._loads.values() if not load.settled]
        if not waiting:
            return
        log.error(
            "the daemon is gone: its requests fail",
            endpoint=self._settings.daemon_endpoint,
            after_s=self._settings.daemon_timeout_s,
            requests=len(waiting),
        )
        # A new client, so that a daemon that comes back is not given these requests again.
        self._client.close(0)
        self._client = self._connect()
        self._lost += waiting
        self._stats.add("loads_lost", len(waiting))
