"""Log lines that a peer could cause without end: a few of each are enough."""

from __future__ import annotations

from time import monotonic


class Throttle:
    """Lets `burst` lines through at once and one every `every_s` after that.

    `skipped` is how many were held back since the last one that passed.
    """

    def __init__(self, burst: int = 10, every_s: float = 1.0) -> None:
        self._burst = burst
        self._every_s = every_s
        self._left = float(burst)
        self._at = monotonic()
        self._held_back = 0
        self.skipped = 0

    def passes(self) -> bool:
        """True if a line may be logged now."""
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._at) / self._every_s)
        self._at = now
        if self._left < 1:
            self._held_back += 1
            return False
        self._left -= 1
        self.skipped, self._held_back = self._held_back, 0
        return True
