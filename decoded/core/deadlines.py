"""A heap of deadlines, one live entry per request."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from .request import Request

_SLACK = 1_024


class Deadlines:
    """Earliest first. Moving or clearing a request's deadline leaves its old entry behind; such
    entries are skipped when they surface and swept out when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, request: Request, when: float) -> None:
        """Give `request` the deadline `when`, in place of the one it had."""
        if request.deadline == when:
            return
        request.deadline = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, request))

    def clear(self, request: Request) -> None:
        """The request has ended and waits for nothing."""
        request.deadline = math.inf

    def next(self) -> float | None:
        """The earliest live deadline, or None."""
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].deadline:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Request]:
        """Remove and yield each request whose deadline is `now` or earlier."""
        while (when := self.next()) is not None and when <= now:
            request = heapq.heappop(self._heap)[2]
            request.deadline = math.inf
            yield request

    def sweep(self, live: int) -> None:
        """Drop stale entries once there are more of them than live ones."""
        if len(self._heap) > 2 * live + _SLACK:
            self._heap = [entry for entry in self._heap if not self._stale(entry)]
            heapq.heapify(self._heap)

    def waiting(self) -> frozenset[int]:
        """Identities of the requests with a live entry. Linear; for `check()`."""
        return frozenset(id(entry[2]) for entry in self._heap if not self._stale(entry))

    @staticmethod
    def _stale(entry: tuple[float, int, Request]) -> bool:
        return entry[0] != entry[2].deadline
