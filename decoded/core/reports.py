"""The numbered log of outcomes of one engine, kept until every seat has acknowledged them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

from .events import Seat
from .request import Outcome


class ReportLog:
    """Outcomes `base + 1` .. `last`, and how far each seat has acknowledged.

    `log` tells logs of one core apart: an engine that starts anew gets a new log,
    so that an acknowledgement for the old one cannot trim it. `acknowledged` is
    for reading only.
    """

    def __init__(self, log: int) -> None:
        self.log = log
        self.base = 0
        self.acknowledged: dict[Seat, int] = {}
        self._readers: dict[Seat, str | None] = {}
        self._outcomes: deque[Outcome] = deque()
        self._newest: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def last(self) -> int:
        """The number of the newest outcome; 0 when there never was one."""
        return self.base + len(self._outcomes)

    def append(self, outcome: Outcome) -> int:
        """Add an outcome and return its number. With no seat to wait for it is not kept."""
        if not self.acknowledged:
            self.base += 1
            return self.base
        self._outcomes.append(outcome)
        seq = self.last
        self._newest[outcome.request_id] = outcome.attempt, seq
        return seq

    def since(self, first: int, limit: int) -> list[Outcome]:
        """At most `limit` outcomes, from number `first` on (or the oldest that is kept)."""
        start = max(first - self.base - 1, 0)
        return list(islice(self._outcomes, start, start + limit))

    def wait_for(self, readers: Mapping[Seat, str | None]) -> None:
        """Wait for these seats and no others from now on.

        The value tells who sits there, None while nobody does. A seat that is new,
        or has a new reader, begins with the oldest kept outcome.
        """
        acknowledged = {}
        for seat, reader in readers.items():
            known = self.acknowledged.get(seat)
            before = self._readers.get(seat)
            if known is None or (reader and before and reader != before):
                known = self.base
            acknowledged[seat] = known
        self._readers = {seat: who or self._readers.get(seat) for seat, who in readers.items()}
        self.acknowledged = acknowledged
        self._trim()

    def acknowledge(self, seat: Seat, seq: int) -> bool:
        """Note that `seat` has everything up to `seq`. False if that cannot be."""
        known = self.acknowledged.get(seat)
        if known is None or seq > self.last:
            return False
        if seq > known:
            self.acknowledged[seat] = seq
            if known == self.base:
                self._trim()
        return True

    def remembers(self, request_id: str) -> bool:
        """Whether an outcome of that request is kept."""
        return request_id in self._newest

    def last_attempt(self, request_id: str) -> int:
        """The attempt of the newest kept outcome of that request, 0 without one."""
        return self._newest.get(request_id, (0, 0))[0]

    def awaits(self, seat: Seat, request_id: str, attempt: int) -> bool:
        """True while the newest outcome of that request is of that attempt, and kept for `seat`.

        For a seat that reads nothing: while it is kept for anybody.
        """
        newest, seq = self._newest.get(request_id, (0, 0))
        return newest == attempt and seq > self.acknowledged.get(seat, self.base)

    def slowest(self) -> Seat | None:
        """The seat with the fewest acknowledgements, to be named in a refusal."""
        return min(self.acknowledged, key=self.acknowledged.__getitem__, default=None)

    def _trim(self) -> None:
        low = min(self.acknowledged.values(), default=self.last)
        while self.base < low:
            self.base += 1
            outcome = self._outcomes.popleft()
            if self._newest.get(outcome.request_id) == (outcome.attempt, self.base):
                del self._newest[outcome.request_id]
