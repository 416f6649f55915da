"""Everything that can happen to the core. Times are never in an event: `handle` takes `now`.

Nobody changes an event or an effect once it is made. They are not frozen all the same: that
makes each of them about four times as dear to construct, and there are six per request.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .request import RequestKey

Role = Literal["scheduler", "worker"]


class Seat(NamedTuple):
    """A place at an engine: its scheduler, or one of its worker ranks."""

    engine_id: str
    role: Role
    rank: int


@dataclass(slots=True)
class SessionOpened:
    """A client took a seat. A new `session` at a scheduler's seat starts the engine anew.

    `subscribe`: finished messages go to this seat. `expect_workers` (scheduler
    only): every worker rank must acknowledge each outcome too.
    """

    seat: Seat
    session: str
    world_size: int
    subscribe: bool = True
    expect_workers: bool = False


@dataclass(slots=True)
class SessionClosed:
    """The seat's client said good-bye, or was not heard in time."""

    seat: Seat
    session: str
    reason: str


@dataclass(slots=True)
class RankRegistered:
    """A rank's KV memory can be written to from now on, by registration `generation`.

    Generations grow from one registration to the next. One that cannot be taken
    (its worker is gone, or a newer one was announced) is answered with `Release`.
    """

    engine_id: str
    rank: int
    generation: int


@dataclass(slots=True)
class RankLost:
    """A rank's registration is over (unregistered, replaced, its worker gone)."""

    engine_id: str
    rank: int
    reason: str


@dataclass(slots=True)
class RankFenced:
    """Registration `generation` cannot be written through any more."""

    engine_id: str
    rank: int
    generation: int


@dataclass(slots=True)
class Submit:
    """The engine waits for KV. `blocks`: block ids per KV group, cached prefix included."""

    key: RequestKey
    external_id: str
    attempt: int
    blocks: tuple[array[int], ...]
    prompt_tokens: int
    cached_tokens: int
    virtual: bool
    params: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


@dataclass(slots=True)
class Cancel:
    """The engine wants its blocks back. `attempt` None means the live one."""

    key: RequestKey
    attempt: int | None = None


@dataclass(slots=True)
class Fulfilled:
    """The path has nothing (more) to fetch for this attempt."""

    key: RequestKey
    attempt: int
    why: str


@dataclass(slots=True)
class Deferred:
    """The path waits for the engine's registrations before it can start."""

    key: RequestKey
    attempt: int


@dataclass(slots=True)
class Started:
    """Producers are about to be told where to write: `ranks` ranks, as engine `generation`.

    Only if the request is in RECEIVING after this may anybody be told.
    """

    key: RequestKey
    attempt: int
    ranks: int
    generation: int


@dataclass(slots=True)
class StartFailed:
    """The path cannot take this attempt; nobody was told anything."""

    key: RequestKey
    attempt: int
    reason: str
    detail: str


@dataclass(slots=True)
class PrefillEnded:
    """The metaserver's call has come to an end.

    `ok`: DONE messages are due. `began`: a prefill may have written something
    (False for an unknown id or a call that never reached the proxy). `over`
    False: the call broke off without an answer, so the prefill may be running
    still, or not even have begun to write; that proves nothing, and only the
    request's deadline and its senders decide.
    """

    key: RequestKey
    attempt: int
    ok: bool
    began: bool
    detail: str
    over: bool = True


@dataclass(slots=True)
class SenderDone:
    """A P rank has written all layers to one of our ranks."""

    engine_id: str
    rank: int
    external_id: str
    trans_count: int
    sender: str


@dataclass(slots=True)
class SenderFailed:
    """A P rank gave up on one of our ranks."""

    engine_id: str
    rank: int
    external_id: str
    trans_count: int
    sender: str


@dataclass(slots=True)
class LayersIn:
    """Layer progress: layers `first` .. `first + count - 1` of a sender have arrived."""

    engine_id: str
    rank: int
    external_id: str
    trans_count: int
    sender: str
    first: int
    count: int


@dataclass(slots=True)
class Acknowledged:
    """A seat has everything up to and including `seq` of report log `log`."""

    seat: Seat
    log: int
    seq: int


@dataclass(slots=True)
class ShutdownBegan:
    """No new requests from now on."""


@dataclass(slots=True)
class ShutdownDue:
    """The time for requests in flight is over: what is left expires."""


@dataclass(slots=True)
class Tick:
    """Time has passed: fire what is due."""


Event = (
    SessionOpened
    | SessionClosed
    | RankRegistered
    | RankLost
    | RankFenced
    | Submit
    | Cancel
    | Fulfilled
    | Deferred
    | Started
    | StartFailed
    | PrefillEnded
    | SenderDone
    | SenderFailed
    | LayersIn
    | Acknowledged
    | ShutdownBegan
    | ShutdownDue
    | Tick
)
