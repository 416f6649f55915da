"""What the connector counts, for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

OUTCOMES = ("done", "failed", "cancelled", "expired", "refused", "lost")
"""How loads end; `lost` are those that the engine gave up when its daemon was gone."""

PUSHES = ("done", "failed", "silent")
"""How pushes end, as in `decoded.producer.PushResult`."""

_SECONDS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class ConnectorStats(KVConnectorStats):
    """Counts since the last report.

    `data`: numbers that add up (`loads_STATE`, `load_tokens`, `pushes_STATE`, `push_bytes`)
    and lists of seconds (`load_seconds`, `push_seconds`). Absent is zero.
    """

    def add(self, key: str, number: float = 1) -> None:
        """Count."""
        self.data[key] = self.data.get(key, 0) + number

    def observe(self, key: str, value: float) -> None:
        """One more observation of a histogram."""
        self.data.setdefault(key, []).append(value)

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
        for key, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(key, []).extend(value)
            else:
                self.add(key, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: counts as they are, of durations the median and the longest."""
        reduced: dict[str, int | float] = {}
        for key, value in self.data.items():
            if isinstance(value, list):
                ordered = sorted(value)
                reduced[f"{key}_p50"] = round(ordered[len(ordered) // 2], 4)
                reduced[f"{key}_max"] = round(ordered[-1], 4)
            else:
                reduced[key] = value
        return reduced

    def is_empty(self) -> bool:
        return not self.data


class ConnectorMetrics(KVConnectorPromMetrics):
    """The Prometheus metrics `vllm:decoded_*`, one set per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = self._counter_cls, self._histogram_cls
        loads = counter(
            name="vllm:decoded_loads",
            documentation="KV loads that ended, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )
        pushes = counter(
            name="vllm:decoded_pushes",
            documentation="KV pushes of this P engine's ranks that ended, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )
        sums = {
            "load_tokens": counter(
                name="vllm:decoded_load_tokens",
                documentation="Prompt tokens whose KV was loaded, of loads that are done.",
                labelnames=labelnames,
            ),
            "push_bytes": counter(
                name="vllm:decoded_push_bytes",
                documentation="Bytes of KV that this P engine's ranks wrote.",
                labelnames=labelnames,
            ),
        }
        times = {
            "load_seconds": histogram(
                name="vllm:decoded_load_seconds",
                documentation="Time from submitting a load to its end, in seconds.",
                buckets=_SECONDS,
                labelnames=labelnames,
            ),
            "push_seconds": histogram(
                name="vllm:decoded_push_seconds",
                documentation="Time from opening a push to its end, in seconds.",
                buckets=_SECONDS,
                labelnames=labelnames,
            ),
        }
        self._adders: dict[tuple[int, str], Any] = {}
        self._observers: dict[tuple[int, str], Any] = {}
        for engine, values in per_engine_labelvalues.items():
            for outcome in OUTCOMES:
                self._adders[engine, f"loads_{outcome}"] = loads.labels(*values, outcome)
            for outcome in PUSHES:
                self._adders[engine, f"pushes_{outcome}"] = pushes.labels(*values, outcome)
            for key, metric in sums.items():
                self._adders[engine, key] = metric.labels(*values)
            for key, metric in times.items():
                self._observers[engine, key] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            if isinstance(value, list):
                for each in value:
                    self._observers[engine_idx, key].observe(each)
            else:
                self._adders[engine_idx, key].inc(value)
