"""The core: events in, effects out. It owns every request from submit to its one outcome.

`Core.handle` is the only way in. It never blocks, never reads a clock and raises
nothing on any order, repetition or loss of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from . import events as ev
from . import reasons
from .admission import is_repeat, plainly_new, why_refused
from .effects import Effect, Fence, Refuse, Release, Resend
from .engines import Engine
from .invariants import violations
from .lifecycle import Lifecycle
from .request import Prefill, Request, RequestKey, StoryEntry, Verdict
from .senders import Senders
from .settings import CoreSettings
from .states import State, Trigger
from .story import tell


class Core:
    """The state of the daemon. `counters` counts what happened, by name, since the start."""

    def __init__(self, settings: CoreSettings | None = None) -> None:
        self.settings = settings or CoreSettings()
        self.counters: Counter[str] = Counter()
        self.shutting_down = False
        self._life = Lifecycle(self.settings, self.counters)
        self.engines = self._life.engines
        self.ledger = self._life.ledger
        self.deadlines = self._life.deadlines
        self._senders = Senders(self.settings, self.counters)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            ev.SessionOpened: self._session_opened,
            ev.SessionClosed: self._session_closed,
            ev.RankRegistered: self._rank_registered,
            ev.RankLost: self._rank_lost,
            ev.RankFenced: self._rank_fenced,
            ev.Submit: self._submit,
            ev.Cancel: self._cancel,
            ev.Fulfilled: self._fulfilled,
            ev.Deferred: self._deferred,
            ev.Started: self._started,
            ev.StartFailed: self._start_failed,
            ev.PrefillEnded: self._prefill_ended,
            ev.SenderDone: self._sender_spoke,
            ev.SenderFailed: self._sender_spoke,
            ev.LayersIn: self._layers_in,
            ev.Acknowledged: self._acknowledged,
            ev.ShutdownBegan: self._shutdown_began,
            ev.ShutdownDue: self._shutdown_due,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take one event at time `now` (monotonic, s); return what is to be done, in order."""
        effects: list[Effect] = []
        self._life.effects = effects
        if now >= self.ledger.age_at:
            self.ledger.age(now)
        self._handlers[type(event)](event, now)
        return effects

    def next_deadline(self) -> float | None:
        """When the next `Tick` is due, or None while nothing waits."""
        return self.deadlines.next()

    def story(self, key: RequestKey) -> list[StoryEntry]:
        """What happened to a live or remembered request, with times; empty if unknown."""
        request = self.ledger.find(key)
        return [] if request is None else tell(request)

    def check(self) -> None:
        """Raise AssertionError naming every invariant that does not hold. Linear in requests."""
        broken = violations(self)
        if broken:
            raise AssertionError("; ".join(broken))

    # Sessions and registrations

    def _session_opened(self, event: ev.SessionOpened, now: float) -> None:
        seat = event.seat
        before = self.engines.get(seat.engine_id)
        replaced = before is not None and before.sessions.get(seat) not in (None, event.session)
        if before is not None and replaced and seat.role == "worker" and seat.rank in before.ranks:
            self._lose_rank(before, seat.rank, "its worker started anew", now)
        engine, anew = self.engines.open(event)
        if anew:
            detail = "its scheduler started anew"
            self._life.end_all(engine, Trigger.CANCEL, now, reasons.ENGINE_RESTARTED, detail)
        acknowledged = engine.log.acknowledged.get(seat)
        if acknowledged is not None and engine.log.last > acknowledged:
            self._life.effects.append(Resend(seat, acknowledged + 1))

    def _session_closed(self, event: ev.SessionClosed, now: float) -> None:
        engine = self.engines.get(event.seat.engine_id)
        if engine is None or engine.sessions.get(event.seat) != event.session:
            return
        engine.close(event.seat)
        if event.seat.role == "scheduler":
            self._life.end_all(engine, Trigger.CANCEL, now, reasons.ENGINE_LOST, event.reason)
        elif event.seat.rank in engine.ranks:
            self._lose_rank(engine, event.seat.rank, event.reason, now)
        self.engines.forget_if_idle(engine)

    def _rank_registered(self, event: ev.RankRegistered, now: float) -> None:
        rank, generation = event.rank, event.generation
        engine = self.engines.get(event.engine_id)
        if engine is None or ev.Seat(event.engine_id, "worker", rank) not in engine.sessions:
            # Its worker went away meanwhile; nobody else would ever give it back.
            self._life.effects.append(Release(event.engine_id, rank, generation))
            return
        if engine.ranks.get(rank) == generation or (rank, generation) in engine.retiring:
            return
        if not engine.fresh(rank, generation):
            self.counters["stale_generation"] += 1
            self._life.effects.append(Release(event.engine_id, rank, generation))
            return
        if rank in engine.ranks:
            self._lose_rank(engine, rank, "registered again", now)
        engine.ranks[rank] = engine.newest[rank] = generation
        engine.writable.add((rank, generation))

    def _rank_lost(self, event: ev.RankLost, now: float) -> None:
        engine = self.engines.get(event.engine_id)
        if engine is not None and event.rank in engine.ranks:
            self._lose_rank(engine, event.rank, event.reason, now)
            self.engines.forget_if_idle(engine)

    def _rank_fenced(self, event: ev.RankFenced, now: float) -> None:
        engine = self.engines.get(event.engine_id)
        if engine is None:
            return
        engine.writable.discard((event.rank, event.generation))
        for request in self.ledger.of_engine(event.engine_id):
            self._life.end_drain_if_safe(request, now)

    def _lose_rank(self, engine: Engine, rank: int, why: str, now: float) -> None:
        generation = engine.ranks.pop(rank)
        users = {
            request.key
            for request in self.ledger.of_engine(engine.engine_id)
            if request.announced and request.generation >= generation
        }
        engine.retiring[rank, generation] = users
        self._life.effects.append(Fence(engine.engine_id, rank, generation))
        detail = f"rank {rank}: {why}"
        self._life.end_all(engine, Trigger.MEMORY_LOST, now, reasons.REGISTRATION_LOST, detail)
        self._life.release_unused(engine)

    # The engine's requests

    def _submit(self, event: ev.Submit, now: float) -> None:
        self.counters["submitted"] += 1
        engine = self.engines.get(event.key.engine_id)
        if engine is None:
            detail = f"engine {event.key.engine_id} has no session; say hello first"
            self._refuse(event, reasons.UNKNOWN_ENGINE, detail)
            return
        ledger, settings, stopping = self.ledger, self.settings, self.shutting_down
        if not plainly_new(event, engine, ledger, settings, stopping):
            if is_repeat(event, engine, ledger):
                self.counters["repeated_submit"] += 1
                return
            refusal = why_refused(event, engine, ledger, settings, stopping)
            if refusal is not None:
                self._refuse(event, *refusal)
                return
        limit = settings.request_deadline_s
        timeout = limit if event.timeout_s is None else min(event.timeout_s, limit)
        request = Request(
            event.key,
            event.external_id,
            event.attempt,
            event.blocks,
            event.prompt_tokens,
            event.cached_tokens,
            event.virtual,
            event.params,
            now,
        )
        request.log = engine.log.log
        request.expires_at = now + timeout
        self._life.begin(engine, request, now)

    def _refuse(self, event: ev.Submit, code: str, detail: str) -> None:
        self.counters["refused"] += 1
        self._life.effects.append(Refuse(event.key, event.attempt, code, detail))

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        request = self.ledger.live.get(event.key)
        if request is None or event.attempt not in (None, request.attempt):
            self.counters["cancel_without_request"] += 1
            return
        detail = "the engine cancelled it"
        if not self._life.move(request, Trigger.CANCEL, now, reasons.CANCELLED, detail):
            self._life.note(request, now, "cancel repeated", "it is already draining")

    def _acknowledged(self, event: ev.Acknowledged, now: float) -> None:
        engine = self.engines.get(event.seat.engine_id)
        if (
            engine is None
            or engine.log.log != event.log
            or not engine.log.acknowledge(event.seat, event.seq)
        ):
            self.counters["stray_acknowledge"] += 1

    # The path that a request took

    def _fulfilled(self, event: ev.Fulfilled, now: float) -> None:
        request = self.ledger.handed(event.key, event.attempt)
        if request is not None:
            self._life.move(request, Trigger.FULFILLED, now, event.why, "")

    def _deferred(self, event: ev.Deferred, now: float) -> None:
        request = self.ledger.handed(event.key, event.attempt)
        if request is None or request.state is not State.ACCEPTED or request.reason:
            return
        request.reason = reasons.KV_NOT_REGISTERED
        request.detail = "not every rank of the engine registered its KV memory in time"
        when = min(now + self.settings.registration_deadline_s, request.expires_at)
        self.deadlines.set(request, when)
        self._life.note(request, now, "deferred", "waits for KV registrations")

    def _started(self, event: ev.Started, now: float) -> None:
        request = self.ledger.handed(event.key, event.attempt)
        if request is None or request.state is not State.ACCEPTED:
            return
        self._life.announce(request, event.ranks, event.generation, now)

    def _start_failed(self, event: ev.StartFailed, now: float) -> None:
        request = self.ledger.handed(event.key, event.attempt)
        if request is not None:
            self._life.move(request, Trigger.PATH_FAILED, now, event.reason, event.detail)

    def _prefill_ended(self, event: ev.PrefillEnded, now: float) -> None:
        request = self.ledger.handed(event.key, event.attempt)
        if request is None or request.prefill is not Prefill.RUNNING:
            return
        if not event.over:
            if request.state is State.RECEIVING:
                request.detail = event.detail
            self._life.note(request, now, "prefill out of sight", event.detail)
            return
        request.prefill = Prefill.ENDED if event.ok or event.began else Prefill.NEVER_RAN
        self._life.note(
            request, now, "prefill ended" if event.ok else "prefill failed", event.detail
        )
        if request.state is State.DRAINING:
            self._life.end_drain_if_safe(request, now)
            if request.state is State.DRAINING:
                self.deadlines.set(request, min(request.deadline, now + self.settings.drain_s))
        elif event.ok:
            due = now + self.settings.done_deadline_s
            self.deadlines.set(request, min(request.expires_at, due))
        else:
            self._life.move(
                request, Trigger.PREFILL_FAILED, now, reasons.PREFILL_FAILED, event.detail
            )

    # What producers say

    def _sender_spoke(self, event: ev.SenderDone | ev.SenderFailed, now: float) -> None:
        request = self._senders.addressee(self.ledger, event, now)
        if request is None:
            return
        verdict = Verdict.DONE if isinstance(event, ev.SenderDone) else Verdict.FAILED
        if not self._senders.verdict(request, event, verdict, now):
            return
        said = f"rank {event.rank} of {event.sender}, {event.trans_count} due"
        self._life.note(request, now, f"sender {verdict.value}", said)
        if request.state is State.DRAINING:
            self._life.end_drain_if_safe(request, now)
        elif verdict is Verdict.FAILED:
            detail = f"{event.sender} reported a failed transfer to rank {event.rank}"
            self._life.move(request, Trigger.SENDER_FAILED, now, reasons.SENDER_FAILED, detail)
        elif request.all_done:
            self._life.move(request, Trigger.ALL_DONE, now, reasons.RECEIVED, "")

    def _layers_in(self, event: ev.LayersIn, now: float) -> None:
        request = self._senders.addressee(self.ledger, event, now)
        if request is not None:
            self._senders.layers(request, event, now)

    # Time

    def _shutdown_began(self, event: ev.ShutdownBegan, now: float) -> None:
        self.shutting_down = True

    def _shutdown_due(self, event: ev.ShutdownDue, now: float) -> None:
        self.shutting_down = True
        for engine in list(self.engines.by_id.values()):
            self._life.end_all(
                engine, Trigger.DEADLINE, now, reasons.SHUTDOWN, "the daemon is stopping"
            )

    def _tick(self, event: ev.Tick, now: float) -> None:
        for request in self.deadlines.due(now):
            if request.state is State.DRAINING:
                self._life.move(request, Trigger.DRAIN_DEADLINE, now, "", "writers had their time")
            elif not request.handed and now < request.expires_at:
                self._life.hand_over(request, now)
            elif request.prefill is Prefill.ENDED:
                detail = f"prefill ended, but not every sender said DONE: {_missing(request)}"
                self._life.move(request, Trigger.DEADLINE, now, reasons.DONE_OVERDUE, detail)
            else:
                reason, detail = request.reason or reasons.DEADLINE, request.detail
                self._life.move(
                    request, Trigger.DEADLINE, now, reason, detail or "its time is over"
                )


def _missing(request: Request) -> str:
    progress = request.progress or {}
    parts = []
    for rank in range(request.ranks):
        heard = progress.get(rank)
        if heard is None:
            parts.append(f"rank {rank} heard nobody")
        elif not heard.complete:
            parts.append(f"rank {rank} heard {heard.spoken} of {heard.expected}")
    return ", ".join(parts)
