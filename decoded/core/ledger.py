"""The ledger: every live request, and a bounded memory of those that ended."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from .request import Request, RequestKey

ExternalKey = tuple[str, str]


class Ledger:
    """Live requests by internal and external id, and what is remembered of ended ones.

    `tombstones`: the last use of each internal id. `announced`: the last use of each
    external id that producers were told of; uses that never got that far do not
    replace it, for its senders may still speak. Both oldest first and bounded. `age_at`: when
    `age` next has something to do.
    """

    def __init__(self, max_tombstones: int, tombstone_age_s: float) -> None:
        self._max_tombstones = max_tombstones
        self._tombstone_age_s = tombstone_age_s
        self.age_at = math.inf
        self.live: dict[RequestKey, Request] = {}
        self.by_external: dict[ExternalKey, Request] = {}
        self.tombstones: OrderedDict[RequestKey, Request] = OrderedDict()
        self.announced: OrderedDict[ExternalKey, Request] = OrderedDict()

    def find(self, key: RequestKey) -> Request | None:
        """The live request of that key, else its tombstone."""
        return self.live.get(key) or self.tombstones.get(key)

    def handed(self, key: RequestKey, attempt: int) -> Request | None:
        """The live request of that key and attempt, if its path was told to start."""
        request = self.live.get(key)
        if request is None or request.attempt != attempt or not request.handed:
            return None
        return request

    def earlier(self, request: Request) -> Request | None:
        """The last use of the request's external id whose senders may still speak up."""
        return self.announced.get((request.key.engine_id, request.external_id))

    def of_engine(self, engine_id: str) -> Iterator[Request]:
        """The live requests of one engine, as they were when asked."""
        return (request for key, request in list(self.live.items()) if key.engine_id == engine_id)

    def add(self, request: Request) -> None:
        """Enter an accepted request."""
        self.live[request.key] = request
        self.by_external[request.key.engine_id, request.external_id] = request

    def bury(self, request: Request) -> None:
        """Turn an ended request into a tombstone, and forget the oldest past the bounds."""
        external = request.key.engine_id, request.external_id
        del self.live[request.key]
        del self.by_external[external]
        request.blocks = ()
        request.params = {}
        self.tombstones.pop(request.key, None)
        self.tombstones[request.key] = request
        self.age_at = min(self.age_at, request.ended_at + self._tombstone_age_s)
        if len(self.tombstones) > self._max_tombstones:
            self.tombstones.popitem(last=False)
        if request.announced:
            self.announced.pop(external, None)
            self.announced[external] = request
            if len(self.announced) > self._max_tombstones:
                self.announced.popitem(last=False)

    def age(self, now: float) -> None:
        """Forget what ended too long ago."""
        self.age_at = math.inf
        for ended in (self.tombstones, self.announced):
            while ended:
                until = next(iter(ended.values())).ended_at + self._tombstone_age_s
                if now <= until:
                    self.age_at = min(self.age_at, until)
                    break
                ended.popitem(last=False)
