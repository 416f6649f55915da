"""Who is connected to the engine link."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from decoded.core.events import Seat
from decoded.wire.link import Hello


@dataclass(slots=True)
class Session:
    """One client at its seat. `identity`: its ROUTER identity, which changes when it reconnects.

    `log` and `sent`: the report log this session reads and the last outcome sent to it.
    """

    identity: bytes
    seat: Seat
    hello: Hello
    heard_at: float
    reachable: bool = True
    log: int = 0
    sent: int = 0


class Sessions:
    """Sessions by identity and by seat; one per seat."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Session] = {}
        self._by_seat: dict[Seat, Session] = {}

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_identity.values()))

    def by_identity(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def by_seat(self, seat: Seat) -> Session | None:
        return self._by_seat.get(seat)

    def of_engine(self, engine_id: str) -> list[Session]:
        return [s for s in self._by_identity.values() if s.seat.engine_id == engine_id]

    def add(self, session: Session) -> None:
        """Seat a session, in place of whoever had that identity or seat."""
        for other in (self._by_identity.get(session.identity), self._by_seat.get(session.seat)):
            if other is not None:
                self.remove(other)
        self._by_identity[session.identity] = session
        self._by_seat[session.seat] = session

    def remove(self, session: Session) -> None:
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]
        if self._by_seat.get(session.seat) is session:
            del self._by_seat[session.seat]
