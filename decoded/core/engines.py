"""The engines that the daemon serves: their seats, registrations and report logs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Seat, SessionOpened
from .reports import ReportLog
from .request import Request, RequestKey


@dataclass(slots=True)
class Engine:
    """One engine. `ranks`: current generation per registered rank. `retiring`: lost
    registrations, each with the requests that may still be written through it.
    `writable`: registrations, current or lost, that writers are not shut out of.
    """

    engine_id: str
    world_size: int
    log: ReportLog
    scheduler_session: str | None = None
    expect_workers: bool = False
    sessions: dict[Seat, str] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    retiring: dict[tuple[int, int], set[RequestKey]] = field(default_factory=dict)
    writable: set[tuple[int, int]] = field(default_factory=set)
    live: int = 0

    @property
    def ready(self) -> bool:
        """Every rank is registered."""
        return len(self.ranks) == self.world_size

    @property
    def generation(self) -> int:
        """The newest registration; it names this set of addresses to producers."""
        return max(self.ranks.values(), default=0)

    @property
    def idle(self) -> bool:
        """Nobody is connected, nothing is registered and no request is in flight."""
        return not (self.sessions or self.ranks or self.retiring or self.live)

    def fenced(self, request: Request) -> bool:
        """No registration that producers were given for `request` can be written through."""
        return not any(
            rank < request.ranks and generation <= request.generation
            for rank, generation in self.writable
        )

    def open(self, event: SessionOpened) -> None:
        """Seat a client, and decide for whose acknowledgements outcomes are kept."""
        seat = event.seat
        if self.sessions.get(seat) != event.session:
            self.log.leave(seat)
        self.sessions[seat] = event.session
        if event.subscribe:
            self.log.join(seat)
        if seat.role == "scheduler":
            self.scheduler_session = event.session
            self.expect_workers = event.expect_workers
            if event.expect_workers:
                for rank in range(self.world_size):
                    self.log.join(Seat(self.engine_id, "worker", rank))

    def close(self, seat: Seat) -> None:
        """The seat's client is gone; a worker that is expected back stays waited for."""
        self.sessions.pop(seat, None)
        scheduler = Seat(self.engine_id, "scheduler", 0)
        if seat.role == "worker" and self.expect_workers and scheduler in self.sessions:
            return
        self.log.leave(seat)
        if seat == scheduler:
            for other in list(self.log.acknowledged):
                if other not in self.sessions:
                    self.log.leave(other)


class Engines:
    """All engines by id. Report logs are numbered across engines."""

    def __init__(self) -> None:
        self.by_id: dict[str, Engine] = {}
        self._logs = 0

    def get(self, engine_id: str) -> Engine | None:
        return self.by_id.get(engine_id)

    def open(self, event: SessionOpened) -> tuple[Engine, bool]:
        """The event's engine, and whether its scheduler has started anew."""
        seat = event.seat
        engine = self.by_id.get(seat.engine_id)
        if engine is None:
            engine = Engine(seat.engine_id, event.world_size, self._new_log())
            self.by_id[seat.engine_id] = engine
        anew = seat.role == "scheduler" and engine.scheduler_session not in (None, event.session)
        if anew:
            engine.log = self._new_log()
            for other, session in engine.sessions.items():
                if other != seat and session:
                    engine.log.join(other)
        engine.world_size = event.world_size
        engine.open(event)
        return engine, anew

    def forget_if_idle(self, engine: Engine) -> None:
        """Drop an engine of which nothing is left."""
        if engine.idle:
            self.by_id.pop(engine.engine_id, None)

    def _new_log(self) -> ReportLog:
        self._logs += 1
        return ReportLog(self._logs)
