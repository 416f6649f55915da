"""The connector that vLLM loads: a facade over four halves, two for each role of an engine.

A process has one half (`half.py` says what is asked of it).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from .caches import read_caches, transfer_groups
from .decode.scheduler import DecodeScheduler
from .decode.worker import DecodeWorker
from .half import Half, SchedulerHalf, WorkerHalf
from .prefill.scheduler import PrefillScheduler
from .prefill.worker import PrefillWorker
from .settings import SettingsError, read_settings
from .stats import ConnectorMetrics, ConnectorStats

TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)
"""vLLM 0.32's way to report failed requests; 0.27 knows only failed blocks."""


class DecodedConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_role` kv_consumer: KV comes through the daemon. kv_producer: KV goes to D nodes.

    Raises SettingsError for a configuration that cannot be, ClientError where a D engine
    finds no daemon.
    """

    _scheduler: SchedulerHalf[Any]
    _worker: WorkerHalf[Any]

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config)
        self._config = kv_cache_config
        self._half: Half
        consumes = vllm_config.kv_transfer_config.kv_role == "kv_consumer"
        if consumes:
            _check_failures_can_be_reported(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            scheduler = DecodeScheduler if consumes else PrefillScheduler
            self._half = self._scheduler = scheduler(settings, vllm_config, kv_cache_config)
        else:
            worker = DecodeWorker if consumes else PrefillWorker
            self._half = self._worker = worker(settings, vllm_config)
        self._failed_blocks: set[int] = set()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(read_caches(kv_caches, self._config))

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Here, not in start_load_kv, which 0.32 calls only after the forward pass.
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The daemon has been at it since the scheduler's half submitted the request."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a forward pass: a request runs once its KV is whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        reports = self._worker.take_reports(finished_req_ids)
        self._failed_blocks = reports.failed_blocks
        return reports.sent or None, reports.ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        reports = self._worker.take_reports(finished_req_ids)
        return TransferResults(
            finished_sending=reports.sent,
            finished_recving=reports.ended,
            failed_recving=reports.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Where requests can be reported blocks must not be: they would count twice.
        if TransferResults is not None:
            return set()
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All of them: P sends the request's own blocks."""
        return transfer_groups(self._config)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request), None

    # Both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        stats = self._half.take_stats()
        return None if stats is None or stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ConnectorMetrics:
        return ConnectorMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._half.shutdown()


def _check_failures_can_be_reported(kv_cache_config: Any) -> None:
    groups = len(kv_cache_config.kv_cache_groups)
    if TransferResults is None and groups > 1:
        raise SettingsError(
            f"this model has {groups} KV cache groups, and this vLLM can be told of a failed load "
            "only with one: start it with --disable-hybrid-kv-cache-manager, or use vLLM 0.32"
        )
