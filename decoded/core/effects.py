"""Everything the core can ask of the edges."""

from __future__ import annotations

from dataclasses import dataclass

from .events import Seat
from .request import Outcome, Request, RequestKey


@dataclass(slots=True)
class Start:
    """Hand the request to its path: at its submit, or at a later tick if it was held."""

    request: Request


@dataclass(slots=True)
class Stop:
    """The request has ended: the path forgets it and closes what it holds open for it.

    No event about this attempt may follow: the engine may use id and attempt again.
    """

    request: Request


@dataclass(slots=True)
class Report:
    """A request has ended: `seq` was added to the engine's report log.

    `seq` 0: its scheduler has been replaced since, and nobody is left to be told.
    """

    request: Request
    outcome: Outcome
    seq: int


@dataclass(slots=True)
class Resend:
    """Send the seat everything in its engine's report log from `first` on."""

    seat: Seat
    first: int


@dataclass(slots=True)
class Refuse:
    """The submit was not accepted; it will have no outcome."""

    key: RequestKey
    attempt: int
    code: str
    detail: str


@dataclass(slots=True)
class Fence:
    """Registration `generation` of this rank is over: shut writers out, if that can be done."""

    engine_id: str
    rank: int
    generation: int


@dataclass(slots=True)
class Release:
    """No request uses registration `generation` of this rank any more: free its memory."""

    engine_id: str
    rank: int
    generation: int


Effect = Start | Stop | Report | Resend | Refuse | Fence | Release
