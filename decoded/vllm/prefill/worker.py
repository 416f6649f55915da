"""A worker's half on a P engine: layers are handed to the producer as attention leaves them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from decoded.client.memory import tensor_layout, tensor_storages
from decoded.producer import Producer, PushRequest
from decoded.producer.params import decode_params

from ..caches import Caches
from ..settings import Settings
from ..stats import ConnectorStats
from .job import Job
from .metadata import Chunk, PrefillMeta

OPENERS = 8
"""Handshakes at the same time. One takes 3 s at most, with a D node that does not answer."""


class PrefillWorker:
    """Pushes the requests that its scheduler names. A step never waits for a transfer, except
    for writes that read blocks which a preempted request has lost.
    """

    def __init__(self, settings: Settings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._producer: Producer | None = None
        self._openers = ThreadPoolExecutor(OPENERS, thread_name_prefix="decoded-open")
        self._layers: list[str] = []
        self._groups = 0
        self._record: Callable[[], Callable[[], None] | None] = _nothing
        self._jobs: dict[str, Job] = {}
        self._step: list[tuple[Job, int]] = []
        self._saved: set[str] = set()
        self._stats = ConnectorStats()

    def register(self, caches: Caches) -> None:
        """Start Mooncake on these caches. Raises LayoutError, TransferError."""
        from vllm.distributed import parallel_state

        if self._producer is not None:
            self._producer.close()
        layout = tensor_layout(caches.tensors, caches.groups, caches.group_of)
        tp = parallel_state.get_tp_group()
        self._producer = Producer(
            layout,
            [address for address, _ in tensor_storages(caches.tensors)],
            host=self._settings.host,
            protocol=self._settings.protocol,
            device=self._settings.device,
            tp_rank=int(tp.rank_in_group),
            tp_size=int(tp.world_size),
            on_thread_start=_device_setter(caches),
        )
        self._layers = [layer.name for layer in layout.layers]
        self._groups = len(layout.groups)
        self._record = _recorder(caches.device_type)

    def preempted(self, meta: PrefillMeta) -> None:
        """Blocks of these requests are about to be overwritten: wait until nobody reads them."""
        jobs = [self._jobs[request_id] for request_id in meta.preempted if request_id in self._jobs]
        for job in jobs:
            job.take_back()
        if jobs and self._producer is not None:
            self._producer.flush()

    def begin_step(self, meta: PrefillMeta) -> None:
        """The forward pass that follows computes these chunks."""
        self._step = [(self._job(chunk), chunk.computed) for chunk in meta.chunks]
        self._saved.clear()

    def save_layer(self, name: str) -> None:
        """Attention of a layer has been computed, or queued on the device."""
        if not self._step or name in self._saved:
            return
        self._saved.add(name)
        ready = self._record()
        for job, computed in self._step:
            job.layer(name, computed, ready)

    def end_step(self) -> None:
        """The forward pass is over, and with it layers that did not say so."""
        for name in self._layers:
            self.save_layer(name)
        for job, computed in self._step:
            if computed >= job.prompt_tokens:
                job.seal()
        self._step = []

    def finished_sending(self, finished_req_ids: set[str]) -> set[str]:
        """Requests, out of those that vLLM is done with, whose blocks nobody reads any more;
        each is named once.
        """
        for request_id in finished_req_ids:
            job = self._jobs.get(request_id)
            if job is not None:
                job.finished = True
                job.fail("the request was aborted on P")
        over: set[str] = set()
        for request_id, job in list(self._jobs.items()):
            result = job.result() if job.finished else None
            if result is not None:
                over.add(request_id)
                del self._jobs[request_id]
                self._stats.add(f"pushes_{result.state}")
                self._stats.add("push_bytes", result.nbytes)
                self._stats.observe("push_seconds", result.elapsed_s)
        return over

    def take_stats(self) -> ConnectorStats:
        """What ended since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def shutdown(self) -> None:
        """Fail what is under way and stop; idempotent."""
        producer, self._producer = self._producer, None
        self._openers.shutdown(wait=False, cancel_futures=True)
        if producer is not None:
            producer.close()

    def _job(self, chunk: Chunk) -> Job:
        job = self._jobs.get(chunk.request_id)
        if job is not None:
            job.blocks(chunk.block_ids, chunk.fresh)
            return job
        job = Job(chunk.request_id, chunk.prompt_tokens, self._layers)
        job.blocks(chunk.block_ids, True)
        self._jobs[chunk.request_id] = job
        self._openers.submit(self._open, job, chunk)
        return job

    def _open(self, job: Job, chunk: Chunk) -> None:
        try:
            assert self._producer is not None, "register_kv_caches comes before the first step"
            params = decode_params(msgspec.json.encode(chunk.params))
            no_blocks: list[list[int]] = [[] for _ in range(self._groups)]
            push = self._producer.open(
                PushRequest(params, chunk.prompt_tokens, no_blocks, chunk.request_id)
            )
        except BaseException as error:  # noqa: BLE001 - whatever it is, the blocks must come back
            job.not_opened(error)
        else:
            job.opened(push)


def _nothing() -> None:
    return None


def _recorder(device_type: str) -> Callable[[], Callable[[], None] | None]:
    """What notes how far the device's stream is; returns what waits for that. On CPU what was
    called has been done.
    """
    if device_type == "cpu":
        return _nothing
    import torch

    device = getattr(torch, device_type)

    def record() -> Callable[[], None]:
        event = device.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    return record


def _device_setter(caches: Caches) -> Callable[[], None] | None:
    """Contexts of devices belong to threads: the push thread has to have this worker's."""
    if caches.device_type == "cpu":
        return None
    import torch

    index = next(iter(caches.tensors.values()))[0].device.index
    device = getattr(torch, caches.device_type)
    return lambda: device.set_device(index)
