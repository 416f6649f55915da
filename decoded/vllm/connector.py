"""The connector that vLLM loads: a facade over four halves, two for each role of an engine.

A process has one half. What vLLM asks of the other kind of engine is answered with
nothing to do.
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
from .decode.metadata import DecodeMeta
from .decode.scheduler import DecodeScheduler
from .decode.worker import DecodeWorker, Reports
from .prefill.metadata import PrefillMeta
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

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = read_settings(vllm_config)
        self._config = kv_cache_config
        self._reports = Reports(set(), set(), set())
        self._decode_scheduler: DecodeScheduler | None = None
        self._decode_worker: DecodeWorker | None = None
        self._prefill_scheduler: PrefillScheduler | None = None
        self._prefill_worker: PrefillWorker | None = None
        if vllm_config.kv_transfer_config.kv_role == "kv_consumer":
            _check_failures_can_be_reported(kv_cache_config)
            if role is KVConnectorRole.SCHEDULER:
                self._decode_scheduler = DecodeScheduler(settings, vllm_config, kv_cache_config)
            else:
                self._decode_worker = DecodeWorker(settings, vllm_config)
        elif role is KVConnectorRole.SCHEDULER:
            self._prefill_scheduler = PrefillScheduler(settings, vllm_config, kv_cache_config)
        else:
            self._prefill_worker = PrefillWorker(settings, vllm_config, kv_cache_config)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        caches = read_caches(kv_caches, self._config)
        if self._decode_worker is not None:
            self._decode_worker.register(caches)
        elif self._prefill_worker is not None:
            self._prefill_worker.register(caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._prefill_worker is not None:
            assert isinstance(kv_connector_metadata, PrefillMeta)
            self._prefill_worker.preempted(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        # Here, not in start_load_kv, which 0.32 calls only after the forward pass.
        super().bind_connector_metadata(connector_metadata)
        if self._decode_worker is not None:
            assert isinstance(connector_metadata, DecodeMeta)
            self._decode_worker.begin_step(connector_metadata)
        elif self._prefill_worker is not None:
            assert isinstance(connector_metadata, PrefillMeta)
            self._prefill_worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The daemon has been at it since the scheduler's half submitted the request."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded during a forward pass: a request runs once its KV is whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._prefill_worker is not None:
            self._prefill_worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        if self._prefill_worker is not None:
            self._prefill_worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._prefill_worker is not None:
            return self._prefill_worker.finished_sending(finished_req_ids) or None, None
        if self._decode_worker is not None:
            self._reports = self._decode_worker.take_reports()
            return None, self._reports.ended or None
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        sent, received = self.get_finished(finished_req_ids)
        failed = self._reports.failed if received else set()
        return TransferResults(
            finished_sending=sent or set(),
            finished_recving=received or set(),
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        # Where requests can be reported blocks must not be: they would count twice.
        if TransferResults is not None:
            return set()
        blocks, self._reports.failed_blocks = self._reports.failed_blocks, set()
        return blocks

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._decode_scheduler is not None:
            return self._decode_scheduler.matched_tokens(request, num_computed_tokens)
        return 0, False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All of them: P sends the request's own blocks."""
        return transfer_groups(self._config)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._decode_scheduler is not None:
            self._decode_scheduler.after_alloc(request, blocks, num_external_tokens)
        elif self._prefill_scheduler is not None:
            self._prefill_scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._decode_scheduler is not None:
            return self._decode_scheduler.build_meta()
        assert self._prefill_scheduler is not None, "workers build no metadata"
        return self._prefill_scheduler.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        if self._decode_scheduler is not None:
            self._decode_scheduler.output(connector_output)
        elif self._prefill_scheduler is not None:
            self._prefill_scheduler.output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._decode_scheduler is not None:
            self._decode_scheduler.finished(request)
            return False, None
        assert self._prefill_scheduler is not None, "workers finish no requests"
        return self._prefill_scheduler.finished(request, block_ids)

    # Both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        counting = self._decode_scheduler or self._prefill_worker
        stats = None if counting is None else counting.take_stats()
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
        for half in (
            self._decode_scheduler,
            self._decode_worker,
            self._prefill_scheduler,
            self._prefill_worker,
        ):
            if half is not None:
                half.shutdown()


def _check_failures_can_be_reported(kv_cache_config: Any) -> None:
    groups = len(kv_cache_config.kv_cache_groups)
    if TransferResults is None and groups > 1:
        raise SettingsError(
            f"this model has {groups} KV cache groups, and this vLLM can be told of a failed load "
            "only with one: start it with --disable-hybrid-kv-cache-manager, or use vLLM 0.32"
        )
