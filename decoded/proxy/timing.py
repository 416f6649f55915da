"""When what happened to a request: for the line that is logged at its end, and for its client."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping


class Timing:
    """Milliseconds since the request arrived, by event.

    `began`: `time.monotonic()` at its arrival; now, if none is given.
    """

    def __init__(self, began: float | None = None) -> None:
        self.began = time.monotonic() if began is None else began
        self.events: dict[str, float] = {}

    def note(self, event: str) -> None:
        """It happened now, if it has not before."""
        self.events.setdefault(event, self._now())

    def renote(self, event: str) -> None:
        """It happened now, and what was noted of it before is of no interest any more."""
        self.events[event] = self._now()

    def forget(self, event: str) -> None:
        """It has not happened, seen from here."""
        self.events.pop(event, None)

    def _now(self) -> float:
        return round((time.monotonic() - self.began) * 1000, 3)


def earliest(timings: Iterable[Timing]) -> dict[str, float]:
    """Each event at the first time that it happened to one of several parts."""
    found: dict[str, float] = {}
    for timing in timings:
        for event, at in timing.events.items():
            found[event] = min(at, found.get(event, at))
    return found


def server_timing(events: Mapping[str, float]) -> str:
    """The value of a Server-Timing header; the names are the events' without `_ms`."""
    return ", ".join(f"{event.removesuffix('_ms')};dur={at:g}" for event, at in events.items())
