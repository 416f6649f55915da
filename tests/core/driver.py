"""Drives a core in plain words: one engine, a clock the test moves, `check()` at each step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, TypeVar

from decoded.core import Core, CoreSettings
from decoded.core import events as ev
from decoded.core.effects import Effect, Refuse, Release, Report, Start, Stop
from decoded.core.request import Outcome, Request, RequestKey
from decoded.core.states import State

ENGINE = "engine"
SCHEDULER = ev.Seat(ENGINE, "scheduler", 0)
E = TypeVar("E")


def worker(rank: int) -> ev.Seat:
    return ev.Seat(ENGINE, "worker", rank)


def key(request_id: str = "r") -> RequestKey:
    return RequestKey(ENGINE, request_id)


def only(effects: Iterable[Effect], kind: type[E]) -> list[E]:
    """The effects of one kind, in order."""
    return [effect for effect in effects if isinstance(effect, kind)]


class Driver:
    """A core, its clock (`now`, seconds) and every effect it ever asked for."""

    def __init__(self, **settings: Any) -> None:
        self.core = Core(CoreSettings(**settings))
        self.now = 1_000.0
        self.effects: list[Effect] = []
        self.ranks = 1
        self._generation = 0

    @property
    def settings(self) -> CoreSettings:
        return self.core.settings

    def send(self, *events: ev.Event) -> list[Effect]:
        """Let these events happen now; the effects of these alone come back."""
        effects: list[Effect] = []
        for event in events:
            effects += self.core.handle(event, self.now)
            self.core.check()
        self.effects += effects
        return effects

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick whenever one is due."""
        until, effects = self.now + seconds, []
        while (due := self.core.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            effects += self.send(ev.Tick())
        self.now = until
        return effects + self.send(ev.Tick())

    # The engine

    def open(
        self,
        ranks: int = 1,
        *,
        session: str = "s1",
        subscribe: bool = True,
        expect_workers: bool = False,
        worker_subscribes: bool = True,
        register: bool = True,
    ) -> list[Effect]:
        """A scheduler and its workers say hello and, unless told otherwise, register their KV."""
        self.ranks = ranks
        effects = self.send(
            ev.SessionOpened(SCHEDULER, session, ranks, subscribe, expect_workers),
            *(self.worker_opened(rank, subscribe=worker_subscribes) for rank in range(ranks)),
        )
        for rank in range(ranks if register else 0):
            effects += self.register(rank)
        return effects

    def worker_opened(
        self, rank: int = 0, session: str = "w1", subscribe: bool = True
    ) -> ev.SessionOpened:
        return ev.SessionOpened(worker(rank), session, self.ranks, subscribe)

    def register(self, rank: int = 0) -> list[Effect]:
        self._generation += 1
        return self.send(ev.RankRegistered(ENGINE, rank, self._generation))

    @property
    def generation(self) -> int:
        return self._generation

    def close(self, seat: ev.Seat = SCHEDULER, session: str = "s1") -> list[Effect]:
        return self.send(ev.SessionClosed(seat, session, "gone"))

    def acknowledge(self, seq: int, seat: ev.Seat = SCHEDULER) -> list[Effect]:
        return self.send(ev.Acknowledged(seat, self.log.log, seq))

    @property
    def log(self) -> Any:
        return self.core.engines.by_id[ENGINE].log

    # A request

    def submit(
        self,
        request_id: str = "r",
        *,
        external: str | None = None,
        attempt: int = 1,
        virtual: bool = False,
        blocks: tuple[array[int], ...] | None = None,
        timeout_s: float | None = None,
    ) -> list[Effect]:
        return self.send(
            ev.Submit(
                key(request_id),
                external or f"x-{request_id}",
                attempt,
                blocks if blocks is not None else (array("q", range(1, 5)),),
                prompt_tokens=64,
                cached_tokens=0,
                virtual=virtual,
                timeout_s=timeout_s,
            )
        )

    def start(self, request_id: str = "r", attempt: int = 1) -> list[Effect]:
        """The path announces the request to producers."""
        return self.send(ev.Started(key(request_id), attempt, self.ranks, self.generation))

    def begin(self, request_id: str = "r", **submit: Any) -> list[Effect]:
        """Submit and announce: the request is RECEIVING."""
        effects = self.submit(request_id, **submit)
        effects += self.start(request_id, submit.get("attempt", 1))
        assert self.request(request_id).state is State.RECEIVING
        return effects

    def done(
        self, sender: str = "p", rank: int = 0, of: int = 1, external: str = "x-r"
    ) -> list[Effect]:
        return self.send(ev.SenderDone(ENGINE, rank, external, of, sender))

    def failed(
        self, sender: str = "p", rank: int = 0, of: int = 1, external: str = "x-r"
    ) -> list[Effect]:
        return self.send(ev.SenderFailed(ENGINE, rank, external, of, sender))

    def layers(
        self, first: int, count: int = 1, sender: str = "p", rank: int = 0, external: str = "x-r"
    ) -> list[Effect]:
        return self.send(ev.LayersIn(ENGINE, rank, external, 1, sender, first, count))

    def prefill_ended(
        self, *, ok: bool = True, began: bool = True, over: bool = True, attempt: int = 1
    ) -> list[Effect]:
        return self.send(ev.PrefillEnded(key(), attempt, ok, began, "HTTP", over))

    def cancel(self, request_id: str = "r", attempt: int | None = None) -> list[Effect]:
        return self.send(ev.Cancel(key(request_id), attempt))

    # What came of it

    def request(self, request_id: str = "r") -> Request:
        request = self.core.ledger.find(key(request_id))
        assert request is not None, f"{request_id} is not known"
        return request

    def state(self, request_id: str = "r") -> State:
        return self.request(request_id).state

    def outcomes(self, request_id: str = "r") -> list[Outcome]:
        """Every outcome ever reported for the id."""
        reports = only(self.effects, Report)
        return [r.outcome for r in reports if r.outcome.request_id == request_id]

    def outcome(self, request_id: str = "r") -> Outcome:
        """The one outcome reported for the id."""
        (outcome,) = self.outcomes(request_id)
        return outcome


def started(effects: Iterable[Effect]) -> list[str]:
    return [effect.request.key.request_id for effect in only(effects, Start)]


def stopped(effects: Iterable[Effect]) -> list[str]:
    return [effect.request.key.request_id for effect in only(effects, Stop)]


def refusals(effects: Iterable[Effect]) -> list[str]:
    return [effect.code for effect in only(effects, Refuse)]


def released(effects: Iterable[Effect]) -> list[tuple[int, int]]:
    return [(effect.rank, effect.generation) for effect in only(effects, Release)]
