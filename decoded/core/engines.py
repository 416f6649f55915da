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
    `newest`: the last generation of each rank, `announced` the last one that producers
    were told of: neither comes back, for producers keep addresses under it.
    """

    engine_id: str
    world_size: int
    log: ReportLog
    scheduler_session: str | None = None
    expect_workers: bool = False
    sessions: dict[Seat, str] = field(default_factory=dict)
    subscribers: set[Seat] = field(default_factory=set)
    ranks: dict[int, int] = field(default_factory=dict)
    retiring: dict[tuple[int, int], set[RequestKey]] = field(default_factory=dict)
    writable: set[tuple[int, int]] = field(default_factory=set)
    newest: dict[int, int] = field(default_factory=dict)
    announced: int = 0
    live: int = 0
    scheduler: Seat = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Seat(self.engine_id, "scheduler", 0)

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

    def fresh(self, rank: int, generation: int) -> bool:
        """True if `generation` can name a new registration of `rank` to producers."""
        return generation > max(self.announced, self.newest.get(rank, 0))

    def carries(self, ranks: int, generation: int) -> bool:
        """The first `ranks` ranks are registered, and `generation` names that set."""
        return generation == self.generation and all(rank in self.ranks for rank in range(ranks))

    def fenced(self, request: Request) -> bool:
        """No registration that producers were given for `request` can be written through."""
        return not any(
            rank < request.ranks and generation <= request.generation
            for rank, generation in self.writable
        )

    def open(self, event: SessionOpened) -> None:
        """Seat a client."""
        seat = event.seat
        self.sessions[seat] = event.session
        self.subscribers.discard(seat)
        if event.subscribe:
            self.subscribers.add(seat)
        if seat.role == "scheduler":
            self.scheduler_session = event.session
            self.expect_workers = event.expect_workers
        self._wait_for_readers()

    def close(self, seat: Seat) -> None:
        """The seat's client is gone; a worker that is expected back stays waited for."""
        del self.sessions[seat]
        self.subscribers.discard(seat)
        self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """Keep outcomes for those who read them and, if the scheduler says so, for every worker."""
        readers: dict[Seat, str | None] = {
            seat: session for seat, session in self.sessions.items() if seat in self.subscribers
        }
        if self.expect_workers and self.scheduler in self.sessions:
            for rank in range(self.world_size):
                seat = Seat(self.engine_id, "worker", rank)
                readers[seat] = self.sessions.get(seat)
        self.log.wait_for(readers)


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
