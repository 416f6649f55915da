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
from .admission import is_repeat, why_refused
from .deadlines import Deadlines
from .effects import Effect, Fence, Refuse, Release, Report, Resend, Start, Stop
from .engines import Engine, Engines
from .invariants import violations
from .ledger import Ledger
from .request import Prefill, Request, RequestKey, StoryEntry, Verdict
from .senders import Senders
from .settings import CoreSettings
from .states import State, Trigger, transition
from .story import tell


class Core:
    """The state of the daemon. `counters` counts what happened, by name, since the start."""

    def __init__(self, settings: CoreSettings | None = None) -> None:
        self.settings = settings or CoreSettings()
        self.engines = Engines()
        self.ledger = Ledger(self.settings.max_tombstones, self.settings.tombstone_age_s)
        self.deadlines = Deadlines()
        self.counters: Counter[str] = Counter()
        self.shutting_down = False
        self._senders = Senders(self.settings, self.counters)
        self._effects: list[Effect] = []
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
        self._effects = effects
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
        engine, anew = self.engines.open(event)
        if anew:
            self._end_all(
                engine, Trigger.CANCEL, now, reasons.ENGINE_RESTARTED, "its scheduler started anew"
            )
        acknowledged = engine.log.acknowledged.get(event.seat)
        if acknowledged is not None and engine.log.last > acknowledged:
            self._effects.append(Resend(event.seat, acknowledged + 1))

    def _session_closed(self, event: ev.SessionClosed, now: float) -> None:
        engine = self.engines.get(event.seat.engine_id)
        if engine is None or engine.sessions.get(event.seat) != event.session:
            return
        engine.close(event.seat)
        if event.seat.role == "scheduler":
            self._end_all(engine, Trigger.CANCEL, now, reasons.ENGINE_LOST, event.reason)
        elif event.seat.rank in engine.ranks:
            self._lose_rank(engine, event.seat.rank, event.reason, now)
        self.engines.forget_if_idle(engine)

    def _rank_registered(self, event: ev.RankRegistered, now: float) -> None:
        engine = self.engines.get(event.engine_id)
        if engine is None:
            self._effects.append(Release(event.engine_id, event.rank, event.generation))
            return
        if event.rank in engine.ranks:
            self._lose_rank(engine, event.rank, "registered again", now)
        engine.ranks[event.rank] = event.generation
        engine.writable.add((event.rank, event.generation))

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
            if request.state is State.DRAINING:
                self._end_drain_if_safe(request, now)

    def _lose_rank(self, engine: Engine, rank: int, why: str, now: float) -> None:
        generation = engine.ranks.pop(rank)
        users = {
            request.key
            for request in self.ledger.of_engine(engine.engine_id)
            if request.state is not State.ACCEPTED
        }
        engine.retiring[rank, generation] = users
        self._effects.append(Fence(engine.engine_id, rank, generation))
        detail = f"rank {rank}: {why}"
        self._end_all(engine, Trigger.MEMORY_LOST, now, reasons.REGISTRATION_LOST, detail)
        self._release_unused(engine)

    def _release_unused(self, engine: Engine) -> None:
        for rank, generation in [slot for slot, users in engine.retiring.items() if not users]:
            del engine.retiring[rank, generation]
            engine.writable.discard((rank, generation))
            self._effects.append(Release(engine.engine_id, rank, generation))

    # The engine's requests

    def _submit(self, event: ev.Submit, now: float) -> None:
        self.counters["submitted"] += 1
        engine = self.engines.get(event.key.engine_id)
        if engine is None:
            detail = f"engine {event.key.engine_id} has no session; say hello first"
            self._refuse(event, reasons.UNKNOWN_ENGINE, detail)
            return
        if is_repeat(event, engine, self.ledger):
            self.counters["repeated_submit"] += 1
            return
        refusal = why_refused(event, engine, self.ledger, self.settings, self.shutting_down)
        if refusal is not None:
            self._refuse(event, *refusal)
            return
        limit = self.settings.request_deadline_s
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
        request.expires_at = now + min(event.timeout_s or limit, limit)
        self.ledger.add(request)
        engine.live += 1
        self.deadlines.set(request, request.expires_at)
        self._note(request, now, "accepted", f"attempt {event.attempt}")
        self._effects.append(Start(request))

    def _refuse(self, event: ev.Submit, code: str, detail: str) -> None:
        self.counters["refused"] += 1
        self._effects.append(Refuse(event.key, event.attempt, code, detail))

    def _cancel(self, event: ev.Cancel, now: float) -> None:
        request = self.ledger.live.get(event.key)
        if request is None or event.attempt not in (None, request.attempt):
            self.counters["cancel_without_request"] += 1
            return
        detail = "the engine cancelled it"
        if not self._move(request, Trigger.CANCEL, now, reasons.CANCELLED, detail):
            self._note(request, now, "cancel repeated", "it is already draining")

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
        request = self.ledger.find_attempt(event.key, event.attempt)
        if request is not None:
            self._move(request, Trigger.FULFILLED, now, event.why, "")

    def _deferred(self, event: ev.Deferred, now: float) -> None:
        request = self.ledger.find_attempt(event.key, event.attempt)
        if request is None or request.state is not State.ACCEPTED:
            return
        request.reason = reasons.KV_NOT_REGISTERED
        request.detail = "not every rank of the engine registered its KV memory in time"
        when = min(now + self.settings.registration_deadline_s, request.expires_at)
        self.deadlines.set(request, when)
        self._note(request, now, "deferred", "waits for KV registrations")

    def _started(self, event: ev.Started, now: float) -> None:
        request = self.ledger.find_attempt(event.key, event.attempt)
        if request is None or request.state is not State.ACCEPTED:
            return
        earlier = self.ledger.ended_external.get((request.key.engine_id, request.external_id))
        if earlier is not None and earlier.started_at and not earlier.writers_gone:
            detail = f"senders of attempt {earlier.attempt} may still answer for this external id"
            self._move(request, Trigger.PATH_FAILED, now, reasons.STALE_WRITERS, detail)
            return
        request.fence = earlier.progress if earlier is not None else None
        request.reason = request.detail = ""
        request.ranks, request.generation = event.ranks, event.generation
        request.started_at = now
        request.prefill = Prefill.RUNNING
        self._move(request, Trigger.STARTED, now, "", f"generation {event.generation}")

    def _start_failed(self, event: ev.StartFailed, now: float) -> None:
        request = self.ledger.find_attempt(event.key, event.attempt)
        if request is not None:
            self._move(request, Trigger.PATH_FAILED, now, event.reason, event.detail)

    def _prefill_ended(self, event: ev.PrefillEnded, now: float) -> None:
        request = self.ledger.find_attempt(event.key, event.attempt)
        if request is None or request.prefill is not Prefill.RUNNING:
            return
        request.prefill = Prefill.ENDED if event.ok or event.began else Prefill.NEVER_RAN
        self._note(request, now, "prefill ended" if event.ok else "prefill failed", event.detail)
        if request.state is State.DRAINING:
            self._end_drain_if_safe(request, now)
            if request.state is State.DRAINING:
                self.deadlines.set(request, min(request.deadline, now + self.settings.drain_s))
        elif event.ok:
            due = now + self.settings.done_deadline_s
            self.deadlines.set(request, min(request.expires_at, due))
        else:
            self._move(request, Trigger.PREFILL_FAILED, now, reasons.PREFILL_FAILED, event.detail)

    # What producers say

    def _sender_spoke(self, event: ev.SenderDone | ev.SenderFailed, now: float) -> None:
        request = self._senders.addressee(self.ledger, event, now)
        if request is None:
            return
        verdict = Verdict.DONE if isinstance(event, ev.SenderDone) else Verdict.FAILED
        if not self._senders.verdict(request, event, verdict, now):
            return
        said = f"rank {event.rank} of {event.sender}, {event.trans_count} due"
        self._note(request, now, f"sender {verdict.value}", said)
        if request.state is State.DRAINING:
            self._end_drain_if_safe(request, now)
        elif verdict is Verdict.FAILED:
            detail = f"{event.sender} reported a failed transfer to rank {event.rank}"
            self._move(request, Trigger.SENDER_FAILED, now, reasons.SENDER_FAILED, detail)
        elif request.all_done:
            self._move(request, Trigger.ALL_DONE, now, reasons.RECEIVED, "")

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
            self._end_all(engine, Trigger.DEADLINE, now, reasons.SHUTDOWN, "the daemon is stopping")

    def _tick(self, event: ev.Tick, now: float) -> None:
        for request in self.deadlines.due(now):
            if request.state is State.DRAINING:
                self._move(request, Trigger.DRAIN_DEADLINE, now, "", "writers had their time")
            elif request.prefill is Prefill.ENDED:
                detail = f"prefill ended, but not every sender said DONE: {_missing(request)}"
                self._move(request, Trigger.DEADLINE, now, reasons.DONE_OVERDUE, detail)
            else:
                reason, detail = request.reason or reasons.DEADLINE, request.detail
                self._move(request, Trigger.DEADLINE, now, reason, detail or "its time is over")
        self.ledger.age(now)

    # Moving

    def _end_all(
        self, engine: Engine, trigger: Trigger, now: float, reason: str, detail: str
    ) -> None:
        for request in self.ledger.of_engine(engine.engine_id):
            self._move(request, trigger, now, reason, detail)

    def _end_drain_if_safe(self, request: Request, now: float) -> None:
        if self._writers_gone(request):
            self._move(request, Trigger.WRITERS_GONE, now, "", "")

    def _writers_gone(self, request: Request) -> bool:
        if request.writers_gone:
            return True
        engine = self.engines.get(request.key.engine_id)
        return engine is not None and engine.fenced(request)

    def _move(
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
        self._note(request, now, row.target.value, reason or detail)
        if row.target is State.RECEIVING:
            self.deadlines.set(request, request.expires_at)
        elif row.target is State.DRAINING:
            request.ending, request.drained_from = row.ending, now
            self.deadlines.set(request, self._drain_deadline(request, now))
            self._end_drain_if_safe(request, now)
        else:
            self._end(request, now)
        return True

    def _drain_deadline(self, request: Request, now: float) -> float:
        """While prefill runs a writer may still begin; the drain counts from the latest begin."""
        begins_until = now
        if request.prefill is Prefill.RUNNING:
            begins_until = max(now, request.started_at + self.settings.prefill_timeout_s)
        return begins_until + self.settings.drain_s

    def _end(self, request: Request, now: float) -> None:
        request.ended_at = now
        self.counters[f"ended_{request.state.value}"] += 1
        outcome = request.outcome()
        engine = self.engines.by_id[request.key.engine_id]
        if request.log == engine.log.log:
            request.report_seq = engine.log.append(outcome)
        self._effects.append(Report(request, outcome, request.report_seq))
        self._effects.append(Stop(request))
        self.ledger.bury(request, now)
        self.deadlines.sweep(len(self.ledger.live))
        engine.live -= 1
        if engine.retiring:
            for users in engine.retiring.values():
                users.discard(request.key)
            self._release_unused(engine)
        if not engine.live:
            self.engines.forget_if_idle(engine)

    def _note(self, request: Request, now: float, what: str, detail: str) -> None:
        if len(request.story) < self.settings.max_story:
            request.story.append(StoryEntry(now, what, detail))


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
