"""The ledger: every live request, and a bounded memory of those that ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .request import Request, RequestKey

ExternalKey = tuple[str, str]


class Ledger:
    """Live requests by internal and external id; tombstones by both, oldest first."""

    def __init__(self, max_tombstones: int, tombstone_age_s: float) -> None:
        self._max_tombstones = max_tombstones
        self._tombstone_age_s = tombstone_age_s
        self.live: dict[RequestKey, Request] = {}
        self.by_external: dict[ExternalKey, Request] = {}
        self.tombstones: OrderedDict[RequestKey, Request] = OrderedDict()
        self.ended_external: dict[ExternalKey, Request] = {}

    def find(self, key: RequestKey) -> Request | None:
        """The live request of that key, else its tombstone."""
        return self.live.get(key) or self.tombstones.get(key)

    def find_attempt(self, key: RequestKey, attempt: int) -> Request | None:
        """The live request of that key and attempt."""
        request = self.live.get(key)
        return request if request is not None and request.attempt == attempt else None

    def of_engine(self, engine_id: str) -> Iterator[Request]:
        """The live requests of one engine, as they were when asked."""
        return (request for key, request in list(self.live.items()) if key.engine_id == engine_id)

    def add(self, request: Request) -> None:
        """Enter an accepted request."""
        self.live[request.key] = request
        self.by_external[request.key.engine_id, request.external_id] = request

    def bury(self, request: Request, now: float) -> None:
        """Turn an ended request into a tombstone, and drop tombstones past the bounds."""
        external = request.key.engine_id, request.external_id
        del self.live[request.key]
        del self.by_external[external]
        request.blocks = ()
        request.params = {}
        request.fence = None
        earlier = self.tombstones.pop(request.key, None)
        if earlier is not None:
            self._forget_external(earlier)
        self.tombstones[request.key] = request
        self.ended_external[external] = request
        while len(self.tombstones) > self._max_tombstones:
            self._drop_oldest()
        self.age(now)

    def age(self, now: float) -> None:
        """Drop tombstones that are too old."""
        while self.tombstones:
            oldest = next(iter(self.tombstones.values()))
            if now - oldest.ended_at <= self._tombstone_age_s:
                return
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._forget_external(self.tombstones.popitem(last=False)[1])

    def _forget_external(self, request: Request) -> None:
        external = request.key.engine_id, request.external_id
        if self.ended_external.get(external) is request:
            del self.ended_external[external]
