"""When what happened to a request, for the line that is logged at its end."""

from __future__ import annotations

import time


class Timing:
    """Milliseconds since the request arrived, by event; the first time that each happened."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.events: dict[str, float] = {}

    def note(self, event: str) -> None:
        """It happened now, if it has not before."""
        self.events.setdefault(event, round((time.monotonic() - self._began) * 1000, 3))
