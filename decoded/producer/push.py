"""One request's push from a P rank to the D rank it serves, layer by layer."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Literal

import structlog

from decoded.kv.transfer import TransferError
from decoded.wire.side_channel import Done, Failed, Layers

from .blocks import LocalBlocks
from .errors import PushError
from .notify import Delivery
from .plan import Writes, chunk_range, layer_writes
from .progress import PushProgress
from .rank import Rank, Target
from .request import PushRequest, PushResult, check_local_blocks

log = structlog.get_logger(__name__)

CONNECT_BYTES = 128


class Push:
    """The push of one request; `Producer.open` makes it. Of one thread at a time.

    No method waits for a write or for D, except `finish` and `flush`. P's blocks must stay as
    they are until `outcome`, a Future, has its result.
    """

    def __init__(self, rank: Rank, request: PushRequest, target: Target | None) -> None:
        self._rank = rank
        self._request = request
        self._target = target
        self._names = [layer.name for layer in rank.layout.layers]
        self._local = LocalBlocks(request.block_ids)
        self._lane = rank.writers.take("" if target is None else target.session)
        self._queued: Future[None] | None = None
        self._computed = [0] * len(self._names)
        self._pushed = [False] * len(self._names)
        self._stopped = ""
        self._sealed = False
        self._ending = False
        self._began = time.monotonic()
        self._sealed_at: float | None = None
        self.external_id = request.params.request_id
        self._progress = self._progress_of(target)
        self.layers_written = 0
        self.bytes_written = 0
        self.outcome: Future[PushResult] = Future()
        self.outcome.set_running_or_notify_cancel()
        self.outcome.add_done_callback(lambda _: rank.writers.give_back(self._lane))

    def add_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """More of P's blocks, per KV group, for the chunks to come. Raises PushError."""
        check_local_blocks(self._rank.layout, block_ids)
        self._local.extend(block_ids)

    def replace_blocks(self, block_ids: Sequence[Sequence[int]]) -> None:
        """The request has other blocks of P now, per KV group, from its first token on: P was
        preempted, say. What was pushed stays pushed and is not pushed again; what of it is
        still queued reads the earlier blocks, so `flush` before those are used for something
        else. Raises PushError.
        """
        check_local_blocks(self._rank.layout, block_ids)
        self._local = LocalBlocks(block_ids)

    def flush(self) -> None:
        """Wait until each layer pushed so far is written, or will not be: then nothing reads
        its blocks. That takes as long as the writes that are queued up to it, with a D that
        is gone MC_TRANSFER_TIMEOUT.
        """
        if self._queued is not None:
            self._queued.result()

    def layer(
        self,
        layer: int | str,
        computed_tokens: int | None = None,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Queue the write of one layer's blocks and return at once.

        `layer`: its index in P's layout, or its name. `computed_tokens`: how much of the
        prompt is in this layer's blocks; None: all of it. A chunk that is not the last
        sends whole blocks only. `ready` is called in the push thread before it reads the
        blocks, to wait for the device. After the push has failed, calls change nothing.
        Raises PushError for a layer or number that cannot be.
        """
        index = self._index(layer)
        prompt = self._request.prompt_tokens
        computed = prompt if computed_tokens is None else computed_tokens
        if self._sealed or self._pushed[index]:
            raise PushError(f"{self.external_id}: layer {self._names[index]} was pushed to its end")
        if not self._computed[index] <= computed <= prompt:
            raise PushError(
                f"{self.external_id}: layer {self._names[index]} cannot have {computed} tokens "
                f"computed, after {self._computed[index]} and of {prompt}"
            )
        blocks = self._range(index, self._computed[index], computed)
        group = self._rank.layout.layers[index].group
        if blocks and len(self._local.ids[group]) < blocks.stop:
            raise PushError(
                f"{self.external_id}: {computed} tokens need {blocks.stop} blocks of KV group "
                f"{group}, P has {len(self._local.ids[group])}: add_blocks before"
            )
        self._computed[index] = computed
        last = self._pushed[index] = computed == prompt
        if self._target is not None and not self._stopped and (blocks or last):
            work = partial(
                self._write,
                self._target,
                self._local,
                index,
                blocks,
                last,
                ready,
                self._lane.failures,
            )
            self._queued = self._lane.submit(work)

    def seal(self) -> Future[PushResult]:
        """No more layers come: DONE follows the last write. Returns `outcome` at once.

        Raises PushError if a layer has not been pushed to the end of the prompt.
        """
        missing = [
            name for name, pushed in zip(self._names, self._pushed, strict=True) if not pushed
        ]
        if missing and not self._stopped:
            raise PushError(
                f"{self.external_id}: {len(missing)} layers were not pushed to the end of the "
                f"prompt, the first is {missing[0]}"
            )
        if not self._sealed and not self.outcome.done():
            self._sealed = True
            self._sealed_at = time.monotonic()
            self._lane.submit(partial(self._end, ""))
        return self.outcome

    def finish(self, timeout_s: float | None = None) -> PushResult:
        """`seal`, and wait. Raises TimeoutError if the push is still under way by then; it
        goes on, and `finish` may be called again.
        """
        return _wait(self.seal(), timeout_s)

    def fail(self, reason: str) -> Future[PushResult]:
        """Stop: queued layers are dropped, and after the write under way D is told FAILED.

        Returns `outcome` at once. Changes nothing once the push has ended.
        """
        if not self._stopped and not self.outcome.done():
            self._stopped = reason or "the caller gave up"
            self._lane.submit(partial(self._end, self._stopped))
        return self.outcome

    def connect(self) -> None:
        """Queue the write with which deployed producers open a session where several P ranks
        share a D block: up to 128 bytes into block 0 of the first layer, which is never live.
        """
        if self._target is not None:
            self._lane.submit(partial(self._connect, self._target))

    def _index(self, layer: int | str) -> int:
        if isinstance(layer, int) and 0 <= layer < len(self._names):
            return layer
        if isinstance(layer, str) and layer in self._rank.layers:
            return self._names.index(layer)
        raise PushError(f"{self.external_id}: P has no layer {layer!r}")

    def _range(self, index: int, sent: int, computed: int) -> range:
        group = self._rank.layout.groups[self._rank.layout.layers[index].group]
        params, prompt = self._request.params, self._request.prompt_tokens
        return chunk_range(group.block_size, prompt, params.remote_cached_tokens, sent, computed)

    # From here on: in the push thread

    def _connect(self, target: Target) -> None:
        name = self._names[0]
        ours, theirs = self._rank.layers[name], target.metadata.layer_metadata[name]
        length = min(
            CONNECT_BYTES, *(s.block_len[0] * s.block_size_scale[0] for s in (ours, theirs))
        )
        source, destination = ours.kv_caches_base_addr[0], theirs.kv_caches_base_addr[0]
        try:
            self._lane.write(Writes([source], [destination], [length]))
        except TransferError as error:
            # As deployed: the first layer will tell whether D can be written to.
            log.warning("connect write failed", session=target.session, error=str(error))

    def _write(
        self,
        target: Target,
        local: LocalBlocks,
        index: int,
        blocks: range,
        last: bool,
        ready: Callable[[], None] | None,
        failures: int,
    ) -> None:
        if self._stopped:
            return
        name, group = self._names[index], self._rank.layout.layers[index].group
        try:
            if self._lane.failures != failures:
                # It would wait for the time-out as well, and so would each that is queued.
                raise PushError(f"not tried, an earlier write failed: {self._lane.problem}")
            if ready is not None:
                ready()
            writes = layer_writes(
                self._rank.layers[name],
                target.metadata.layer_metadata[name],
                partial(local.kernel_runs, group, self._request.params.remote_block_ids, blocks),
                target.shard,
            )
            if writes.lengths:
                self._lane.write(writes)
        except Exception as error:  # noqa: BLE001 - whatever it is (ready is the caller's), D must hear
            if isinstance(error, TransferError):
                self._rank.cache.forget(target.engine_id, target.port)
            self._stopped = f"layer {name}: {error or type(error).__name__}"
            self._end(self._stopped)
            return
        self.bytes_written += writes.nbytes
        if last:
            self.layers_written += 1
            if self._progress is not None:
                self._progress.written(index)

    def _progress_of(self, target: Target | None) -> PushProgress | None:
        """None where the D rank did not say that it takes layer progress."""
        if target is None or not target.metadata.progress:
            return None
        heard = self.external_id, target.shard.parts, self._rank.sender
        return PushProgress(
            self._rank.progress,
            target.host,
            target.port,
            lambda first, count: Layers(*heard, first, count),
        )

    def _end(self, failure: str) -> None:
        """Tell D how it ended; the first call decides."""
        if self._ending:
            return
        self._ending = True
        if self._progress is not None:
            self._progress.flush()
        failure = failure or self._stopped
        target, last_layer = self._target, len(self._names) - 1
        if target is None or not self._range(last_layer, 0, self._request.prompt_tokens):
            self._settle("failed" if failure else "silent", failure, Delivery(False, 0))
            return
        heard = self.external_id, target.shard.parts, self._rank.sender
        message = Failed(*heard) if failure else Done(*heard)
        delivery = self._rank.notifier.send(target.host, target.port, message)
        state: Literal["done", "failed"] = "failed" if failure else "done"
        delivery.add_done_callback(lambda d: self._settle(state, failure, d.result()))

    def _settle(
        self, state: Literal["done", "failed", "silent"], failure: str, delivery: Delivery
    ) -> None:
        result = PushResult(
            state=state,
            detail="; ".join(text for text in (failure, delivery.error) if text),
            acknowledged=delivery.acknowledged,
            layers=self.layers_written,
            nbytes=self.bytes_written,
            elapsed_s=time.monotonic() - self._began,
        )
        good = state != "failed" and not delivery.error
        times = {"elapsed_s": round(result.elapsed_s, 6)}
        if self._sealed_at is not None:
            times["after_last_layer_s"] = round(time.monotonic() - self._sealed_at, 6)
        (log.info if good else log.warning)(
            "push ended",
            request_id=self._request.request_id or self.external_id,
            engine_id=self._request.params.remote_engine_id,
            state=state,
            detail=result.detail,
            acknowledged=result.acknowledged,
            nbytes=result.nbytes,
            **times,
        )
        self.outcome.set_result(result)


def _wait(outcome: Future[PushResult], timeout_s: float | None) -> PushResult:
    try:
        return outcome.result(timeout_s)
    except concurrent.futures.TimeoutError:  # another class than TimeoutError before 3.11
        raise TimeoutError(f"the push is still under way after {timeout_s} s") from None
