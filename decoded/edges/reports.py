"""Sending finished messages: each session gets its engine's report log, in order, in batches."""

from __future__ import annotations

from decoded.core.engines import Engine, Engines
from decoded.core.events import Seat
from decoded.core.request import Outcome
from decoded.core.states import State
from decoded.wire import link as wire

from .router import RouterSocket, Unreachable
from .sessions import Session, Sessions

# Outcomes in one message, and outcomes sent to one session but not yet acknowledged.
BATCH = 1_024
WINDOW = 65_536

_STATES: dict[State, wire.OutcomeState] = {
    State.DONE: "done",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
    State.EXPIRED: "expired",
}


class ReportSender:
    """Keeps, per session, how much of the report log was sent.

    The log itself is the core's: what a session has not acknowledged stays there, so
    nothing is copied here and a full or closed connection loses nothing.
    """

    def __init__(
        self, router: RouterSocket, sessions: Sessions, engines: Engines, boot: str
    ) -> None:
        self._router = router
        self._sessions = sessions
        self._engines = engines
        self._boot = boot
        self._grown: set[str] = set()

    def log_name(self, log: int) -> str:
        """A report log's name on the wire; no other start of a daemon uses it."""
        return f"{self._boot}.{log}"

    def grown(self, engine_id: str) -> None:
        self._grown.add(engine_id)

    def attach(self, session: Session, engine: Engine) -> None:
        """Let a new session begin with the first outcome that its seat has not acknowledged."""
        log = engine.log
        session.log = log.log
        session.sent = log.acknowledged.get(session.seat, log.last)
        self._grown.add(engine.engine_id)

    def rewind(self, seat: Seat, first: int) -> None:
        session = self._sessions.by_seat(seat)
        if session is not None:
            session.sent = min(session.sent, first - 1)
            self._grown.add(seat.engine_id)

    def flush(self) -> None:
        """Send everything that is new to each session that can take it."""
        if not self._grown:
            return
        grown, self._grown = self._grown, set()
        for engine_id in grown:
            engine = self._engines.get(engine_id)
            if engine is None:
                continue
            encoded: dict[tuple[int, int], bytes] = {}
            for session in self._sessions.of_engine(engine_id):
                if session.reachable and session.hello.subscribe:
                    self._send(session, engine, encoded)

    def _send(
        self, session: Session, engine: Engine, encoded: dict[tuple[int, int], bytes]
    ) -> None:
        log = engine.log
        if session.log != log.log:
            self.attach(session, engine)
        limit = log.acknowledged.get(session.seat, log.base) + WINDOW
        while session.sent < log.last and session.sent < limit:
            first = max(session.sent, log.base) + 1
            count = min(BATCH, log.last - first + 1)
            frame = encoded.get((first, count))
            if frame is None:
                items = [item(outcome) for outcome in log.since(first, count)]
                frame = wire.encode(wire.Finished(self.log_name(log.log), first, items))
                encoded[first, count] = frame
            try:
                if not self._router.send(session.identity, frame):
                    return
            except Unreachable:
                session.reachable = False
                return
            session.sent = first + count - 1


def item(outcome: Outcome) -> wire.OutcomeItem:
    """An outcome as it stands on the wire."""
    return wire.OutcomeItem(
        outcome.request_id,
        outcome.external_id,
        outcome.attempt,
        _STATES[outcome.state],
        outcome.reason,
        outcome.detail,
        outcome.elapsed_s,
    )
