"""Sending refused messages: each scheduler gets what was refused in one turn in few messages."""

from __future__ import annotations

from collections import Counter

from decoded.wire import link as wire

from .router import RouterSocket, Unreachable
from .sessions import Session

# Refusals in one message, and refusals kept for a session that does not read.
BATCH = 1_024
MAX_WAITING = 65_536


class RefusalSender:
    """Keeps refusals until the session can take them.

    A refused submit has no outcome, so a refusal that is lost lets the engine wait:
    it is dropped (and counted) only for a client that is gone or reads nothing at all.
    """

    def __init__(self, router: RouterSocket, counters: Counter[str]) -> None:
        self._router = router
        self._counters = counters
        self._pending: dict[bytes, list[wire.Refusal]] = {}

    def add(self, session: Session, refusal: wire.Refusal) -> None:
        waiting = self._pending.setdefault(session.identity, [])
        if len(waiting) < MAX_WAITING:
            waiting.append(refusal)
        else:
            self._counters["refusals_dropped"] += 1

    def flush(self) -> None:
        """Send what can be sent; the rest is tried again the next time."""
        if not self._pending:
            return
        for identity in list(self._pending):
            waiting = self._pending[identity]
            while waiting:
                try:
                    if not self._router.send(identity, wire.encode(wire.Refused(waiting[:BATCH]))):
                        break
                except Unreachable:
                    self._counters["refusals_dropped"] += len(waiting)
                    waiting.clear()
                del waiting[:BATCH]
            if not waiting:
                del self._pending[identity]
