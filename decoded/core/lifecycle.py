"""The life of requests: the only place that moves one from state to state, by the table."""

from __future__ import annotations

import math
from collections import Counter

from . import reasons
from .deadlines import Deadlines
from .effects import Effect, Release, Report, Start, Stop
from .engines import Engine, Engines
from .ledger import Ledger
from .request import Prefill, Request
from .settings import CoreSettings
from .states import State, Trigger, transition

_ENDED = {state: f"ended_{state.value}" for state in State if state.terminal}


class Lifecycle:
    """Begins, moves and ends requests, and keeps ledger, deadlines and engines in step.

    What that asks of the edges is appended to `effects`.
    """

    def __init__(self, settings: CoreSettings, counters: Counter[str]) -> None:
        self.engines = Engines()
        self.ledger = Ledger(settings.max_tombstones, settings.tombstone_age_s)
        self.deadlines = Deadlines()
        self.effects: list[Effect] = []
        self._settings = settings
        self._counters = counters

    def begin(self, engine: Engine, request: Request, now: float) -> None:
        """Enter an accepted request and hand it to its path."""
        self.ledger.add(request)
        engine.live += 1
        self.hand_over(request, now)

    def hand_over(self, request: Request, now: float) -> None:
        """Tell the path to start, or wait until nobody repeats an earlier use's last words.

        A producer that missed our ACK says DONE again, and the wire names no attempt.
        """
        quiet_at = now if request.virtual else self._quiet_at(request)
        if quiet_at > now:
            self.deadlines.set(request, min(quiet_at, request.expires_at))
            self.note(request, now, "held", "senders of an earlier use may still repeat themselves")
            return
        request.handed = True
        self.deadlines.set(request, request.expires_at)
        self.effects.append(Start(request))

    def announce(self, request: Request, ranks: int, generation: int, now: float) -> None:
        """Let producers know where to write, unless somebody could take it for something else."""
        engine = self.engines.by_id[request.key.engine_id]
        if ranks < 1 or not engine.carries(ranks, generation):
            detail = "the registrations changed while it was being started"
            self.move(request, Trigger.PATH_FAILED, now, reasons.REGISTRATION_LOST, detail)
            return
        earlier = self.ledger.earlier(request)
        if earlier is not None and (not earlier.writers_gone or self._quiet_at(request) > now):
            detail = f"senders of attempt {earlier.attempt} may still answer for this external id"
            self.move(request, Trigger.PATH_FAILED, now, reasons.STALE_WRITERS, detail)
            return
        request.reason = request.detail = ""
        request.ranks, request.generation = ranks, generation
        request.started_at = now
        request.prefill = Prefill.RUNNING
        engine.announced = max(engine.announced, generation)
        self.move(request, Trigger.STARTED, now, "", f"generation {generation}")

    def move(
        self, request: Request, trigger: Trigger, now: float, reason: str, detail: str
    ) -> bool:
        """Apply the table. False where the state absorbs the trigger.

        The first reason to end is kept: an empty `reason` adds nothing to it.
        """
        row = transition(request.state, trigger, request.ending)
        if row is None:
            return False
        request.state = row.target
        if reason:
            request.reason, request.detail = reason, detail
        self.note(request, now, row.target.value, reason or detail)
        if row.target is State.RECEIVING:
            self.deadlines.set(request, request.expires_at)
        elif row.target is State.DRAINING:
            request.ending, request.drained_from = row.ending, now
            self.deadlines.set(request, self._drain_deadline(request, now))
            self.end_drain_if_safe(request, now)
        else:
            self._end(request, now)
        return True

    def end_all(
        self, engine: Engine, trigger: Trigger, now: float, reason: str, detail: str
    ) -> None:
        """Move every live request of an engine."""
        for request in self.ledger.of_engine(engine.engine_id):
            self.move(request, trigger, now, reason, detail)

    def end_drain_if_safe(self, request: Request, now: float) -> None:
        """End a drain as soon as nobody can write any more."""
        engine = self.engines.by_id[request.key.engine_id]
        if request.state is State.DRAINING and (request.writers_gone or engine.fenced(request)):
            self.move(request, Trigger.WRITERS_GONE, now, "", "no writer is left")

    def release_unused(self, engine: Engine) -> None:
        """Give up lost registrations that no request uses any more."""
        for rank, generation in [slot for slot, users in engine.retiring.items() if not users]:
            del engine.retiring[rank, generation]
            engine.writable.discard((rank, generation))
            self.effects.append(Release(engine.engine_id, rank, generation))

    def note(self, request: Request, now: float, what: str, detail: str) -> None:
        """Add to the request's story, as long as there is room; its beginning is in the record."""
        if len(request.story) < self._settings.max_story - 1:
            request.story.append((now, what, detail))

    def _quiet_at(self, request: Request) -> float:
        earlier = self.ledger.earlier(request)
        if earlier is None:
            return -math.inf
        return earlier.last_word_at + self._settings.sender_retry_window_s

    def _drain_deadline(self, request: Request, now: float) -> float:
        """While prefill runs a writer may still begin; the drain counts from the latest begin."""
        begins_until = now
        if request.prefill is Prefill.RUNNING:
            begins_until = max(now, request.started_at + self._settings.prefill_timeout_s)
        return begins_until + self._settings.drain_s

    def _end(self, request: Request, now: float) -> None:
        request.ended_at = now
        self._counters[_ENDED[request.state]] += 1
        outcome = request.outcome()
        engine = self.engines.by_id[request.key.engine_id]
        if request.log == engine.log.log:
            request.report_seq = engine.log.append(outcome)
        self.effects.append(Report(request, outcome, request.report_seq))
        self.effects.append(Stop(request))
        self.ledger.bury(request)
        self.deadlines.clear(request)
        self.deadlines.sweep(len(self.ledger.live))
        engine.live -= 1
        if engine.retiring:
            for users in engine.retiring.values():
                users.discard(request.key)
            self.release_unused(engine)
        if not (engine.live or engine.sessions):
            self.engines.forget_if_idle(engine)
