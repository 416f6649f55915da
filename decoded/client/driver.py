"""A session and its socket: what both clients do whenever something happened."""

from __future__ import annotations

from collections import deque

from decoded.wire.link import Hello

from .dealer import Dealer
from .outcomes import Outcome
from .pacing import Limits
from .session import Answer, Session


class Driver:
    """Moves frames between a session and its socket. Not thread-safe, and never blocks."""

    def __init__(self, endpoint: str, hello: Hello, limits: Limits | None) -> None:
        self.session = Session(hello, limits)
        self.dealer = Dealer(endpoint)
        self.fd = self.dealer.fd
        """To be polled for reading; `reconnect` says when it has changed."""
        self._used = False

    def reconnect(self, now: float) -> bool:
        """Open a new socket if the session wants one. True if `fd` has changed."""
        if not self.session.wants_connection(now):
            return False
        changed, self._used = self._used, True
        if changed:
            self.dealer.reopen()
            self.fd = self.dealer.fd
        self.session.connected(now)
        return changed

    def exchange(
        self, now: float, outcomes: deque[Outcome], answers: list[tuple[int, Answer]]
    ) -> bool:
        """Send, receive, do what is due and hand over, until there is nothing left to send.

        True if frames arrived, or calls ended.
        """
        session, dealer = self.session, self.dealer
        arrived = False
        frames = session.take_frames()
        while True:
            # Every send is followed by a receive: see `Dealer`.
            if frames:
                dealer.send(frames)
            received = dealer.receive()
            for frame in received:
                session.receive(frame, now)
            # Not before: frames that are here already show that the daemon lives.
            session.tick(now)
            if received:
                outcomes.extend(session.take_outcomes())
            ended = session.take_answers()
            if ended:
                answers += ended
            arrived = arrived or bool(received or ended)
            frames = session.take_frames()
            if not frames:
                return arrived
