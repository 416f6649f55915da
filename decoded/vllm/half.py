"""What the connector asks of its half, whichever engine's and process's that is.

Where a kind of engine has nothing to do, that is what these say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from .caches import Caches
from .stats import ConnectorStats

Meta = TypeVar("Meta", bound=KVConnectorMetadata)
"""What a step's scheduler tells its workers."""


@dataclass
class Reports:
    """What a step reports. `sent`: ids whose blocks nobody reads any more. `ended`: ids whose
    loads ended; `failed`: those of them that failed, and `failed_blocks` what was to be
    loaded for these.
    """

    sent: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Half(ABC):
    """Common to both processes."""

    def take_stats(self) -> ConnectorStats | None:
        """What was counted since the last call; None if nothing ever is."""
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Stop; idempotent."""


class SchedulerHalf(Half, Generic[Meta]):
    """In the engine core's process."""

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """(tokens of the prompt to be loaded, whether asynchronously)."""
        return 0, False

    @abstractmethod
    def after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A request has its blocks."""

    @abstractmethod
    def build_meta(self, scheduler_output: Any) -> Meta:
        """What the workers are to know of this step."""

    @abstractmethod
    def output(self, connector_output: Any) -> None:
        """What every worker has reported."""

    @abstractmethod
    def finished(self, request: Any) -> bool:
        """A request is over. True: its blocks stay until its workers report it as sent."""


class WorkerHalf(Half, Generic[Meta]):
    """In a worker's process."""

    @abstractmethod
    def register(self, caches: Caches) -> None:
        """Begin, with these caches."""

    def preempted(self, meta: Meta) -> None:
        """This step overwrites blocks; it comes before `begin_step`."""

    @abstractmethod
    def begin_step(self, meta: Meta) -> None:
        """What the scheduler says for this step, before its forward pass."""

    def save_layer(self, name: str) -> None:
        """Attention of a layer has been computed, or queued on the device."""

    def end_step(self) -> None:
        """The forward pass is over."""

    @abstractmethod
    def take_reports(self, finished_req_ids: set[str]) -> Reports:
        """What this step reports. `finished_req_ids`: requests that vLLM is done with."""
