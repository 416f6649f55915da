"""A worker's half on a D engine: it registers its caches, and reports each load exactly once."""

from __future__ import annotations

from typing import Any

from decoded.client import Client

from ..caches import Caches
from ..half import Reports, WorkerHalf
from ..identity import engine_of, worker_rank
from ..settings import Settings
from .memory import arrange
from .metadata import Begun, DecodeMeta
from .seat import Seat

EARLY_KEPT = 1 << 14
"""Outcomes that are kept for loads this worker has yet to hear of."""


class Awaited:
    """The loads this worker has to report, and which of them have ended.

    An outcome may come twice (from the daemon, and from the scheduler) or before the
    scheduler has said that the load exists. Each load is reported when both its beginning
    and an outcome are known, and then forgotten: once, whatever comes when.
    """

    def __init__(self) -> None:
        self._begun: dict[str, Begun] = {}
        self._newest = 0
        self._early: dict[tuple[str, int], bool] = {}
        self._ended: list[tuple[Begun, bool]] = []

    def begin(self, begun: Begun) -> None:
        """A load is under way."""
        self._newest = max(self._newest, begun.attempt)
        ok = self._early.pop((begun.request_id, begun.attempt), None)
        if ok is None:
            self._begun[begun.request_id] = begun
        else:
            self._ended.append((begun, ok))

    def end(self, request_id: str, attempt: int, ok: bool) -> None:
        """A load has an outcome."""
        begun = self._begun.get(request_id)
        if begun is not None and begun.attempt == attempt:
            del self._begun[request_id]
            self._ended.append((begun, ok))
        elif attempt > self._newest:
            # Attempts are numbered in the order of their beginning: this one is yet to begin.
            self._early[request_id, attempt] = ok
            if len(self._early) > EARLY_KEPT:
                del self._early[next(iter(self._early))]

    def take(self) -> Reports:
        """What is to be reported now."""
        ended, self._ended = self._ended, []
        failed = [begun for begun, ok in ended if not ok]
        return Reports(
            ended={begun.request_id for begun, _ in ended},
            failed={begun.request_id for begun in failed},
            failed_blocks={block for begun in failed for block in begun.block_ids},
        )


class DecodeWorker(WorkerHalf[DecodeMeta]):
    """Registers with the daemon at start, which blocks; a step never does."""

    def __init__(self, settings: Settings, vllm_config: Any) -> None:
        self._settings = settings
        self._engine = engine_of(vllm_config)
        self._awaited = Awaited()
        self._seat: Seat | None = None

    def register(self, caches: Caches) -> None:
        """Have the daemon receive into these caches. Raises SettingsError, ClientError,
        LayoutError, RegionError, TransferError.
        """
        settings, rank = self._settings, worker_rank()
        if self._seat is not None:
            self._seat.close(for_good=False)
        arrangement = arrange(caches, settings)
        seat = Seat(lambda: self._client(rank), arrangement, self._engine.side_channel_port)
        seat.open(settings.connect_timeout_s)
        self._seat = seat

    def begin_step(self, meta: DecodeMeta) -> None:
        """What the scheduler says for this step."""
        for begun in meta.begun:
            self._awaited.begin(begun)
        for ended in meta.ended:
            if self._seat is not None and ended.boot is not None:
                self._seat.fence(ended.boot)
            self._awaited.end(ended.request_id, ended.attempt, ended.ok)

    def take_reports(self, finished_req_ids: set[str]) -> Reports:
        """What has ended since the last call."""
        if self._seat is not None:
            for outcome in self._seat.poll():
                self._awaited.end(outcome.request_id, outcome.attempt, outcome.ok)
        return self._awaited.take()

    def shutdown(self) -> None:
        """Unregister; idempotent."""
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.close(for_good=True)

    def _client(self, rank: int) -> Client:
        engine = self._engine
        return Client(
            self._settings.daemon_endpoint,
            engine.engine_id,
            "worker",
            rank,
            engine.world_size,
            name=f"vllm worker {rank}",
        )
