"""The interface behind which a request completes: `decoded.receiver` or `decoded.virtual`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from decoded.core.events import Event
from decoded.core.request import Request


class Path(Protocol):
    """Both methods run on the event loop and return at once."""

    def start(self, request: Request) -> Sequence[Event]:
        """Begin with an accepted request.

        What is known already comes back as events, to be handled in the same turn;
        the rest follows through the daemon's dispatch.
        """

    def stop(self, request: Request) -> None:
        """The request has ended: forget it. Comes once per request, started or not."""
