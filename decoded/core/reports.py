"""The numbered log of outcomes of one engine, kept until every seat has acknowledged them."""

from __future__ import annotations

from collections import deque
from itertools import islice

from .events import Seat
from .request import Outcome


class ReportLog:
    """Outcomes `base + 1` .. `last`, and how far each seat has acknowledged.

    `log` tells logs of one core apart: an engine that starts anew gets a new log,
    so that an acknowledgement for the old one cannot trim it.
    """

    def __init__(self, log: int) -> None:
        self.log = log
        self.base = 0
        self.acknowledged: dict[Seat, int] = {}
        self._outcomes: deque[Outcome] = deque()

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def last(self) -> int:
        """The number of the newest outcome; 0 when there never was one."""
        return self.base + len(self._outcomes)

    def append(self, outcome: Outcome) -> int:
        """Add an outcome and return its number. With no seat to wait for it is not kept."""
        self._outcomes.append(outcome)
        seq = self.last
        if not self.acknowledged:
            self._trim()
        return seq

    def since(self, first: int, limit: int) -> list[Outcome]:
        """At most `limit` outcomes, from number `first` on (or the oldest that is kept)."""
        start = max(first - self.base - 1, 0)
        return list(islice(self._outcomes, start, start + limit))

    def join(self, seat: Seat) -> int:
        """Count `seat` among those to wait for, from the oldest kept outcome on.

        Returns the number that it has acknowledged.
        """
        return self.acknowledged.setdefault(seat, self.base)

    def leave(self, seat: Seat) -> None:
        """Wait for `seat` no longer."""
        if self.acknowledged.pop(seat, None) is not None:
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

    def slowest(self) -> Seat | None:
        """The seat with the fewest acknowledgements, to be named in a refusal."""
        return min(self.acknowledged, key=self.acknowledged.__getitem__, default=None)

    def _trim(self) -> None:
        low = min(self.acknowledged.values(), default=self.last)
        for _ in range(low - self.base):
            self._outcomes.popleft()
        self.base = max(self.base, low)
