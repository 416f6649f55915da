"""A worker's half on a P engine: layers are handed to the producer as attention leaves them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from decoded.client.memory import tensor_layout, tensor_storages
from decoded.producer import Producer, RemoteAddress

from ..caches import Caches
from ..half import Reports, WorkerHalf
from ..settings import Settings
from ..stats import ConnectorStats
from .device import device_setter, recorder
from .job import Job
from .metadata import Chunk, PrefillMeta
from .opener import Opener


class PrefillWorker(WorkerHalf[PrefillMeta]):
    """Pushes the requests that its scheduler names. A step never waits for a transfer, except
    for queued writes that read blocks which the step is about to overwrite.
    """

    def __init__(self, settings: Settings, vllm_config: Any) -> None:
        self._settings = settings
        # Micro-batches: a layer's attention runs once for each, and is over with the last.
        self._layerwise = not vllm_config.parallel_config.use_ubatching
        self._producer: Producer | None = None
        self._opener: Opener | None = None
        self._layers: dict[str, int] = {}
        self._record = recorder("cpu")
        self._jobs: dict[str, Job] = {}
        self._step: list[tuple[Job, int]] = []
        self._saved: set[str] = set()
        self._stats = ConnectorStats()

    def register(self, caches: Caches) -> None:
        """Start Mooncake on these caches. Raises LayoutError, TransferError."""
        from vllm.distributed import parallel_state

        self.shutdown()
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
            on_thread_start=device_setter(caches),
        )
        self._opener = Opener(self._producer, len(layout.groups))
        self._layers = {layer.name: index for index, layer in enumerate(layout.layers)}
        self._record = recorder(caches.device_type)

    def preempted(self, meta: PrefillMeta) -> None:
        """This step overwrites blocks that were read: wait until nobody reads them."""
        for job in self._known(meta.preempted):
            job.take_back()
        for job in self._known(meta.overwritten):
            job.let_go()

    def begin_step(self, meta: PrefillMeta) -> None:
        """The forward pass that follows computes these chunks."""
        self._fail_step("P did not end a forward pass")
        for address in meta.refused:
            if self._producer is not None:
                self._producer.refuse(address)
        self._step = [(self._job(chunk), chunk.computed) for chunk in meta.chunks]
        self._saved.clear()

    def save_layer(self, name: str) -> None:
        """Attention of a layer has been computed, or queued on the device."""
        if self._step and self._layerwise:
            self._save(name)

    def end_step(self) -> None:
        """The forward pass is over, and with it layers that did not say so."""
        # vLLM says this too while an exception leaves its forward pass, and blocks are half
        # computed.
        error = sys.exc_info()[1]
        if error is not None:
            self._fail_step(f"P's forward pass failed: {error!r}")
        if not self._step:
            return
        for name in self._layers:
            self._save(name)
        for job, computed in self._step:
            if computed >= job.prompt_tokens:
                job.seal()
        self._step = []

    def take_reports(self, finished_req_ids: set[str]) -> Reports:
        """Requests, out of those that vLLM is done with, whose blocks nobody reads any more;
        each is named once.
        """
        for job in self._known(finished_req_ids):
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
        return Reports(sent=over)

    def take_stats(self) -> ConnectorStats:
        """What ended since the last call."""
        stats, self._stats = self._stats, ConnectorStats()
        return stats

    def shutdown(self) -> None:
        """Fail what is under way and stop; idempotent."""
        producer, self._producer = self._producer, None
        opener, self._opener = self._opener, None
        if opener is not None:
            opener.close()
        if producer is not None:
            for job in self._jobs.values():
                if job.opening:
                    producer.refuse(RemoteAddress.of(job.params))
            producer.close()

    def _known(self, request_ids: Iterable[str]) -> list[Job]:
        return [self._jobs[request_id] for request_id in request_ids if request_id in self._jobs]

    def _job(self, chunk: Chunk) -> Job:
        job = self._jobs.get(chunk.request_id)
        if job is not None:
            job.blocks(chunk.block_ids, chunk.fresh)
            return job
        assert chunk.params is not None, "a request's first chunk bears its parameters"
        assert self._opener is not None, "register_kv_caches comes before the first step"
        job = Job(chunk.request_id, chunk.params, chunk.prompt_tokens, len(self._layers))
        job.blocks(chunk.block_ids, True)
        self._jobs[chunk.request_id] = job
        self._opener.open(job)
        return job

    def _save(self, name: str) -> None:
        index = self._layers.get(name)
        # Layers without an index share the cache of one that has it.
        if index is None or name in self._saved:
            return
        self._saved.add(name)
        ready = self._record()
        for job, computed in self._step:
            job.layer(index, computed, ready)

    def _fail_step(self, reason: str) -> None:
        for job, _ in self._step:
            job.fail(reason)
        self._step = []
